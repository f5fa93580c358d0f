"""Norms of all queries and all keys of a token, and norms that only add, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attention_cases import layout, ops
from gpu_harness import MODE, Row, bandwidth, check, check_rounded, poisoned_outputs, rand, time_us
from torch import Tensor

from penstock.engine.backends.cuda.kernels.addends import Addends
from penstock.engine.backends.interface import HeadLayout

SHAPES = ((4, 2, 16), (5, 5, 24), (40, 8, 128))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-6


def rows64(qkv: Tensor, heads: HeadLayout, norms: tuple[Tensor, Tensor], factor: float = 1.0) -> Tensor:
    """`factor`: of the mean squares."""
    q, k = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    parts = list(qkv.double().split([q, k, k], dim=1))
    for index, weight in enumerate(norms):
        mean = parts[index].pow(2).mean(-1, keepdim=True) * factor
        parts[index] = parts[index] * torch.rsqrt(mean + EPS) * weight.double()
    return torch.cat(parts, dim=1)


def test_rows_are_normalized_in_place() -> None:
    for shape in SHAPES:
        for dtype in DTYPES:
            heads = layout(*shape)
            q, k = shape[0] * shape[2], shape[1] * shape[2]
            norms = rand(q, dtype=dtype), rand(k, dtype=dtype)
            for tokens in (1, 5):
                qkv = rand(tokens, q + 2 * k, dtype=dtype, scale=3)
                want = rows64(qkv, heads, norms)
                with poisoned_outputs():
                    got = ops.norm_rows(qkv, heads, *norms, EPS, None)
                if MODE == "compile":
                    continue
                assert got is qkv
                check(f"norm_rows {shape} {dtype} {tokens}", got, want)
    heads, dtype = layout(4, 2, 16), torch.float32
    norms = rand(64, dtype=dtype), rand(32, dtype=dtype)
    qkv = rand(3, 128, dtype=dtype)
    want = rows64(qkv, heads, norms, 2.0)
    got = ops.norm_rows(qkv, heads, *norms, EPS, lambda means: means * 2)
    if MODE != "compile":
        check("means of all ranks", got, want)


def test_adapters_are_added_before_rows_are_normalized() -> None:
    heads, dtype = layout(4, 2, 16), torch.float32
    norms = rand(64, dtype=dtype), rand(32, dtype=dtype)
    base, delta = rand(3, 128, dtype=dtype), rand(3, 128, dtype=dtype)
    delta[1] = float("nan")
    ranks = torch.tensor([8, 0, 4], dtype=torch.int32, device=base.device)
    whole = base + torch.where(ranks.unsqueeze(1) > 0, delta, 0.0)
    want = rows64(whole, heads, norms)
    got = ops.norm_rows(Addends(base, delta, ranks), heads, *norms, EPS, None)
    if MODE != "compile":
        check("adapters", got, want)


def test_a_part_without_a_norm_before_it_reads_the_sum() -> None:
    for dtype in DTYPES:
        for hidden in (64, 576):
            x, residual = rand(3, hidden, dtype=dtype), rand(3, hidden, dtype=dtype)
            x_weight = rand(hidden, dtype=dtype)
            wide = x.double()
            added = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * x_weight.double()
            want, before = residual.double() + added, residual.clone()
            with poisoned_outputs():
                first = ops.rms_norm(residual, None, EPS)
                got = ops.add_rms_norm(x, residual, None, EPS, x_weight)
            if MODE == "compile":
                continue
            check_rounded(f"copy {dtype}", first, before)
            check(f"sum {dtype} {hidden}", got, want)
            check_rounded(f"residual {dtype} {hidden}", residual, got)


def bench_row_norm() -> Iterator[Row]:
    heads = layout(40, 8, 128)
    norms = rand(5120, dtype=torch.bfloat16), rand(1024, dtype=torch.bfloat16)
    for tokens in (1, 64, 8192):
        inputs = [rand(tokens, 7168, dtype=torch.bfloat16) for _ in range(4)]
        us = time_us([lambda x=x: ops.norm_rows(x, heads, *norms, EPS, None) for x in inputs])
        yield bandwidth(f"norm_rows {tokens}", us, 2 * tokens * 6144 * 2)
