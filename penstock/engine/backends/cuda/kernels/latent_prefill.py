"""Attention over cached latents of sequences with several new tokens: tiles of consecutive tokens times heads, as in
`kernels.prefill`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import (
    LOG2E,
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)
from penstock.engine.backends.cuda.kernels.latent_tile import NEGATIVE, TABLE, LatentConfig, attend, precision
from penstock.engine.backends.interface import AttentionBatch, LatentLayout


@triton.jit(do_not_specialize=["first_seq", "num_seqs"])
def _prefill_kernel(
    query_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    context_ptr: tl.tensor,
    table_ptr: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    first_seq: tl.tensor,
    num_seqs: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
    HALF: tl.constexpr,
    INT8: tl.constexpr,
    MOST: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    launch_successor(PDL)
    wait_for_inputs(PDL)

    # Which sequence: the last one whose first tile number is at or below ours; see `kernels.prefill`.
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
    context = tl.load(context_ptr + seq)
    if MOST > 0:
        local = tl.where(context > MOST, tiles, local)  # attends to what was chosen; see `latent_decode.attend_lists`
    if local >= tiles:
        return
    offset = (tiles - 1 - local) * BLOCK_Q

    row = tl.maximum(tl.load(rows_ptr + seq), 0).to(tl.int64)
    table = table_ptr + row * table_stride
    m = tl.arange(0, BLOCK_M)
    r = tl.arange(0, LATENT_BLOCK)
    e = tl.arange(0, ROTARY_BLOCK)
    token = offset + m // GROUP
    head = tl.program_id(1) * GROUP + m % GROUP
    mask = ((m // GROUP < BLOCK_Q) & (token < length) & (head < HEADS))[:, None]
    at = (begin + token).to(tl.int64) * HEADS + head
    source = query_ptr + (at * (LATENT + ROTARY))[:, None]
    q = tl.load(source + r[None, :], mask=mask & (r < LATENT)[None, :], other=0.0)
    turned = tl.load(source + LATENT + e[None, :], mask=mask & (e < ROTARY)[None, :], other=0.0)
    if HALF:
        q = q.to(tl.float16)
        turned = turned.to(tl.float16)
    scores = scale * LOG2E
    if SCALED and not INT8:
        scores *= tl.load(scale_ptr)
    past = context - length
    position = past + token
    lowest = past + offset
    end = tl.minimum(lowest + BLOCK_Q, context)
    masked_from = (lowest + 1) // BLOCK_N * BLOCK_N
    peak = tl.full([BLOCK_M], NEGATIVE, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, LATENT_BLOCK], tl.float32)
    acc, peak, total = attend(
        q,
        turned,
        acc,
        peak,
        total,
        cache_ptr,
        scale_ptr,
        table,
        0,
        masked_from,
        position,
        scores,
        table,
        False,
        LATENT,
        LATENT_BLOCK,
        ROTARY,
        ROTARY_BLOCK,
        BLOCK_SIZE,
        BLOCK_N,
        False,
        INT8,
        TABLE,
        PRECISION,
    )
    acc, peak, total = attend(
        q,
        turned,
        acc,
        peak,
        total,
        cache_ptr,
        scale_ptr,
        table,
        masked_from,
        end,
        position,
        scores,
        table,
        False,
        LATENT,
        LATENT_BLOCK,
        ROTARY,
        ROTARY_BLOCK,
        BLOCK_SIZE,
        BLOCK_N,
        True,
        INT8,
        TABLE,
        PRECISION,
    )
    if SCALED and not INT8:
        acc *= tl.load(scale_ptr)
    acc = acc / total[:, None]
    to = seen_ptr + (at * LATENT)[:, None] + r[None, :]
    tl.store(to, acc.to(seen_ptr.dtype.element_ty), mask=mask & (r < LATENT)[None, :])


def choose(layout: LatentLayout, element_size: int) -> LatentConfig:
    if element_size == 4:
        return LatentConfig(16, 16, num_warps=4, num_stages=1)
    return LatentConfig(64, 32, num_warps=8, num_stages=2)


def prefill(
    query: Tensor,
    layout: LatentLayout,
    batch: AttentionBatch,
    cache: Tensor,
    scales: Tensor | None,
    seen: Tensor,
    config: LatentConfig,
    *,
    most: int = 0,
    pdl: bool = False,
) -> None:
    """Attention of every sequence after the first `num_decodes`, into `seen` [T, heads, latent]. With `most`, only of
    those whose contexts are no longer."""
    group = min(layout.heads, config.tile)
    block_q = config.tile // group
    sequences, tokens = batch.context_lens.shape[0] - batch.num_decodes, query.shape[0] - batch.num_decodes
    launch(
        _prefill_kernel,
        (tokens // block_q + sequences, ceil_div(layout.heads, group)),
        query,
        cache,
        query if scales is None else scales,
        seen,
        batch.rows,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        batch.block_tables.stride(0),
        layout.scale,
        batch.num_decodes,
        sequences,
        HEADS=layout.heads,
        GROUP=group,
        LATENT=layout.latent,
        LATENT_BLOCK=max(16, next_power_of_2(layout.latent)),
        ROTARY=layout.rotary,
        ROTARY_BLOCK=max(16, next_power_of_2(layout.rotary)),
        BLOCK_SIZE=cache.shape[1],
        BLOCK_M=config.tile,
        BLOCK_Q=block_q,
        BLOCK_N=config.block_n,
        SCALED=scales is not None,
        HALF=cache.dtype == torch.float8_e4m3fn and query.dtype != torch.float32,
        INT8=cache.dtype == torch.int8,
        MOST=most,
        PRECISION=precision(query),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=pdl,
    )
