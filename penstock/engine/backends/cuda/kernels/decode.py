"""Attention of one new token per sequence over its paged keys and values.

Decode reads every key and value once, so it is bound by memory bandwidth. All query heads of a kv head share one
tensor-core tile (padded to 16 rows), hence each key is loaded once. A sequence's keys are cut into shares, one per
program; the grid depends on host bounds only (CUDA graphs), while each program reads the true context length and
works out its own share, leaving at once if there is none. Programs of a sequence with several shares leave partial
sums, and the last to finish (an atomic counter, reset for the next launch) combines them.

Invariant: `counters` is all zero between launches. One stream at a time may use them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import (
    LOG2E,
    ask_for,
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    oldest_visible,
    sink_factor,
    soft_cap,
    split_fp8,
    wait_for_inputs,
    widen,
)
from penstock.engine.backends.interface import AttentionBatch, HeadLayout

NEGATIVE = tl.constexpr(-1.0e30)
"""Score of an invisible key: finite, so that a row that has seen nothing yet makes no NaN."""


LONG_SHARE = tl.constexpr(8)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Shape of the launch; the last three say how a sequence is shared among programs."""

    block_n: int
    num_warps: int
    num_stages: int
    splits: int
    min_tiles: int
    long_splits: int
    """Shares of a sequence whose shares would otherwise be `LONG_SHARE` tiles or longer."""


