"""Adapters of many tokens: launches over tiles of tokens that share a slot. Who launches them, and when: `lora`."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine.backends.cuda.kernels.common import launch_successor, wait_for_inputs
from penstock.engine.backends.cuda.kernels.inline_lora import look_up_ranks


@triton.jit(do_not_specialize=["tiles"])
def tiles_kernel(
    order_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    parts_ptr: tl.tensor,
    token_slots_ptr: tl.tensor,
    tile_tokens_ptr: tl.tensor,
    tile_ranks_ptr: tl.tensor,
    token_ranks_ptr: tl.tensor,
    tiles: tl.tensor,
    TOKENS: tl.constexpr,
    MOST: tl.constexpr,
    SITES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The tokens [tiles, BLOCK] of every tile, -1 where there is none; its ranks [sites, tiles], each with the parts
    that its adapter touches in the upper half; and the ranks of the first `TOKENS` tokens. Looked up once a pass, so
    that the launches at every linear need not follow a pointer to a pointer, which takes longer than their work."""
    tile = tl.program_id(0)
    m = tl.arange(0, BLOCK)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    count = tl.load(counts_ptr + tile)
    slot = tl.load(slots_ptr + tile)
    start = tl.load(starts_ptr + tile)
    tokens = tl.load(order_ptr + start + m, mask=m < count, other=-1)
    tl.store(tile_tokens_ptr + tile * BLOCK + m, tokens)
    for site in tl.static_range(SITES):
        rank = tl.load(ranks_ptr + slot * SITES + site, mask=count > 0, other=0)
        parts = tl.load(parts_ptr + slot * SITES + site, mask=count > 0, other=0)
        tl.store(tile_ranks_ptr + site * tiles + tile, rank | parts << 16)
    if TOKENS > 0:  # noqa: SIM102 - known when compiled; the other is not
        if tile == 0:
            look_up_ranks(token_slots_ptr, ranks_ptr, token_ranks_ptr, TOKENS, MOST, SITES)


