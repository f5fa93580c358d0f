"""Rotary embedding with the cache write, against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from attention_cases import BLOCK, FP8, INT8, LLAMA, SHAPES, Case, build, layout, ops, widened
from gpu_harness import (
    DEVICE,
    MODE,
    QUICK,
    TOLERANCE,
    Row,
    bandwidth,
    check,
    check_equal,
    poisoned_outputs,
    rand,
    time_us,
)
from torch import Tensor


def rope64(case: Case, qkv: Tensor, cos_sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float) -> list[Tensor]:
    layout = case.layout
    rows = qkv.double().view(qkv.shape[0], -1, layout.head_dim)
    q, k, v = rows.split([layout.heads, layout.kv_heads, layout.kv_heads], dim=1)
    if norms is not None and layout.centred_norms:
        q, k = (x - x.mean(-1, keepdim=True) for x in (q, k))
    if norms is not None:
        q, k = (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w.double()
            for x, w in zip((q, k), norms, strict=True)
        )
    cos, sin = cos_sin[case.batch.positions].double().unsqueeze(1).chunk(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        half = cos.shape[-1]
        if layout.interleaved:
            low, high, rest = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]
            turned = torch.stack((low * cos - high * sin, high * cos + low * sin), dim=-1).flatten(-2)
            return torch.cat((turned, rest), dim=-1)
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)

    return [rotate(q), rotate(k), v]


def test_a_prefix_of_an_adapter_takes_the_place_of_what_was_computed() -> None:
    """See `engine.adapters.prefixes`: two sequences begin with virtual tokens, one of them with others before it."""
    from penstock.engine.adapters.prefixes import PrefixBank, PrefixOps, StoredPrefix

    heads, kv_heads, dim = SHAPES[0]
    for dtype, kv_dtype in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, INT8)):
        case = build([1, 5, 9], [30, 5, 12], layout(heads, kv_heads, dim), dtype, kv_dtype)
        tokens = case.q.shape[0]
        qkv, cos_sin = rand(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype), rand(64, dim)
        prefix = rand(1, 7, 2 * kv_heads * dim, dtype=dtype)
        bank = PrefixBank(2, DEVICE)
        bank.put(1, StoredPrefix(prefix))
        slots = np.array([0] + [1] * 5 + [1] * 9, np.int32)
        bank.begin(slots)
        norms = (rand(dim, dtype=dtype), rand(dim, dtype=dtype))
        with poisoned_outputs():
            q = PrefixOps(ops, bank, 0).rope_and_cache(
                qkv.clone(), case.layout, cos_sin, case.batch, case.k_cache, case.v_cache, *norms, 1e-6, case.scales
            )
        if MODE == "compile":
            continue
        want_q, want_k, want_v = rope64(case, qkv, cos_sin, norms, 1e-6)
        positions = case.batch.positions
        own = torch.from_numpy(slots == 1).to(DEVICE) & (positions < 7)
        assert int(own.sum()) == 5 + 4, "of the second sequence those from position 3 on"
        stored = prefix[0][positions[own]].double().view(-1, 2, kv_heads, dim)
        want_k[own], want_v[own] = stored[:, 0], stored[:, 1]
        name = f"prefix {dtype} {kv_dtype}"
        check(f"{name} q", q, want_q)
        block, offset = case.batch.slots // BLOCK, case.batch.slots % BLOCK
        limit = {INT8: 2.5e-2}.get(kv_dtype, TOLERANCE[dtype])
        for kind, cache, want, scale in zip(
            "kv", (case.k_cache, case.v_cache), (want_k, want_v), case.scales or (None, None), strict=True
        ):
            check(f"{name} {kind}", widened(cache, scale)[block, :, offset], want, limit)


def test_rope_and_cache() -> None:
    for heads, kv_heads, dim in SHAPES:
        for dtype, kv_dtype in (
            (torch.bfloat16, torch.bfloat16),
            (torch.float16, torch.float16),
            (torch.float32, torch.float32),
            (torch.bfloat16, FP8),
            (torch.bfloat16, INT8),
        ):
            for normed in (False, True):
                case = build([1, 1, 5, 9], [30, 1, 20, 9], layout(heads, kv_heads, dim), dtype, kv_dtype)
                tokens = case.q.shape[0]
                qkv = rand(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
                cos_sin = rand(64, dim // 8 * 6 if dtype == torch.float16 else dim)  # some rotate a part of each head
                norms = (rand(dim, dtype=dtype), rand(dim, dtype=dtype)) if normed else None
                before = case.k_cache.clone()
                with poisoned_outputs():
                    q = ops.rope_and_cache(
                        qkv.clone(),
                        case.layout,
                        cos_sin,
                        case.batch,
                        case.k_cache,
                        case.v_cache,
                        *(norms or (None, None)),
                        1e-6,
                        case.scales,
                    )
                if MODE == "compile":
                    continue
                want_q, want_k, want_v = rope64(case, qkv, cos_sin, norms, 1e-6)
                name = f"rope {heads}/{kv_heads}x{dim} {dtype} {kv_dtype} norm={normed}"
                check(f"{name} q", q, want_q)
                block, offset = case.batch.slots // BLOCK, case.batch.slots % BLOCK
                limit = {FP8: 6.5e-2, INT8: 2.5e-2}.get(kv_dtype, TOLERANCE[dtype])
                for kind, cache, want, scale in zip(
                    "kv",
                    (case.k_cache, case.v_cache),
                    (want_k, want_v),
                    case.scales or (None, None),
                    strict=True,
                ):
                    got = widened(cache, scale)[block, :, offset]
                    check(f"{name} {kind}", got, want, limit)
                untouched = torch.ones(before.shape[0] * BLOCK, dtype=torch.bool, device=DEVICE)
                untouched[case.batch.slots] = False
                a = before.view(torch.uint8).transpose(1, 2).reshape(untouched.numel(), -1)[untouched]
                b = case.k_cache.view(torch.uint8).transpose(1, 2).reshape(untouched.numel(), -1)[untouched]
                check_equal(f"{name}: other slots", b, a)


def test_normed_values_and_what_rows_have_not() -> None:
    """Gemma 4: values are normalized, may be keys as they are projected, and some rows are queries alone."""
    for heads, kv_heads, dim in SHAPES[:1] if QUICK else (*SHAPES, (8, 2, 512)):
        for dtype, kv_dtype in (
            (torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.float32),
            (torch.bfloat16, INT8),
        ):
            for shared in ("", "values", "both"):
                of = dataclasses.replace(layout(heads, kv_heads, dim), normed_values=True, shared=shared)
                case = build([1, 1, 5, 9], [30, 1, 20, 9], of, dtype, kv_dtype)
                qkv, cos_sin = rand(case.q.shape[0], of.rows * dim, dtype=dtype), rand(64, dim)
                norms = (rand(dim, dtype=dtype), rand(dim, dtype=dtype))
                before = case.k_cache.clone(), case.v_cache.clone()
                with poisoned_outputs():
                    q = ops.rope_and_cache(
                        qkv.clone(), of, cos_sin, case.batch, case.k_cache, case.v_cache, norms[0],
                        None if shared == "both" else norms[1], 1e-6, case.scales,
                    )  # fmt: skip
                if MODE == "compile":
                    continue
                own = qkv.view(len(qkv), of.rows, dim)
                keys = own[:, heads : heads + kv_heads] if shared != "both" else own[:, :kv_heads]
                values = keys if shared else own[:, heads + kv_heads :]
                rows = torch.cat((own[:, :heads], keys, values), 1).flatten(1)
                want_q, want_k, want_v = rope64(case, rows, cos_sin, norms, 1e-6)
                want_v = want_v * torch.rsqrt(want_v.pow(2).mean(-1, keepdim=True) + 1e-6)
                name = f"rope {heads}/{kv_heads}x{dim} {dtype} {kv_dtype} shared={shared}"
                check(f"{name} q", q, want_q)
                if shared == "both":
                    for cache, was in zip((case.k_cache, case.v_cache), before, strict=True):
                        check_equal(f"{name}: nothing stored", cache.view(torch.uint8), was.view(torch.uint8))
                    continue
                block, offset = case.batch.slots // BLOCK, case.batch.slots % BLOCK
                limit = {INT8: 2.5e-2}.get(kv_dtype, TOLERANCE[dtype])
                for kind, cache, want, scale in zip(
                    "kv", (case.k_cache, case.v_cache), (want_k, want_v), case.scales or (None, None), strict=True
                ):
                    check(f"{name} {kind}", widened(cache, scale)[block, :, offset], want, limit)


def test_neighbouring_pairs_and_layer_norms() -> None:
    for heads, kv_heads, dim in SHAPES[:1] if QUICK else SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            for rotary in (dim // 2,) if QUICK else (2, dim // 2, dim):
                for centred in (False, True):
                    heads_of = dataclasses.replace(
                        layout(heads, kv_heads, dim), interleaved=True, centred_norms=centred
                    )
                    case = build([1, 1, 5, 9], [30, 1, 20, 9], heads_of, dtype)
                    qkv = rand(case.q.shape[0], (heads + 2 * kv_heads) * dim, dtype=dtype)
                    cos_sin = rand(64, rotary)
                    norms = (rand(heads, dim, dtype=dtype), rand(kv_heads, dim, dtype=dtype)) if centred else None
                    with poisoned_outputs():
                        q = ops.rope_and_cache(
                            qkv.clone(), heads_of, cos_sin, case.batch, case.k_cache, case.v_cache,
                            *(norms or (None, None)), 1e-6,
                        )  # fmt: skip
                    if MODE == "compile":
                        continue
                    want_q, want_k, _ = rope64(case, qkv, cos_sin, norms, 1e-6)
                    name = f"rope {heads}/{kv_heads}x{dim} {dtype} rotary={rotary} layer norm={centred}"
                    check(f"{name} q", q, want_q)
                    block, offset = case.batch.slots // BLOCK, case.batch.slots % BLOCK
                    check(f"{name} k", case.k_cache[block, :, offset], want_k)


def bench_rope() -> Iterator[Row]:
    for tokens in (1, 64, 256, 8192):
        count, context = (tokens, 512) if tokens <= 256 else (8, 1024)
        queries = [1 if tokens <= 256 else 1024] * count
        case = build(queries, [context] * count, LLAMA, torch.bfloat16)
        cos_sin = rand(2048, 128)
        inputs = [rand(tokens, 48 * 128, dtype=torch.bfloat16) for _ in range(4)]
        us = time_us(
            [
                lambda x=x, c=case, t=cos_sin: ops.rope_and_cache(
                    x, LLAMA, t, c.batch, c.k_cache, c.v_cache, None, None, 1e-6
                )
                for x in inputs
            ]
        )
        yield bandwidth(f"rope_and_cache {tokens}", us, 2 * tokens * 48 * 128 * 2)
