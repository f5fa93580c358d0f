"""New tokens before attention over latents: queries in the space of the latents, and what is cached of a token.

One launch. Programs of the product take the plain part of a head's queries through that head's key matrix; programs
of their own rotate queries and key, normalize the latent and write into the cache. Where nothing is rotated, and
nothing stored since the latents are another layer's, there are none of these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import (
    FP8_MAX,
    INT8_MAX,
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)
from penstock.engine.backends.cuda.kernels.latent_tile import precision
from penstock.engine.backends.interface import AttentionBatch, LatentLayout, LatentWeights


@triton.jit
def _absorb(
    q_ptr: tl.tensor,
    up_ptr: tl.tensor,
    query_ptr: tl.tensor,
    pid: tl.tensor,
    q_stride: tl.tensor,
    tokens: tl.tensor,
    tiles: tl.tensor,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    PLAIN: tl.constexpr,
    PLAIN_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The plain part of one head's queries, taken into a run of the latents' dimensions."""
    CACHED: tl.constexpr = LATENT + ROTARY
    t = pid % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    head = pid // tiles % HEADS
    r = pid // (tiles * HEADS) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, PLAIN_BLOCK)
    row = t.to(tl.int64)
    # Weights are constants: they may be under way before the queries are there.
    w_at = up_ptr + head.to(tl.int64) * (PLAIN + VALUE) * LATENT + d[:, None] * LATENT + r[None, :]
    w = tl.load(w_at, mask=(d < PLAIN)[:, None] & (r < LATENT)[None, :], other=0.0)
    wait_for_inputs(PDL)
    x_at = q_ptr + (row * q_stride + head * (PLAIN + ROTARY))[:, None] + d[None, :]
    x = tl.load(x_at, mask=(t < tokens)[:, None] & (d < PLAIN)[None, :], other=0.0)
    made = tl.dot(x, w, input_precision=PRECISION)
    to = query_ptr + ((row * HEADS + head) * CACHED)[:, None] + r[None, :]
    tl.store(to, made.to(query_ptr.dtype.element_ty), mask=(t < tokens)[:, None] & (r < LATENT)[None, :])


