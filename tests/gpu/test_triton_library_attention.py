"""The attention that models of the transformers library call: on the device against plain PyTorch on the CPU.

The library itself is not needed: what it calls is called here, with head sizes that no family has.
"""

from __future__ import annotations

import dataclasses

import torch
from attention_cases import BLOCK, FP8, INT8, ops
from gpu_harness import DEVICE, MODE, QUICK, check, rand

from penstock.engine.backends.interface import AttentionBatch, HeadLayout
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.models.transformers.attention import PagedCalls, Site, cached_dim

CPU = torch.device("cpu")
CHUNKS = (11, 1, 20, 1)


def site(heads: int, kv_heads: int, key_dim: int, value_dim: int, window: int | None = None) -> Site:
    dim = cached_dim(key_dim, value_dim)
    return Site("m", HeadLayout(heads, kv_heads, dim, key_dim**-0.5, window), key_dim, value_dim)


def chunk(begin: int, end: int, device: torch.device) -> AttentionBatch:
    whole = AttentionBatch.of_one(end, BLOCK, device)
    return dataclasses.replace(
        whole,
        positions=whole.positions[begin:],
        slots=whole.slots[begin:],
        query_starts=torch.tensor([0, end - begin], dtype=torch.int32, device=device),
        num_decodes=int(end - begin == 1),
        max_query=end - begin,
        max_context=sum(CHUNKS),
    )


def run(one: Site, dtype: torch.dtype, kv_dtype: torch.dtype, tolerance: float) -> None:
    kinds = (one.cache_kind(BLOCK, kv_dtype),)
    blocks = -(-sum(CHUNKS) // BLOCK) + 1
    there, here = (KVCache(CacheShape(kinds, BLOCK), blocks, device) for device in (DEVICE, CPU))
    fast, plain = PagedCalls([one], ops, DEVICE), PagedCalls([one], ReferenceOps(), CPU)
    begin = 0
    for count in CHUNKS:
        end, heads = begin + count, one.heads
        q = rand(1, heads.heads, count, one.key_dim, dtype=dtype)
        k = rand(1, heads.kv_heads, count, one.key_dim, dtype=dtype)
        v = rand(1, heads.kv_heads, count, one.value_dim, dtype=dtype)
        fast.begin(chunk(begin, end, DEVICE), there)
        got = fast.attend(None, q, k, v, None, {})
        if MODE != "compile":
            plain.begin(chunk(begin, end, CPU), here)
            want = plain.attend(None, q.cpu(), k.cpu(), v.cpu(), None, {})
            check(f"{one.heads} {dtype} in {kv_dtype}, tokens from {begin}", got, want, tolerance)
        begin = end


def test_any_head_size() -> None:
    sizes = [(4, 2, 20, 20), (4, 4, 24, 16)]
    if MODE == "device":  # heads of 320 are attended to in plain PyTorch there
        sizes += [(8, 2, 80, 80), (6, 1, 96, 64), (4, 4, 72, 72), (3, 3, 15, 15), (2, 2, 320, 320)]
    for shape in sizes:
        run(site(*shape), torch.float32, torch.float32, 1e-4)
        run(site(*shape), torch.bfloat16, torch.bfloat16, 2e-2)


def test_windows_and_few_bit_caches() -> None:
    run(site(4, 2, 20, 20, window=7), torch.float32, torch.float32, 1e-4)
    for kv_dtype in (INT8,) if QUICK else (FP8, INT8):  # the interpreter cuts to FP8 where a GPU rounds
        run(site(4, 2, 32, 32), torch.bfloat16, kv_dtype, 4e-2)
