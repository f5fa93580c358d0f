"""Rotary embedding of queries and keys, their optional per-head norm, and the write into the KV cache: one launch.

A program owns a few heads of one token. Queries, keys and values share the packed row, so a program may hold heads
of several kinds: what differs per kind is selected by lane, never by branching.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.addends import Addends, parts, second
from penstock.engine.backends.cuda.kernels.common import (
    FP8_MAX,
    INT8_MAX,
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)
from penstock.engine.backends.cuda.kernels.head_gate import GatedRows
from penstock.engine.backends.interface import AttentionBatch, HeadLayout, KeySmoothing


@triton.jit
def _gain(
    norm_ptr: tl.tensor,
    head: tl.tensor,
    at: tl.tensor,
    normed: tl.tensor,
    in_half: tl.tensor,
    DIM: tl.constexpr,
    PER_HEAD: tl.constexpr,
) -> tl.tensor:
    """Norm weights of dimensions `at`, shared by all heads or those of each."""
    if PER_HEAD:
        mask = normed[:, None] & in_half[None, :]
        gain = tl.load(norm_ptr + head[:, None] * DIM + at[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        gain = tl.load(norm_ptr + at, mask=in_half, other=0.0).to(tl.float32)[None, :]
    return gain


@triton.jit
def _rope_kernel(
    qkv_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    centre_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    delta_ranks_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    SCALED: tl.constexpr,
    INT8: tl.constexpr,
    SMOOTHED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CENTRED: tl.constexpr,
    NORMED_VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    DELTA: tl.constexpr,
    GATES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    HALF: tl.constexpr = DIM // 2
    TURNING: tl.constexpr = ROTARY // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    cols = tl.arange(0, HALF_BLOCK)
    in_half = cols < HALF
    # Lane i holds dimension i and its partner; dimensions that are not rotated fill the lanes behind.
    low_at = cols
    high_at = HALF + cols
    if INTERLEAVED:
        low_at = 2 * cols
        high_at = 2 * cols + 1
    elif ROTARY < DIM:
        low_at = tl.where(cols < TURNING, cols, TURNING + cols)
        high_at = tl.where(cols < TURNING, TURNING + cols, HALF + cols)
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    mask = (head < HEADS + 2 * KV_HEADS)[:, None] & in_half[None, :]

    launch_successor(PDL)
    if DELTA:
        rank = tl.load(delta_ranks_ptr + token)
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    table = cos_sin_ptr + position * ROTARY + cols
    cos = tl.load(table, mask=cols < TURNING, other=1.0)[None, :]
    sin = tl.load(table + TURNING, mask=cols < TURNING, other=0.0)[None, :]
    if Q_NORM:
        q_gain_low = _gain(q_norm_ptr, head, low_at, is_q, in_half, DIM, CENTRED)
        q_gain_high = _gain(q_norm_ptr, head, high_at, is_q, in_half, DIM, CENTRED)
    if K_NORM:
        k_gain_low = _gain(k_norm_ptr, head - HEADS, low_at, is_k, in_half, DIM, CENTRED)
        k_gain_high = _gain(k_norm_ptr, head - HEADS, high_at, is_k, in_half, DIM, CENTRED)
    wait_for_inputs(PDL)
    place = head
    if ROWS < HEADS + 2 * KV_HEADS:  # values are keys as they are projected
        place = tl.where(is_v, head - KV_HEADS, head)
    if GATES:  # each query is followed by the gate of its head
        place = head + tl.minimum(head, HEADS)
    source = qkv_ptr + token * qkv_stride + place[:, None] * DIM
    low = tl.load(source + low_at[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + high_at[None, :], mask=mask, other=0.0).to(tl.float32)
    if DELTA:
        more = delta_ptr + (token * ROWS + (place if ROWS < HEADS + 2 * KV_HEADS else head))[:, None] * DIM
        low += second(more + low_at[None, :], mask, rank)
        high += second(more + high_at[None, :], mask, rank)

    if Q_NORM or K_NORM or NORMED_VALUES:
        shifted_low = low
        shifted_high = high
        if CENTRED:
            mean = (tl.sum(low, axis=1) + tl.sum(high, axis=1)) / DIM
            shifted_low = tl.where(mask, low - mean[:, None], 0.0)
            shifted_high = tl.where(mask, high - mean[:, None], 0.0)
        square = tl.sum(shifted_low * shifted_low, axis=1) + tl.sum(shifted_high * shifted_high, axis=1)
        inverse = tl.rsqrt(square / DIM + eps)
        if Q_NORM:
            lane = is_q[:, None]
            low = tl.where(lane, shifted_low * inverse[:, None] * q_gain_low, low)
            high = tl.where(lane, shifted_high * inverse[:, None] * q_gain_high, high)
        if K_NORM:
            lane = is_k[:, None]
            low = tl.where(lane, shifted_low * inverse[:, None] * k_gain_low, low)
            high = tl.where(lane, shifted_high * inverse[:, None] * k_gain_high, high)
        if NORMED_VALUES:
            low = tl.where(is_v[:, None], low * inverse[:, None], low)
            high = tl.where(is_v[:, None], high * inverse[:, None], high)

    new_low = tl.where(is_v[:, None], low, low * cos - high * sin)
    new_high = tl.where(is_v[:, None], high, high * cos + low * sin)
    if SMOOTHED:
        channels = tl.where(is_q, head // GROUP, head - HEADS)[:, None] * DIM
        smoothed = (is_q | is_k)[:, None] & in_half[None, :]
        centred = is_k[:, None] & in_half[None, :]
        key_scale_low = tl.load(key_scale_ptr + channels + low_at[None, :], mask=smoothed, other=1.0)
        key_scale_high = tl.load(key_scale_ptr + channels + high_at[None, :], mask=smoothed, other=1.0)
        centre_low = tl.load(centre_ptr + channels + low_at[None, :], mask=centred, other=0.0)
        centre_high = tl.load(centre_ptr + channels + high_at[None, :], mask=centred, other=0.0)
        new_low = tl.where(is_q[:, None], new_low * key_scale_low, (new_low - centre_low) / key_scale_low)
        new_high = tl.where(is_q[:, None], new_high * key_scale_high, (new_high - centre_high) / key_scale_high)

    q_mask = is_q[:, None] & in_half[None, :]
    q_out = q_out_ptr + (token * HEADS + head)[:, None] * DIM
    tl.store(q_out + low_at[None, :], new_low.to(q_out_ptr.dtype.element_ty), mask=q_mask)
    tl.store(q_out + high_at[None, :], new_high.to(q_out_ptr.dtype.element_ty), mask=q_mask)

    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    k_head = head - HEADS
    v_head = k_head - KV_HEADS
    k_at = (block * KV_HEADS + k_head) * BLOCK_SIZE + offset
    v_at = (block * KV_HEADS + v_head) * BLOCK_SIZE + offset
    # As the cache stores it: a lane is a key or a value, and takes the scale of its kind.
    if INT8:
        peak = tl.maximum(tl.max(tl.abs(new_low), axis=1), tl.max(tl.abs(new_high), axis=1))
        scale = (peak / INT8_MAX).to(k_scale_ptr.dtype.element_ty)
        tl.store(k_scale_ptr + k_at, scale, mask=is_k)
        tl.store(v_scale_ptr + v_at, scale, mask=is_v)
        divisor = tl.where(scale > 0, scale.to(tl.float32), 1.0)[:, None]
        new_low = tl.clamp(tl.floor(new_low / divisor + 0.5), -INT8_MAX, INT8_MAX)
        new_high = tl.clamp(tl.floor(new_high / divisor + 0.5), -INT8_MAX, INT8_MAX)
    elif SCALED:
        k_scale = tl.load(k_scale_ptr + k_head, mask=is_k, other=1.0)
        v_scale = tl.load(v_scale_ptr + v_head, mask=is_v, other=1.0)
        new_low = tl.clamp(new_low / (k_scale * v_scale)[:, None], -FP8_MAX, FP8_MAX)
        new_high = tl.clamp(new_high / (k_scale * v_scale)[:, None], -FP8_MAX, FP8_MAX)
    low_stored = new_low.to(k_cache_ptr.dtype.element_ty)
    high_stored = new_high.to(k_cache_ptr.dtype.element_ty)
    k_mask = is_k[:, None] & in_half[None, :]
    k_out = k_cache_ptr + k_at[:, None] * DIM
    tl.store(k_out + low_at[None, :], low_stored, mask=k_mask)
    tl.store(k_out + high_at[None, :], high_stored, mask=k_mask)
    v_mask = is_v[:, None] & in_half[None, :]
    v_out = v_cache_ptr + v_at[:, None] * DIM
    tl.store(v_out + low_at[None, :], low_stored, mask=v_mask)
    tl.store(v_out + high_at[None, :], high_stored, mask=v_mask)


def rope_and_cache(
    x: Tensor | Addends | GatedRows,
    layout: HeadLayout,
    cos_sin: Tensor,
    batch: AttentionBatch,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    key_smoothing: KeySmoothing | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """See `Ops.rope_and_cache`; `x` is what that calls `qkv`."""
    gates = isinstance(x, GatedRows)
    qkv, delta, options = parts(x.rows if isinstance(x, GatedRows) else x)
    tokens, dim = qkv.shape[0], layout.head_dim
    q = torch.empty((tokens, layout.heads, dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    half_block = next_power_of_2(dim // 2)
    head_block = max(1, 512 // half_block)
    kv_heads = 0 if layout.shared == "both" else layout.kv_heads
    all_heads = layout.heads + 2 * kv_heads
    k_scale, v_scale = kv_scales if kv_scales is not None else (cos_sin, cos_sin)
    centre, key_scale = key_smoothing if key_smoothing is not None else (cos_sin, cos_sin)
    launch(
        _rope_kernel,
        (tokens, ceil_div(all_heads, head_block)),
        qkv,
        q,
        k_cache,
        v_cache,
        cos_sin,
        batch.positions,
        batch.slots,
        cos_sin if q_norm is None else q_norm,
        cos_sin if k_norm is None else k_norm,
        k_scale,
        v_scale,
        centre,
        key_scale,
        *delta,
        qkv.stride(0),
        eps,
        HEADS=layout.heads,
        KV_HEADS=kv_heads,
        GROUP=layout.heads // layout.kv_heads,
        DIM=dim,
        ROTARY=cos_sin.shape[1],
        HALF_BLOCK=half_block,
        HEAD_BLOCK=head_block,
        BLOCK_SIZE=k_cache.shape[2],
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        SCALED=kv_scales is not None,
        INT8=k_cache.dtype == torch.int8,
        SMOOTHED=key_smoothing is not None,
        INTERLEAVED=layout.interleaved,
        CENTRED=layout.centred_norms,
        NORMED_VALUES=layout.normed_values,
        ROWS=layout.rows,
        **options,
        GATES=gates,
        num_warps=2,
        pdl=pdl,
    )
    return q
