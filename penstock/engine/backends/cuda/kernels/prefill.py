"""Attention of several new tokens per sequence (a prompt, or a chunk of one) over its paged keys and values.

A tile holds `BLOCK_M` rows: consecutive tokens times all query heads of one kv head, so a short chunk still fills
tensor-core rows and each key tile serves every head that reads it. Key tiles wholly visible to the tile run without
masks; only the diagonal (and, with a sliding window, every tile) is masked. The grid is bounded by host values: a
sequence of length n needs at most n // tokens_per_tile + 1 tiles, so tile numbers are laid out at
`start // tokens_per_tile + index`, and a program finds its sequence by counting the starts at or below its number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import (
    LOG2E,
    launch,
    launch_successor,
    next_power_of_2,
    oldest_visible,
    sink_factor,
    soft_cap,
    wait_for_inputs,
    widen,
)
from penstock.engine.backends.interface import AttentionBatch, HeadLayout

NEGATIVE = tl.constexpr(-1.0e30)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Shape of the launch."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@triton.jit
def _attend(
    q: tl.tensor,
    acc: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    position: tl.tensor,
    scores: tl.tensor,
    BLOCK_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    INT8: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Fold keys `begin..end` into the running softmax; unmasked tiles must be visible to every row."""
    d = tl.arange(0, DIM_BLOCK)
    in_dim = d < DIM
    if WINDOW > 0:
        oldest = oldest_visible(tl.min(position, axis=0), WINDOW, CHUNKED)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        if MASKED:
            # Before the first row's window and past the context, tables and slots hold anything, NaN included.
            in_context = n < end
            if WINDOW > 0:
                in_context = in_context & (n >= oldest)
            block = tl.load(table + n // BLOCK_SIZE, mask=in_context, other=0).to(tl.int64)
        else:
            block = tl.load(table + n // BLOCK_SIZE).to(tl.int64)
        at = block * BLOCK_STRIDE + (n % BLOCK_SIZE) * DIM
        k_at = k_ptr + at[:, None] + d[None, :]
        v_at = v_ptr + at[:, None] + d[None, :]
        if DIM == DIM_BLOCK:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=in_dim[None, :], other=0.0)
        if MASKED:
            v = tl.load(v_at, mask=in_context[:, None] & in_dim[None, :], other=0.0)
        elif DIM == DIM_BLOCK:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=in_dim[None, :], other=0.0)
        qk = tl.dot(q, tl.trans(widen(k, q)), input_precision=PRECISION)
        if INT8:
            scale_at = block * (BLOCK_STRIDE // DIM) + n % BLOCK_SIZE
            if MASKED:
                k_scale = tl.load(k_scale_ptr + scale_at, mask=in_context, other=0.0)
                v_scale = tl.load(v_scale_ptr + scale_at, mask=in_context, other=0.0)
            else:
                k_scale = tl.load(k_scale_ptr + scale_at)
                v_scale = tl.load(v_scale_ptr + scale_at)
            qk *= k_scale.to(tl.float32)[None, :]
        if SOFTCAP > 0.0:
            qk = soft_cap(qk * scores, SOFTCAP)
            factor = 1.0
        else:
            factor = scores
        if MASKED:
            visible = n[None, :] <= position[:, None]
            if WINDOW > 0:
                visible = visible & (n[None, :] >= oldest_visible(position, WINDOW, CHUNKED)[:, None])
            # Scaled before masking: `NEGATIVE * scores - peak` contracted into one multiply-add is not zero where it
            # must be, but the rounding error of a number near 1e30, and its exponential is infinite.
            qk = tl.where(visible, qk * factor, NEGATIVE)
            new_peak = tl.maximum(peak, tl.max(qk, axis=1))
            p = tl.exp2(qk - new_peak[:, None])
        else:
            new_peak = tl.maximum(peak, tl.max(qk, axis=1) * factor)
            p = tl.exp2(qk * factor - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(p, axis=1)
        acc = acc * decay[:, None]
        if INT8:
            p *= v_scale.to(tl.float32)[None, :]
        acc = tl.dot(p.to(q.dtype), widen(v, q), acc, input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit(do_not_specialize=["first_seq", "num_seqs"])
def _prefill_kernel(
    q_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    context_ptr: tl.tensor,
    table_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    first_seq: tl.tensor,
    num_seqs: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    HALF: tl.constexpr,
    INT8: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    launch_successor(PDL)
    wait_for_inputs(PDL)

    # Which sequence: the last one whose first tile number is at or below ours.
    origin = tl.load(starts_ptr + first_seq)
    before = 0
    for chunk in range(0, num_seqs, 256):
        i = chunk + tl.arange(0, 256)
        starts = tl.load(starts_ptr + first_seq + i, mask=i < num_seqs, other=0) - origin
        at_or_below = (starts // BLOCK_Q + i <= tile) & (i < num_seqs)
        before += tl.sum(at_or_below.to(tl.int32), axis=0)
    index = before - 1
    seq = first_seq + index
    begin = tl.load(starts_ptr + seq)
    length = tl.load(starts_ptr + seq + 1) - begin
    tiles = tl.cdiv(length, BLOCK_Q)
    local = tile - ((begin - origin) // BLOCK_Q + index)
    if local >= tiles:
        return
    # The last tile of a sequence sees the most keys: start with it, so that the launch ends on short ones.
    offset = (tiles - 1 - local) * BLOCK_Q

    context = tl.load(context_ptr + seq)
    row = tl.maximum(tl.load(rows_ptr + seq), 0).to(tl.int64)
    table = table_ptr + row * table_stride
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM_BLOCK)
    token = offset + m // GROUP
    q_mask = ((m // GROUP < BLOCK_Q) & (token < length))[:, None] & (d < DIM)[None, :]
    q_at = (begin + token).to(tl.int64)
    lane = ((kv_head * GROUP + m % GROUP) * DIM)[:, None] + d[None, :]
    q = tl.load(q_ptr + (q_at * q_stride)[:, None] + lane, mask=q_mask, other=0.0)
    if HALF:
        # fp8 keys and values widen to float16 in one instruction, exactly.
        q = q.to(tl.float16)
    scores = scale * LOG2E
    if SCALED and not INT8:
        scores *= tl.load(k_scale_ptr + kv_head)

    past = context - length
    position = past + token
    lowest = past + offset
    end = tl.minimum(lowest + BLOCK_Q, context)
    k_ptr = k_cache_ptr + kv_head.to(tl.int64) * BLOCK_SIZE * DIM
    v_ptr = v_cache_ptr + kv_head.to(tl.int64) * BLOCK_SIZE * DIM
    k_scales = k_scale_ptr + kv_head * BLOCK_SIZE
    v_scales = v_scale_ptr + kv_head * BLOCK_SIZE
    BLOCK_STRIDE: tl.constexpr = KV_HEADS * BLOCK_SIZE * DIM
    peak = tl.full([BLOCK_M], NEGATIVE, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_BLOCK], tl.float32)
    if WINDOW > 0:
        masked_from = tl.maximum(oldest_visible(lowest, WINDOW, CHUNKED), 0) // BLOCK_N * BLOCK_N
    else:
        masked_from = (lowest + 1) // BLOCK_N * BLOCK_N
        acc, peak, total = _attend(
            q,
            acc,
            peak,
            total,
            k_ptr,
            v_ptr,
            k_scales,
            v_scales,
            table,
            0,
            masked_from,
            position,
            scores,
            BLOCK_STRIDE,
            DIM,
            DIM_BLOCK,
            BLOCK_SIZE,
            BLOCK_N,
            WINDOW,
            CHUNKED,
            SOFTCAP,
            False,
            INT8,
            PRECISION,
        )
    acc, peak, total = _attend(
        q,
        acc,
        peak,
        total,
        k_ptr,
        v_ptr,
        k_scales,
        v_scales,
        table,
        masked_from,
        end,
        position,
        scores,
        BLOCK_STRIDE,
        DIM,
        DIM_BLOCK,
        BLOCK_SIZE,
        BLOCK_N,
        WINDOW,
        CHUNKED,
        SOFTCAP,
        True,
        INT8,
        PRECISION,
    )
    if SCALED and not INT8:
        acc *= tl.load(v_scale_ptr + kv_head)
    if SINKS:
        factor = sink_factor(sinks_ptr + kv_head * GROUP + m % GROUP, m < BLOCK_M, peak, total)
        acc = acc * factor[:, None]
    else:
        acc = acc / total[:, None]
    out = out_ptr + (q_at * (KV_HEADS * GROUP * DIM))[:, None] + lane
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=q_mask)


def choose(max_query: int, max_context: int, group: int, head_dim: int, element_size: int) -> PrefillConfig:
    """Launch shape from host values; full precision goes through ordinary arithmetic and wants small tiles."""
    if element_size == 4:
        narrow = head_dim > 256  # a tile of keys and one of values are all that shared memory holds
        return PrefillConfig(max(16, next_power_of_2(group)), 16 if narrow else 32, 4, 1 if narrow else 2)
    if head_dim > 256:
        return PrefillConfig(block_m=64, block_n=32, num_warps=8, num_stages=1)
    if head_dim > 128:
        return PrefillConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)
    if max_query * group <= 64 or max_context < 2048:
        # Short rows of keys: small tiles waste less on the diagonal, and two programs share a multiprocessor.
        return PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)
    return PrefillConfig(block_m=128, block_n=128, num_warps=8, num_stages=3)


def prefill_attention(
    q: Tensor,
    layout: HeadLayout,
    batch: AttentionBatch,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    config: PrefillConfig,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """Attention of every sequence after the first `num_decodes` into `out` [T, heads * head_dim]."""
    dim, group = layout.head_dim, layout.heads // layout.kv_heads
    block_m = max(config.block_m, next_power_of_2(group))
    block_q = block_m // group
    sequences = batch.context_lens.shape[0] - batch.num_decodes
    tokens = q.shape[0] - batch.num_decodes
    k_scale, v_scale = kv_scales if kv_scales is not None else (q, q)
    launch(
        _prefill_kernel,
        (tokens // block_q + sequences, layout.kv_heads),
        q,
        k_cache,
        v_cache,
        out,
        batch.rows,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        k_scale,
        v_scale,
        q if sinks is None else sinks,
        q.stride(0),
        batch.block_tables.stride(0),
        layout.scale,
        batch.num_decodes,
        sequences,
        KV_HEADS=layout.kv_heads,
        GROUP=group,
        DIM=dim,
        DIM_BLOCK=next_power_of_2(dim),
        BLOCK_SIZE=k_cache.shape[2],
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_N=config.block_n,
        WINDOW=layout.window or 0,
        CHUNKED=layout.chunked,
        SOFTCAP=layout.softcap or 0.0,
        SCALED=kv_scales is not None,
        HALF=k_cache.dtype == torch.float8_e4m3fn,
        INT8=k_cache.dtype == torch.int8,
        SINKS=sinks is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=pdl,
    )