@triton.jit
def _turn_and_store(
    q_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    query_ptr: tl.tensor,
    token: tl.tensor,
    q_stride: tl.tensor,
    kv_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
    INT8: tl.constexpr,
    STORED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One token: its queries rotated; if it is STORED, its latent normalized, its key rotated, and both stored."""
    HALF: tl.constexpr = ROTARY // 2
    CACHED: tl.constexpr = LATENT + ROTARY
    position = tl.load(positions_ptr + token)
    i = tl.arange(0, HALF_BLOCK)
    in_half = i < HALF
    cos = tl.load(cos_sin_ptr + position * ROTARY + i, mask=in_half, other=1.0)
    sin = tl.load(cos_sin_ptr + position * ROTARY + HALF + i, mask=in_half, other=0.0)
    wait_for_inputs(PDL)
    first = 2 * i if INTERLEAVED else i
    second = 2 * i + 1 if INTERLEAVED else HALF + i

    h = tl.arange(0, HEAD_BLOCK)
    mask = (h < HEADS)[:, None] & in_half[None, :]
    source = q_ptr + token * q_stride + (h * (PLAIN + ROTARY) + PLAIN)[:, None]
    low = tl.load(source + first[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + second[None, :], mask=mask, other=0.0).to(tl.float32)
    to = query_ptr + (token * HEADS + h)[:, None] * CACHED + LATENT + i[None, :]
    kind = query_ptr.dtype.element_ty
    tl.store(to, (low * cos[None, :] - high * sin[None, :]).to(kind), mask=mask)
    tl.store(to + HALF, (high * cos[None, :] + low * sin[None, :]).to(kind), mask=mask)

    if STORED:
        r = tl.arange(0, LATENT_BLOCK)
        in_latent = r < LATENT
        gain = tl.load(norm_ptr + r, mask=in_latent, other=0.0).to(tl.float32)
        slot = tl.load(slots_ptr + token)
        x = tl.load(kv_ptr + token * kv_stride + r, mask=in_latent, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / LATENT + eps)
        x = (x * gain).to(kind).to(tl.float32)
        key = kv_ptr + token * kv_stride + LATENT
        low = tl.load(key + first, mask=in_half, other=0.0).to(tl.float32)
        high = tl.load(key + second, mask=in_half, other=0.0).to(tl.float32)
        turned = (low * cos - high * sin).to(kind).to(tl.float32)
        turned_high = (high * cos + low * sin).to(kind).to(tl.float32)
        if INT8:
            peak = tl.maximum(tl.max(tl.abs(turned), axis=0), tl.max(tl.abs(turned_high), axis=0))
            peak = tl.maximum(peak, tl.max(tl.abs(x), axis=0))
            scale = (peak / INT8_MAX).to(scale_ptr.dtype.element_ty)
            tl.store(scale_ptr + slot, scale)
            divisor = tl.where(scale > 0, scale.to(tl.float32), 1.0)
            x = tl.clamp(tl.floor(x / divisor + 0.5), -INT8_MAX, INT8_MAX)
            turned = tl.clamp(tl.floor(turned / divisor + 0.5), -INT8_MAX, INT8_MAX)
            turned_high = tl.clamp(tl.floor(turned_high / divisor + 0.5), -INT8_MAX, INT8_MAX)
        elif SCALED:
            divisor = tl.load(scale_ptr)
            x = tl.clamp(x / divisor, -FP8_MAX, FP8_MAX)
            turned = tl.clamp(turned / divisor, -FP8_MAX, FP8_MAX)
            turned_high = tl.clamp(turned_high / divisor, -FP8_MAX, FP8_MAX)
        stored = cache_ptr + slot * CACHED
        kept = cache_ptr.dtype.element_ty
        tl.store(stored + r, x.to(kept), mask=in_latent)
        tl.store(stored + LATENT + i, turned.to(kept), mask=in_half)
        tl.store(stored + LATENT + HALF + i, turned_high.to(kept), mask=in_half)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _prepare_kernel(
    q_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    up_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    query_ptr: tl.tensor,
    q_stride: tl.tensor,
    kv_stride: tl.tensor,
    eps: tl.tensor,
    tokens: tl.tensor,
    tiles: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
    PLAIN_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
    INT8: tl.constexpr,
    STORED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    COLUMNS: tl.constexpr = (LATENT + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    launch_successor(PDL)
    products = tiles * HEADS * COLUMNS
    if pid < products:
        _absorb(
            q_ptr, up_ptr, query_ptr, pid, q_stride, tokens, tiles,
            HEADS, LATENT, PLAIN, PLAIN_BLOCK, ROTARY, VALUE, BLOCK_T, BLOCK_R, PRECISION, PDL,
        )  # fmt: skip
    else:
        token = (pid - products).to(tl.int64)
        _turn_and_store(
            q_ptr, kv_ptr, norm_ptr, cos_sin_ptr, positions_ptr, slots_ptr, cache_ptr, scale_ptr, query_ptr, token,
            q_stride, kv_stride, eps, HEADS, HEAD_BLOCK, LATENT, LATENT_BLOCK, PLAIN, ROTARY, HALF_BLOCK, INTERLEAVED,
            SCALED, INT8, STORED, PDL,
        )  # fmt: skip


def prepare(
    q: Tensor,
    kv: Tensor | None,
    layout: LatentLayout,
    weights: LatentWeights,
    cos_sin: Tensor,
    batch: AttentionBatch,
    cache: Tensor,
    scales: Tensor | None,
    *,
    fixed: bool = False,
    pdl: bool = False,
) -> Tensor:
    """Store the new tokens, where `kv` has some; the queries in the space of what is cached, [T, heads, latent +
    rotary]. `fixed`: sums of a token do not depend on how many there are."""
    tokens = q.shape[0]
    query = torch.empty((tokens, layout.heads, layout.cached), dtype=q.dtype, device=q.device)
    block_t = 16 if tokens <= 16 or fixed else 32 if tokens <= 256 else 64
    block_r = max(16, min(64, next_power_of_2(layout.latent)))
    tiles = ceil_div(tokens, block_t)
    products = tiles * layout.heads * ceil_div(layout.latent, block_r)
    launch(
        _prepare_kernel,
        (products + (0 if kv is None and not layout.rotary else tokens),),
        q,
        q if kv is None else kv,
        weights.up,
        weights.norm,
        cos_sin,
        batch.positions,
        batch.slots,
        cache,
        cos_sin if scales is None else scales,
        query,
        q.stride(0),
        q.stride(0) if kv is None else kv.stride(0),
        weights.eps,
        tokens,
        tiles,
        HEADS=layout.heads,
        HEAD_BLOCK=next_power_of_2(layout.heads),
        LATENT=layout.latent,
        LATENT_BLOCK=next_power_of_2(layout.latent),
        PLAIN=layout.plain,
        PLAIN_BLOCK=max(16, next_power_of_2(layout.plain)),
        ROTARY=layout.rotary,
        HALF_BLOCK=next_power_of_2(layout.rotary // 2),
        VALUE=layout.value,
        BLOCK_T=block_t,
        BLOCK_R=block_r,
        INTERLEAVED=layout.interleaved,
        SCALED=scales is not None,
        INT8=cache.dtype == torch.int8,
        STORED=kv is not None,
        PRECISION=precision(q),
        num_warps=4,
        pdl=pdl,
    )
    return query
