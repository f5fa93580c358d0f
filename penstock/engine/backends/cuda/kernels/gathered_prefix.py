"""Keys and values of a step's prompts, gathered from the cache's blocks into contiguous memory.

Attention of a long chunk reads every key once for each tile of its rows, hundreds of times: widened once for all of
them, keys cost about one hundredth of the arithmetic, and the kernel for 16-bit caches runs over them. Heads are
gathered a few at a time, so that no step needs more than `MOST_BYTES` whatever its contexts. FP8 numbers are widened
exactly and left without their scales, which the attention applies to sums; int8 numbers, each with a scale of its own,
are multiplied and rounded as a 16-bit cache would be. 16-bit numbers are copied.

For products of FP8 an FP8 cache is copied as it is, values transposed and zeros behind the end of a sequence: see
`hopper_fp8_consumer`, which says what order their tokens have.

Sequences lie one behind the other, each from a multiple of `TILE` rows on; rows behind the end of one are undefined.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import launch, launch_successor, wait_for_inputs
from penstock.engine.backends.interface import AttentionBatch, HeadLayout

FP8 = torch.float8_e4m3fn
TILE = 128
"""Rows of one program, and of one copy of the attention that reads them."""
MOST_BYTES = 256 << 20
"""Of gathered keys and values at a time."""


@dataclass(frozen=True, slots=True)
class GatheredPrefix:
    """Room for some of the heads."""

    k: Tensor
    """[heads at once, rows, head_dim]"""
    v: Tensor
    bases: Tensor
    """int32 [sequences with prompts]: the first row of each."""

    @property
    def heads(self) -> int:
        return self.k.shape[0]


def rows_of(batch: AttentionBatch) -> int:
    """Rows that the prompts of a step take at most."""
    assert batch.total_context is not None
    return (batch.total_context // TILE + _prompts(batch)) * TILE


def heads_at_once(layout: HeadLayout, batch: AttentionBatch, element_size: int) -> int:
    """How many heads are gathered at a time, so that all take as few turns as possible; 0: one is too many, or the
    host does not know how long the contexts are."""
    if batch.total_context is None:
        return 0
    fit = min(layout.kv_heads, MOST_BYTES // (rows_of(batch) * layout.head_dim * 2 * element_size))
    if fit == 0:
        return 0
    turns = -(-layout.kv_heads // fit)
    return -(-layout.kv_heads // turns)


def make_room(layout: HeadLayout, batch: AttentionBatch, dtype: torch.dtype, heads: int) -> GatheredPrefix:
    device = batch.context_lens.device
    k, v = (torch.empty((heads, rows_of(batch), layout.head_dim), dtype=dtype, device=device) for _ in range(2))
    return GatheredPrefix(k, v, torch.empty(_prompts(batch), dtype=torch.int32, device=device))


@triton.jit
def _widened(
    cache_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    at: tl.tensor,
    scale_at: tl.tensor,
    inside: tl.tensor,
    d: tl.tensor,
    DIM: tl.constexpr,
    INT8: tl.constexpr,
) -> tl.tensor:
    x = tl.load(cache_ptr + at[:, None] + d[None, :], mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
    if INT8:
        x = x.to(tl.float32) * tl.load(scale_ptr + scale_at, mask=inside, other=0.0).to(tl.float32)[:, None]
    elif x.dtype == tl.float8e4nv:
        x = x.to(tl.float16)  # in one instruction, exactly
    return x


@triton.jit(do_not_specialize=["first_seq", "num_seqs", "first_head", "rows"])
def _gather_kernel(
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    v_out_ptr: tl.tensor,
    bases_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    context_ptr: tl.tensor,
    table_ptr: tl.tensor,
    table_stride: tl.tensor,
    first_seq: tl.tensor,
    num_seqs: tl.tensor,
    first_head: tl.tensor,
    rows: tl.tensor,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    INT8: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    head = first_head + tl.program_id(1)
    launch_successor(PDL)
    wait_for_inputs(PDL)

    # Which sequence: the first one that ends behind this tile, if there is any.
    index = 0
    before = 0
    total = 0
    for chunk in range(0, num_seqs, 256):
        i = chunk + tl.arange(0, 256)
        context = tl.load(context_ptr + first_seq + i, mask=i < num_seqs, other=0)
        tiles = (context + TILE - 1) // TILE
        ends = total + tl.cumsum(tiles, axis=0)
        passed = (ends <= tile) & (i < num_seqs)
        index += tl.sum(passed.to(tl.int32), axis=0)
        before += tl.sum(tl.where(passed, tiles, 0), axis=0)
        total += tl.sum(tiles, axis=0)
    if tile >= total:
        return
    seq = first_seq + index
    length = tl.load(context_ptr + seq)
    row = tl.maximum(tl.load(rows_ptr + seq), 0).to(tl.int64)
    if (tile == before) & (tl.program_id(1) == 0):
        tl.store(bases_ptr + index, before * TILE)
    at = tl.arange(0, TILE)
    n = (tile - before) * TILE + at
    d = tl.arange(0, DIM_BLOCK)
    inside = n < length
    block = tl.load(table_ptr + row * table_stride + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    slot = (block * KV_HEADS + head) * BLOCK_SIZE + n % BLOCK_SIZE
    to = tl.program_id(1).to(tl.int64) * rows + tile * TILE
    k_out = k_out_ptr + (to + at)[:, None] * DIM + d[None, :]
    mask = inside[:, None] & (d < DIM)[None, :]
    if FP8:
        tl.store(k_out, tl.load(k_cache_ptr + (slot * DIM)[:, None] + d[None, :], mask=mask), mask=mask)
        # Of 16 tokens two neighbours at a time, from either half in turn: 0 1 8 9 2 3 10 11 ...
        n = (tile - before) * TILE + (at & ~15) + (at >> 1 & 1) * 8 + (at >> 2 & 3) * 2 + (at & 1)
        inside = n < length
        block = tl.load(table_ptr + row * table_stride + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = (block * KV_HEADS + head) * BLOCK_SIZE + n % BLOCK_SIZE
        v = tl.load(v_cache_ptr + (slot * DIM)[:, None] + d[None, :], mask=inside[:, None], other=0.0)
        tl.store(v_out_ptr + (to * DIM) + d[:, None] * TILE + at[None, :], tl.trans(v))
    else:
        k = _widened(k_cache_ptr, k_scale_ptr, slot * DIM, slot, inside, d, DIM, INT8)
        v = _widened(v_cache_ptr, v_scale_ptr, slot * DIM, slot, inside, d, DIM, INT8)
        v_out = v_out_ptr + (to + at)[:, None] * DIM + d[None, :]
        tl.store(k_out, k.to(k_out_ptr.dtype.element_ty), mask=mask)
        tl.store(v_out, v.to(v_out_ptr.dtype.element_ty), mask=mask)


def gather(
    into: GatheredPrefix,
    first_head: int,
    heads: int,
    batch: AttentionBatch,
    k_cache: Tensor,
    v_cache: Tensor,
    scales: tuple[Tensor, Tensor] | None,
) -> None:
    """Heads `first_head` to `first_head + heads` of every sequence after the first `num_decodes`."""
    kv_heads, block_size, dim = k_cache.shape[1:]
    int8 = k_cache.dtype == torch.int8
    k_scale, v_scale = scales if int8 and scales is not None else (into.bases, into.bases)
    launch(
        _gather_kernel,
        (into.k.shape[1] // TILE, heads),
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        into.k,
        into.v,
        into.bases,
        batch.rows,
        batch.context_lens,
        batch.block_tables,
        batch.block_tables.stride(0),
        batch.num_decodes,
        _prompts(batch),
        first_head,
        into.k.shape[1],
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
        BLOCK_SIZE=block_size,
        TILE=TILE,
        INT8=int8,
        FP8=into.k.dtype == FP8,
        num_warps=8,
        pdl=False,
        in_order=True,
    )


def _prompts(batch: AttentionBatch) -> int:
    return batch.context_lens.shape[0] - batch.num_decodes