@triton.jit
def _combine(
    partial_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    total_ptr: tl.tensor,
    out_ptr: tl.tensor,
    base: tl.tensor,
    out_row: tl.tensor,
    active: tl.tensor,
    sinks_ptr: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """Weigh the partial sums of `active` shares and write the group's output. Loads bypass the L1 cache."""
    g = tl.arange(0, GROUP_BLOCK)
    d = tl.arange(0, DIM_BLOCK)
    s = tl.arange(0, CHUNK)
    peak = tl.full([GROUP_BLOCK], NEGATIVE, tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    for start in range(0, active, CHUNK):
        # The three loads of a chunk do not wait for each other.
        at = base + g[None, :] * SPLITS + (start + s)[:, None]
        seen = ((start + s) < active)[:, None] & (g < GROUP)[None, :]
        peaks = tl.load(peak_ptr + at, mask=seen, other=NEGATIVE, cache_modifier=".cg")
        totals = tl.load(total_ptr + at, mask=seen, other=0.0, cache_modifier=".cg")
        part = tl.load(
            partial_ptr + at[:, :, None] * DIM + d[None, None, :],
            mask=seen[:, :, None] & (d < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
        decay = tl.exp2(peak - new_peak)
        weight = tl.exp2(peaks - new_peak[None, :])
        total = total * decay + tl.sum(totals * weight, axis=0)
        acc = acc * decay[:, None] + tl.sum(part * weight[:, :, None], axis=0)
        peak = new_peak
    if SINKS:
        factor = sink_factor(sinks_ptr + g, g < GROUP, peak, total)
        acc = acc * factor[:, None]
    else:
        acc = acc / tl.where(g < GROUP, total, 1.0)[:, None]
    out = out_ptr + out_row + g[:, None] * DIM + d[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(g < GROUP)[:, None] & (d < DIM)[None, :])


@triton.jit(do_not_specialize=["min_tiles"])
def _decode_kernel(
    q_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    total_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    context_ptr: tl.tensor,
    table_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    q_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    min_tiles: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    LONG_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    INT8: tl.constexpr,
    PAIRED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    seq = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    launch_successor(PDL)

    # Everything the start depends on is asked for at once: at small batches latency is all there is. What describes
    # the step is there before the queries are.
    context = tl.load(context_ptr + seq)
    row = tl.maximum(tl.load(rows_ptr + seq), 0).to(tl.int64)
    m = tl.arange(0, TILE_M)
    d = tl.arange(0, DIM_BLOCK)
    in_dim = d < DIM
    q_mask = (m < GROUP)[:, None] & in_dim[None, :]
    first = 0
    if WINDOW > 0:
        oldest = tl.maximum(oldest_visible(context - 1, WINDOW, CHUNKED), 0)
        first = oldest // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(context - first, BLOCK_N)
    share = tl.cdiv(tiles, SPLITS)
    if LONG_SPLITS < SPLITS:
        share = tl.where(share >= LONG_SHARE, tl.cdiv(tiles, LONG_SPLITS), share)
    share = tl.maximum(share, min_tiles)
    active = tl.cdiv(tiles, share)
    table = table_ptr + row * table_stride
    head_offset = kv_head.to(tl.int64) * BLOCK_SIZE * DIM
    if PDL:  # noqa: SIM102 - known when compiled; the other is not
        if split < active:
            # Keys and values of earlier steps: those of this step, if among them, are written by then.
            n = tl.minimum(first + split * share * BLOCK_N + tl.arange(0, BLOCK_N), context - 1)
            block = tl.load(table + n // BLOCK_SIZE).to(tl.int64)
            at = block * (KV_HEADS * BLOCK_SIZE * DIM) + head_offset + (n % BLOCK_SIZE) * DIM
            SIZE: tl.constexpr = DIM * k_cache_ptr.dtype.element_ty.primitive_bitwidth // 8
            ask_for(k_cache_ptr + at, SIZE, PDL)
            ask_for(v_cache_ptr + (at // 2 if PAIRED else at), SIZE, PDL)
    wait_for_inputs(PDL)
    if split >= tl.maximum(active, 1):
        return

    q = tl.load(q_ptr + seq * q_stride + (kv_head * GROUP + m)[:, None] * DIM + d[None, :], mask=q_mask, other=0.0)
    if PAIRED:
        # fp8 keys and values widen to float16 in one instruction, exactly; to bfloat16 it would take three. A
        # tensor-core operand needs neighbouring keys of a value side by side, which bytes cannot be moved into
        # cheaply but 16-bit words can: values are loaded two to a word, and multiplied as even and odd columns.
        q = q.to(tl.float16)
    scores = scale * LOG2E
    if SCALED and not INT8:
        scores *= tl.load(k_scale_ptr + kv_head)

    peak = tl.full([TILE_M], NEGATIVE, tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    d_pair = tl.arange(0, DIM_BLOCK // 2)
    acc = tl.zeros([TILE_M, DIM_BLOCK // 2 if PAIRED else DIM_BLOCK], tl.float32)
    acc_odd = tl.zeros([TILE_M, DIM_BLOCK // 2], tl.float32)
    last = tl.minimum((split + 1) * share, tiles)
    for tile in range(split * share, last):
        n = first + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        # The rest of the first and of the last tile: their table entries and slots hold anything, NaN included, so
        # values must be loaded as zero there. Keys need not: their scores are replaced.
        visible = n < context
        if WINDOW > 0:
            visible = visible & (n >= oldest)
        block = tl.load(table + n // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
        at = block * (KV_HEADS * BLOCK_SIZE * DIM) + head_offset + (n % BLOCK_SIZE) * DIM
        k_at = k_cache_ptr + at[:, None] + d[None, :]
        if DIM == DIM_BLOCK:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=in_dim[None, :], other=0.0)
        if PAIRED:
            v_at = v_cache_ptr + (at // 2)[:, None] + d_pair[None, :]
            v = tl.load(v_at, mask=visible[:, None] & (d_pair < DIM // 2)[None, :], other=0)
        else:
            v_at = v_cache_ptr + at[:, None] + d[None, :]
            v = tl.load(v_at, mask=visible[:, None] & in_dim[None, :], other=0.0)
        qk = tl.dot(q, tl.trans(widen(k, q)), input_precision=PRECISION) * scores
        if INT8:
            scale_at = (block * KV_HEADS + kv_head) * BLOCK_SIZE + n % BLOCK_SIZE
            qk *= tl.load(k_scale_ptr + scale_at, mask=visible, other=0.0).to(tl.float32)[None, :]
        qk = soft_cap(qk, SOFTCAP)
        qk = tl.where(visible[None, :], qk, NEGATIVE)
        new_peak = tl.maximum(peak, tl.max(qk, axis=1))
        decay = tl.exp2(peak - new_peak)
        p = tl.exp2(qk - new_peak[:, None])
        total = total * decay + tl.sum(p, axis=1)
        acc = acc * decay[:, None]
        if INT8:
            p *= tl.load(v_scale_ptr + scale_at, mask=visible, other=0.0).to(tl.float32)[None, :]
        if PAIRED:
            even, odd = split_fp8(v)
            acc = tl.dot(p.to(q.dtype), even, acc)
            acc_odd = tl.dot(p.to(q.dtype), odd, acc_odd * decay[:, None])
        else:
            acc = tl.dot(p.to(q.dtype), widen(v, q), acc, input_precision=PRECISION)
        peak = new_peak
    if PAIRED:
        acc = tl.reshape(tl.join(acc, acc_odd), [TILE_M, DIM_BLOCK])
    if SCALED and not INT8:
        acc *= tl.load(v_scale_ptr + kv_head)

    out_row = (seq * KV_HEADS + kv_head) * GROUP * DIM
    if active <= 1:
        # A sequence with no context (padding) gets zeros.
        if SINKS:
            factor = sink_factor(sinks_ptr + kv_head * GROUP + m, m < GROUP, peak, total)
            acc = acc * factor[:, None]
        else:
            acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        out = out_ptr + out_row + m[:, None] * DIM + d[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=q_mask)
    else:
        base = (seq * KV_HEADS + kv_head) * GROUP * SPLITS
        at = base + m * SPLITS + split
        tl.store(peak_ptr + at, peak, mask=m < GROUP)
        tl.store(total_ptr + at, total, mask=m < GROUP)
        tl.store(partial_ptr + at[:, None] * DIM + d[None, :], acc, mask=q_mask)
        # All threads' stores happen before the barrier, and thread 0's release makes them visible to the chip.
        tl.debug_barrier()
        counter = counter_ptr + seq * KV_HEADS + kv_head
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == active - 1:
            tl.store(counter, 0)
            _combine(
                partial_ptr,
                peak_ptr,
                total_ptr,
                out_ptr,
                base,
                out_row,
                active,
                sinks_ptr + kv_head * GROUP,
                GROUP,
                GROUP_BLOCK,
                DIM,
                DIM_BLOCK,
                SPLITS,
                CHUNK,
                SINKS,
            )


def choose(sequences: int, kv_heads: int, head_dim: int, kv_size: int, processors: int) -> DecodeConfig:
    """Launch shape from host values.

    Cutting a sequence costs a round of partial sums, which a short share does not repay. So shares are short only
    where the chip would otherwise be idle: with few sequences, about four programs per multiprocessor; with many,
    only contexts of several thousand tokens are cut at all, so that one of those does not outlast the rest. Long
    shares need fewer programs to keep the chip busy: two per multiprocessor are 15% faster there than four.
    """
    programs = max(1, sequences * kv_heads)
    load = programs / processors
    splits = next_power_of_2(ceil_div(2 * processors, programs))
    splits = min(32, max(4, splits))
    tokens = 128 if load < 0.6 else 256 if load < 1.2 else 512 if load < 2.4 else 1024
    # Long tiles where a program has one or two, or where there are so many programs that the last wave is short.
    tile_bytes = 32768 if load < 0.6 or load > 7 else 16384
    block_n = max(16, min(128, tile_bytes // (next_power_of_2(head_dim) * max(2, kv_size))))
    long_splits = min(splits, max(1, 2 * processors // programs)) if load < 0.6 else splits
    return DecodeConfig(block_n, 4, 3, splits, max(1, tokens // block_n), long_splits)


def fixed(head_dim: int, kv_size: int) -> DecodeConfig:
    """One launch shape for any number of sequences: a compromise between one decode and many tokens of a prompt."""
    block_n = max(16, min(128, 16384 // (next_power_of_2(head_dim) * max(2, kv_size))))
    return DecodeConfig(block_n, 4, 3, splits=16, min_tiles=max(1, 256 // block_n), long_splits=16)


def decode_attention(
    q: Tensor,
    layout: HeadLayout,
    batch: AttentionBatch,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    counters: Tensor,
    config: DecodeConfig,
    kv_scales: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """Attention of the batch's first `num_decodes` sequences into `out` [T, heads * head_dim]."""
    sequences, dim = batch.num_decodes, layout.head_dim
    group = layout.heads // layout.kv_heads
    group_block, dim_block = next_power_of_2(group), next_power_of_2(dim)
    splits = config.splits
    stats = torch.empty((2, sequences * layout.heads * splits), dtype=torch.float32, device=q.device)
    partial = torch.empty((sequences * layout.heads * splits, dim), dtype=torch.float32, device=q.device)
    k_scale, v_scale = kv_scales if kv_scales is not None else (stats, stats)
    paired = v_cache.dtype == torch.float8_e4m3fn
    launch(
        _decode_kernel,
        (sequences, layout.kv_heads, splits),
        q,
        k_cache,
        v_cache.view(torch.int16) if paired else v_cache,
        out,
        partial,
        stats[0],
        stats[1],
        counters,
        batch.rows,
        batch.context_lens,
        batch.block_tables,
        k_scale,
        v_scale,
        stats if sinks is None else sinks,
        q.stride(0),
        batch.block_tables.stride(0),
        layout.scale,
        config.min_tiles,
        KV_HEADS=layout.kv_heads,
        GROUP=group,
        GROUP_BLOCK=group_block,
        TILE_M=max(16, group_block),
        DIM=dim,
        DIM_BLOCK=dim_block,
        BLOCK_SIZE=k_cache.shape[2],
        BLOCK_N=config.block_n,
        SPLITS=splits,
        LONG_SPLITS=config.long_splits,
        CHUNK=min(splits, max(1, 8192 // (group_block * dim_block))),
        WINDOW=layout.window or 0,
        CHUNKED=layout.chunked,
        SOFTCAP=layout.softcap or 0.0,
        SCALED=kv_scales is not None,
        INT8=k_cache.dtype == torch.int8,
        PAIRED=paired,
        SINKS=sinks is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=pdl,
    )
