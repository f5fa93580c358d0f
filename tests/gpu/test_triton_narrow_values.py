"""Heads of values smaller than those of keys (MiMo-V2-Flash) on CUDA: padded in the cache, cut out of what attention
gives; also where adapters' part of a row stands beside the model's own."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from attention_cases import DTYPES, Case, build, layout
from gpu_harness import DEVICE, MODE, QUICK, TOLERANCE, check, rand
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.engine.backends.cuda.kernels.addends import Addends  # noqa: E402
from penstock.engine.backends.cuda.ops import TritonOps  # noqa: E402
from penstock.engine.backends.reference.ops import ReferenceOps  # noqa: E402
from penstock.engine.kv.kinds import PagedKVCache  # noqa: E402
from penstock.engine.models.layers.narrow_values import NarrowValueAttention  # noqa: E402

SCALE = 0.707
SHAPES = [(4, 2, 24, 16)] if QUICK else [(4, 2, 24, 16), (16, 2, 192, 128)]
"""Heads, KV heads, size of a head of keys and of values."""
ops = TritonOps(DEVICE)


def attended(by: Any, qkv: Any, case: Case, table: Tensor, value_dim: int) -> Tensor:
    mixer: Any = NarrowValueAttention(
        ops=by,
        attention_ops=by,
        qkv=None,  # type: ignore[arg-type]  # what lies between the linears is called alone
        output=None,  # type: ignore[arg-type]
        heads=case.layout,
        cos_sin=table,
        sinks=case.sinks,
        value_dim=value_dim,
        value_scale=SCALE,
    )
    out: Tensor = mixer.attend(qkv, case.batch, PagedKVCache(case.k_cache.clone(), case.v_cache.clone(), None))
    return out


def test_attention_is_that_of_the_reference() -> None:
    queries, contexts = ([1, 1, 5, 20], [3, 40, 5, 44]) if QUICK else ([1, 1, 7, 300], [300, 2100, 7, 400])
    tokens = sum(queries)
    ranks = (torch.arange(tokens, device=DEVICE) % 3).int()
    for (heads, kv_heads, dim, value_dim), window, dtype in product(SHAPES, (None, 24), DTYPES):
        case = build(queries, contexts, layout(heads, kv_heads, dim, window), dtype, sinks=window is not None)
        row, more = (rand(tokens, (heads + kv_heads) * dim + kv_heads * value_dim, dtype=dtype) for _ in range(2))
        both = row + torch.where(ranks.unsqueeze(1) > 0, more, 0)
        angles = torch.rand(4096, dim // 6, device=DEVICE) * 6
        table = torch.cat((angles.cos(), angles.sin()), dim=1)
        got = [attended(ops, qkv, case, table, value_dim) for qkv in (row.clone(), Addends(row.clone(), more, ranks))]
        if MODE == "compile":
            continue
        for name, found, qkv in zip(("alone", "with adapters"), got, (row, both), strict=True):
            wanted = attended(ReferenceOps(), qkv, case, table, value_dim)
            assert found.shape == (tokens, heads * value_dim) and found.is_contiguous()
            check(f"{name} {case.layout}", found, wanted.double(), TOLERANCE[dtype])
