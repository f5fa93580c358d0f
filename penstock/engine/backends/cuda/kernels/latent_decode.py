"""Attention over cached latents of sequences with one new token each.

`decode`: a sequence's cache is cut into shares, one per program, as in `kernels.decode`; the grid follows from host
values. `merge`: what the shares of a sequence found, brought together, and for few tokens also the product with the
value matrices; `latent_values` otherwise.

Where tokens attend to chosen ones (`ChosenSlots`), the same kernel takes these from their list: of decodes those with
long contexts, beside others that see everything; of prompts (`attend_lists`) every token by itself, all of whose heads
share what is gathered.
"""

from __future__ import annotations

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
    wait_for_inputs,
)
from penstock.engine.backends.cuda.kernels.latent_tile import (
    EITHER,
    LIST,
    NEGATIVE,
    TABLE,
    ChosenSlots,
    LatentConfig,
    attend,
    precision,
)
from penstock.engine.backends.interface import AttentionBatch, LatentLayout, LatentWeights

FEW = 8
"""Up to this many sequences, `merge` also makes the values: more would read the value matrices too often."""
MOST_SHARES = 128
"""Of a sequence."""
MERGED = 16
"""Values of a head that a program of `merge` makes."""


@triton.jit
def _shares(
    context: tl.tensor, min_tiles: tl.tensor, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, MOST: tl.constexpr
) -> tl.tensor:
    """Tiles of one share of a sequence, and how many shares there are. With MOST no more tokens than that are read."""
    if MOST > 0:
        context = tl.minimum(context, MOST)
    tiles = tl.cdiv(context, BLOCK_N)
    share = tl.maximum(tl.cdiv(tiles, SPLITS), min_tiles)
    return share, tl.cdiv(tiles, share)