@triton.jit
def rank_and_parts(tile_ranks_ptr: tl.tensor, tile: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Of a tile's adapter: its rank, 0 where it does not touch the site, and a bit for each part that it touches."""
    both = tl.load(tile_ranks_ptr + tile)
    return tl.multiple_of(both & 0xFFFF, 8), both >> 16


@triton.jit(do_not_specialize=["entries"])
def shrink_kernel(
    x_ptr: tl.tensor,
    bank_ptr: tl.tensor,
    tile_slots_ptr: tl.tensor,
    tile_ranks_ptr: tl.tensor,
    tile_tokens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    slot_stride: tl.tensor,
    start: tl.tensor,
    entries: tl.tensor,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Partial sums [SPLITS, entries, PARTS * R] in float32; every tile has `BLOCK_M` entries. `PDL` is always false."""
    tile = tl.program_id(0)
    part = tl.program_id(1) % PARTS
    split = tl.program_id(1) // PARTS
    m = tl.arange(0, BLOCK_M)
    entry = tile * BLOCK_M + m
    slot = tl.load(tile_slots_ptr + tile)
    rank, touched = rank_and_parts(tile_ranks_ptr, tile)
    tokens = tl.load(tile_tokens_ptr + entry).to(tl.int64)
    if (rank == 0) | ((touched >> part & 1) == 0):
        return
    r = tl.arange(0, R)
    k = tl.arange(0, BLOCK_K)
    in_m = tokens >= 0
    a_ptr = bank_ptr + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * start + part * rank * K
    acc = tl.zeros([BLOCK_M, R], tl.float32)
    SHARE: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    for offset in range(0, SHARE, BLOCK_K):
        at = split * SHARE + offset + k
        in_k = at < K
        x = tl.load(x_ptr + tokens[:, None] * x_stride + at[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0)
        a = tl.load(a_ptr + r[:, None] * K + at[None, :], mask=(r < rank)[:, None] & in_k[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(a), acc, input_precision=PRECISION)
    rows = (split * entries + entry).to(tl.int64) * (PARTS * R) + part * R
    tl.store(out_ptr + rows[:, None] + r[None, :], acc, mask=in_m[:, None])


@triton.jit
def column_kernel(
    ids_ptr: tl.tensor,
    bank_ptr: tl.tensor,
    tile_slots_ptr: tl.tensor,
    tile_ranks_ptr: tl.tensor,
    tile_tokens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    slot_stride: tl.tensor,
    start: tl.tensor,
    K: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The column of A of every token [entries, R] in float32: what `shrink_kernel` gives for an embedding."""
    tile = tl.program_id(0)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    entry = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.load(tile_slots_ptr + tile)
    rank, _ = rank_and_parts(tile_ranks_ptr, tile)
    tokens = tl.load(tile_tokens_ptr + entry).to(tl.int64)
    if rank == 0:
        return
    r = tl.arange(0, R)
    in_m = tokens >= 0
    ids = tl.load(ids_ptr + tokens, mask=in_m, other=0).to(tl.int64)
    a_ptr = bank_ptr + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * start
    a = tl.load(a_ptr + ids[:, None] + r[None, :] * K, mask=in_m[:, None] & (r < rank)[None, :], other=0.0)
    tl.store(out_ptr + entry[:, None] * R + r[None, :], a.to(tl.float32), mask=in_m[:, None])


@triton.jit
def up_product(
    acc: tl.tensor,
    sums_ptr: tl.tensor,
    b_ptr: tl.tensor,
    entry: tl.tensor,
    in_m: tl.tensor,
    entries: tl.tensor,
    rank: tl.tensor,
    n: tl.tensor,
    in_n: tl.tensor,
    part: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """`acc` plus B at outputs `n`, which lie in this part, times the products with A, whose shares are added up."""
    r = tl.arange(0, R)
    sums = tl.zeros([entry.shape[0], R], tl.float32)
    for split in tl.static_range(SPLITS):
        rows = (split * entries + entry).to(tl.int64) * (PARTS * R) + part * R
        sums += tl.load(sums_ptr + rows[:, None] + r[None, :], mask=in_m[:, None], other=0.0)
    b = tl.load(b_ptr + (n * rank)[:, None] + r[None, :], mask=(r < rank)[None, :] & in_n[:, None], other=0.0)
    return tl.dot(sums.to(b.dtype), tl.trans(b), acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["entries"])
def expand_kernel(
    sums_ptr: tl.tensor,
    bank_ptr: tl.tensor,
    tile_slots_ptr: tl.tensor,
    tile_ranks_ptr: tl.tensor,
    tile_tokens_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_stride: tl.tensor,
    slot_stride: tl.tensor,
    start: tl.tensor,
    entries: tl.tensor,
    K: tl.constexpr,
    N: tl.constexpr,
    END_0: tl.constexpr,
    END_1: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Those sums, added up, times B. `PDL` is always false."""
    tile = tl.program_id(0)
    low = tl.program_id(1) * BLOCK_N
    m = tl.arange(0, BLOCK_M)
    entry = tile * BLOCK_M + m
    slot = tl.load(tile_slots_ptr + tile)
    rank, touched = rank_and_parts(tile_ranks_ptr, tile)
    tokens = tl.load(tile_tokens_ptr + entry).to(tl.int64)
    n = low + tl.arange(0, BLOCK_N)
    b_ptr = bank_ptr + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * (start + PARTS * K)
    if rank == 0:
        return
    in_m = tokens >= 0
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for part in tl.static_range(PARTS):
        # A block of columns may lie across two parts, each of which has sums of its own.
        begin = 0 if part == 0 else END_0 if part == 1 else END_1
        end = N if part == PARTS - 1 else END_0 if part == 0 else END_1
        if (low < end) & (low + BLOCK_N > begin) & ((touched >> part & 1) != 0):
            inside = (n >= begin) & (n < end)
            acc = up_product(
                acc, sums_ptr, b_ptr, entry, in_m, entries, rank, n, inside, part, PARTS, R, SPLITS, PRECISION
            )
    at = y_ptr + tokens[:, None] * y_stride + n[None, :]
    mask = in_m[:, None] & (n < N)[None, :]
    if ADD:
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=mask)