@triton.jit(do_not_specialize=["first", "min_tiles"])
def _decode_kernel(
    query_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    total_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    context_ptr: tl.tensor,
    table_ptr: tl.tensor,
    list_ptr: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    first: tl.tensor,
    min_tiles: tl.tensor,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    HALF: tl.constexpr,
    INT8: tl.constexpr,
    CACHE_BYTES: tl.constexpr,
    SOURCE: tl.constexpr,
    MOST: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    seq = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    head = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    launch_successor(PDL)
    if SOURCE == LIST:
        seq += first
        wait_for_inputs(PDL)  # how long lists are was made in this step
    context = tl.load(context_ptr + seq)
    # Lists say everything themselves.
    row = tl.maximum(tl.load(rows_ptr + seq), 0).to(tl.int64) if SOURCE != LIST else 0
    listed = context > MOST if SOURCE == EITHER else SOURCE == LIST
    share, active = _shares(context, min_tiles, BLOCK_N, SPLITS, MOST)
    begin = split * share * BLOCK_N
    if SOURCE != TABLE:
        context = tl.minimum(context, MOST)
    end = tl.minimum(begin + share * BLOCK_N, context)
    table = table_ptr + row * table_stride
    if PDL and SOURCE == TABLE:  # noqa: SIM102 - known when compiled; the other is not
        if begin < end:
            # The first tokens of the share may be on their way before the queries are there.
            CACHED: tl.constexpr = LATENT + ROTARY
            n = tl.minimum(begin + tl.arange(0, BLOCK_N), end - 1)
            block = tl.load(table + n // BLOCK_SIZE).to(tl.int64)
            at = cache_ptr + block * (BLOCK_SIZE * CACHED) + n % BLOCK_SIZE * CACHED
            ask_for(at, CACHED * CACHE_BYTES, PDL)
    wait_for_inputs(PDL)
    r = tl.arange(0, LATENT_BLOCK)
    e = tl.arange(0, ROTARY_BLOCK)
    at = (seq * HEADS + head) * (LATENT + ROTARY)
    in_head = (head < HEADS)[:, None]
    q = tl.load(query_ptr + at[:, None] + r[None, :], mask=in_head & (r < LATENT)[None, :], other=0.0)
    turned = tl.load(query_ptr + (at + LATENT)[:, None] + e[None, :], mask=in_head & (e < ROTARY)[None, :], other=0.0)
    if HALF:
        # fp8 widens to float16 in one instruction, exactly.
        q = q.to(tl.float16)
        turned = turned.to(tl.float16)
    # A sequence with no context is padding, of which somebody may read zeros; a token with no list is another's task.
    if split >= (active if SOURCE == LIST else tl.maximum(active, 1)):
        return
    scores = scale * LOG2E
    if SCALED and not INT8:
        scores *= tl.load(scale_ptr)
    peak = tl.full([TILE_M], NEGATIVE, tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, LATENT_BLOCK], tl.float32)
    acc, peak, total = attend(
        q,
        turned,
        acc,
        peak,
        total,
        cache_ptr,
        scale_ptr,
        table,
        begin,
        end,
        tl.full([TILE_M], 2147483647, tl.int32),
        scores,
        list_ptr + seq * MOST,
        listed,
        LATENT,
        LATENT_BLOCK,
        ROTARY,
        ROTARY_BLOCK,
        BLOCK_SIZE,
        BLOCK_N,
        True,
        INT8,
        SOURCE,
        PRECISION,
    )
    if SCALED and not INT8:
        acc *= tl.load(scale_ptr)
    mask = in_head & (r < LATENT)[None, :]
    if SPLITS == 1:
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        to = seen_ptr + ((seq * HEADS + head) * LATENT)[:, None] + r[None, :]
        tl.store(to, acc.to(seen_ptr.dtype.element_ty), mask=mask)
    else:
        part = (seq * HEADS + head) * SPLITS + split
        tl.store(peak_ptr + part, peak, mask=head < HEADS)
        tl.store(total_ptr + part, total, mask=head < HEADS)
        tl.store(partial_ptr + (part * LATENT)[:, None] + r[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["min_tiles"])
def _merge_kernel(
    partial_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    total_ptr: tl.tensor,
    context_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    min_tiles: tl.tensor,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    VALUES: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    r = tl.arange(0, LATENT_BLOCK)
    launch_successor(PDL)
    if VALUES:
        # Weights are constants: they may be under way before the sums are there.
        v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        w_at = up_ptr + ((head.to(tl.int64) * (PLAIN + VALUE) + PLAIN + v) * LATENT)[:, None] + r[None, :]
        w = tl.load(w_at, mask=(v < VALUE)[:, None] & (r < LATENT)[None, :], other=0.0)
    _, active = _shares(tl.load(context_ptr + seq), min_tiles, BLOCK_N, SPLITS, MOST)
    wait_for_inputs(PDL)
    s = tl.arange(0, CHUNK)
    peak = NEGATIVE + 0.0
    total = 0.0
    merged = tl.zeros([LATENT_BLOCK], tl.float32)
    for start in range(0, active, CHUNK):
        seen = start + s < active
        part = (seq * HEADS + head) * SPLITS + start + s
        peaks = tl.load(peak_ptr + part, mask=seen, other=NEGATIVE)
        totals = tl.load(total_ptr + part, mask=seen, other=0.0)
        at = partial_ptr + (part * LATENT)[:, None] + r[None, :]
        found = tl.load(at, mask=seen[:, None] & (r < LATENT)[None, :], other=0.0)
        new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
        decay = tl.exp2(peak - new_peak)
        weight = tl.exp2(peaks - new_peak)
        total = total * decay + tl.sum(totals * weight, axis=0)
        merged = merged * decay + tl.sum(found * weight[:, None], axis=0)
        peak = new_peak
    merged = merged / tl.where(total > 0.0, total, 1.0)
    kind = out_ptr.dtype.element_ty
    if VALUES:
        made = tl.sum(w.to(tl.float32) * merged[None, :], axis=1)
        tl.store(out_ptr + (seq * HEADS + head) * VALUE + v, made.to(kind), mask=v < VALUE)
    else:
        tl.store(out_ptr + (seq * HEADS + head) * LATENT + r, merged.to(kind), mask=r < LATENT)


def choose(sequences: int, layout: LatentLayout, element_size: int, processors: int) -> LatentConfig:
    """Launch shape from host values: about two programs per multiprocessor, and shares that are worth a merge. A lone
    long sequence is cut into as many shares as there are multiprocessors: fewer cannot use the memory's bandwidth."""
    tile, block_n, num_warps, num_stages = _tile(layout, element_size)
    programs = sequences * ceil_div(layout.heads, tile)
    splits = min(MOST_SHARES, next_power_of_2(ceil_div(2 * processors, programs)))
    load = programs / processors
    shortest = 32 if load < 0.2 else 256 if load < 1.2 else 1024
    return LatentConfig(tile, block_n, num_warps, num_stages, splits, shortest // block_n)


def fixed(layout: LatentLayout, element_size: int) -> LatentConfig:
    """One launch shape for any number of sequences; see `kernels.decode.fixed`."""
    tile, block_n, num_warps, num_stages = _tile(layout, element_size)
    return LatentConfig(tile, block_n, num_warps, num_stages, splits=16, min_tiles=256 // block_n)


def one_share(layout: LatentLayout, element_size: int) -> LatentConfig:
    """For `attend_lists`: lists are short and tokens many."""
    return LatentConfig(*_tile(layout, element_size))


def _tile(layout: LatentLayout, element_size: int) -> tuple[int, int, int, int]:
    """Heads, cached tokens, warps and stages."""
    tile = max(16, min(16 if element_size == 4 else 64, next_power_of_2(layout.heads)))
    return tile, 16 if element_size == 4 else 32, 8 if tile == 64 else 4, 3 if tile < 64 else 2


def decode(
    query: Tensor,
    layout: LatentLayout,
    weights: LatentWeights,
    batch: AttentionBatch,
    cache: Tensor,
    scales: Tensor | None,
    config: LatentConfig,
    *,
    seen: Tensor | None = None,
    values: Tensor | None = None,
    chosen: ChosenSlots | None = None,
    pdl: bool = False,
) -> None:
    """Attention of the batch's first `num_decodes` sequences, into `seen` [T, heads, latent] or, taken out of the
    latents' space, into `values` [T, heads * value]. With `chosen`, to those tokens where contexts are longer than what
    may be chosen."""
    sequences, heads, splits = batch.num_decodes, layout.heads, config.splits
    most = 0 if chosen is None else chosen.most
    if values is not None:
        splits = max(2, splits)
    parts = sequences * heads * splits if splits > 1 else 0
    stats = torch.empty((2, parts), dtype=torch.float32, device=query.device)
    partial = torch.empty((parts, layout.latent), dtype=torch.float32, device=query.device)
    _launch(
        (sequences, ceil_div(heads, config.tile), splits),
        query,
        layout,
        batch.rows,
        batch.context_lens,
        batch.block_tables,
        chosen,
        cache,
        scales,
        query if seen is None else seen,
        (partial, stats[0], stats[1]),
        0,
        config,
        TABLE if chosen is None else EITHER,
        pdl,
    )
    if splits == 1:
        return
    out = seen if values is None else values
    block_v = min(MERGED, next_power_of_2(layout.value))
    launch(
        _merge_kernel,
        (sequences, heads, 1 if values is None else ceil_div(layout.value, block_v)),
        partial,
        stats[0],
        stats[1],
        batch.context_lens,
        weights.up,
        out,
        config.min_tiles,
        HEADS=heads,
        LATENT=layout.latent,
        LATENT_BLOCK=max(16, next_power_of_2(layout.latent)),
        PLAIN=layout.plain,
        VALUE=layout.value,
        BLOCK_V=block_v,
        BLOCK_N=config.block_n,
        SPLITS=splits,
        CHUNK=min(splits, 32),
        VALUES=values is not None,
        MOST=most,
        num_warps=8,
        pdl=pdl,
    )


def attend_lists(
    query: Tensor,
    layout: LatentLayout,
    chosen: ChosenSlots,
    cache: Tensor,
    scales: Tensor | None,
    seen: Tensor,
    first: int,
    config: LatentConfig,
    *,
    pdl: bool = False,
) -> None:
    """Attention of every token from the `first` on that has a list to what is on it, into `seen` [T, heads, latent].
    Other rows stay."""
    _launch(
        (query.shape[0] - first, ceil_div(layout.heads, config.tile), 1),
        query,
        layout,
        chosen.seen,
        chosen.seen,
        chosen.slots,
        chosen,
        cache,
        scales,
        seen,
        (query, query, query),
        first,
        config,
        LIST,
        pdl,
    )


def _launch(
    grid: tuple[int, int, int],
    query: Tensor,
    layout: LatentLayout,
    rows: Tensor,
    contexts: Tensor,
    tables: Tensor,
    chosen: ChosenSlots | None,
    cache: Tensor,
    scales: Tensor | None,
    seen: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    first: int,
    config: LatentConfig,
    source: tl.constexpr,
    pdl: bool,
) -> None:
    """`parts`: where shares put their sums, peaks and totals."""
    launch(
        _decode_kernel,
        grid,
        query,
        cache,
        query if scales is None else scales,
        seen,
        *parts,
        rows,
        contexts,
        tables,
        tables if chosen is None else chosen.slots,
        tables.stride(0),
        layout.scale,
        first,
        config.min_tiles,
        HEADS=layout.heads,
        LATENT=layout.latent,
        LATENT_BLOCK=max(16, next_power_of_2(layout.latent)),
        ROTARY=layout.rotary,
        ROTARY_BLOCK=max(16, next_power_of_2(layout.rotary)),
        BLOCK_SIZE=cache.shape[1],
        TILE_M=config.tile,
        BLOCK_N=config.block_n,
        SPLITS=grid[2],
        SCALED=scales is not None,
        HALF=cache.dtype == torch.float8_e4m3fn and query.dtype != torch.float32,
        INT8=cache.dtype == torch.int8,
        CACHE_BYTES=cache.element_size(),
        SOURCE=source.value,
        MOST=0 if chosen is None else chosen.most,
        PRECISION=precision(query),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        pdl=pdl,
    )
