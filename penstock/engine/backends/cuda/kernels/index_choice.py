"""The best scores of each token, exactly: of equal ones those of the earlier positions.

A radix select. Scores are compared as integers in the order of the floats, a digit of eight bits at a time, from the
top: a launch counts how often each value of a digit occurs among the scores that agree with the cut in the digits
before it, and the next one reads off the cut's digit. Behind four launches the cut is known; another counts what lies
above it and on it in every share of a row, and the last one writes the slots of what is chosen, in the order of
positions, each share behind those before it. Counts are integers and shares have a fixed order, so that the result
depends on nothing but the scores. Nothing is read by the host, and every program finds in device memory how far its row
goes: the launches are those of the longest row that a captured step may have, and programs that a shorter one does not
need return at once.

Every launch reads a row once: six times four bytes per seen token, where a key of 128 bfloat16 has 256. `torch.topk` is
several launches of its own that read the row about as often, over the whole width whatever is seen of it, and leaves
the choice among equals open; settling that takes half a dozen further passes in PyTorch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import (
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)
from penstock.engine.backends.cuda.kernels.filter_floor import ordered_bits
from penstock.engine.backends.cuda.kernels.index_rows import DIGITS, VALUES
from penstock.engine.backends.interface import AttentionBatch

TILE = 2048
"""Scores that a program looks at together; rows of scores are as wide as a multiple of it."""
MOST_SHARES = 128
"""Of a row."""
_WAVES = 2
"""Programs per multiprocessor, about."""


@triton.jit
def _share(seen: tl.tensor, split: tl.tensor, splits: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Where a share of a row begins and ends; behind the row shares end before they begin."""
    share = tl.cdiv(tl.cdiv(seen, TILE), splits) * TILE
    begin = split * share
    return begin, tl.minimum(begin + share, seen)


@triton.jit
def _keys(score_ptr: tl.tensor, n: tl.tensor) -> tl.tensor:
    """uint32 whose order is that of the scores; both zeros are equal. Of a whole tile, which rows have room for: what
    lies behind the last score is anything."""
    x = tl.load(score_ptr + n)
    x = tl.where(x == 0.0, 0.0, x)
    return ordered_bits(x).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _cut(counts_ptr: tl.tensor, MOST: tl.constexpr, KNOWN: tl.constexpr, VALUES: tl.constexpr) -> tl.tensor:
    """The first `KNOWN` digits of the last score that is chosen, and how many are chosen of those that have them."""
    value = tl.arange(0, VALUES)
    digits = tl.zeros([], tl.uint32)
    room = tl.full([], MOST, tl.int32)
    for digit in tl.static_range(KNOWN):
        count = tl.load(counts_ptr + digit * VALUES + value)
        above = tl.sum(count, axis=0) - tl.cumsum(count, axis=0)
        mine = (above < room) & (above + count >= room)
        digits = digits * VALUES + tl.sum(tl.where(mine, value, 0), axis=0).to(tl.uint32)
        room -= tl.sum(tl.where(mine, above, 0), axis=0)
    return digits, room


@triton.jit(do_not_specialize=["splits"])
def _digit_kernel(
    score_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    width: tl.tensor,
    splits: tl.tensor,
    DIGIT: tl.constexpr,
    DIGITS: tl.constexpr,
    VALUES: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    seen = tl.load(seen_ptr + token)
    begin, end = _share(seen, tl.program_id(1), splits, TILE)
    if (seen <= MOST) | (begin >= end):
        return
    counts = counts_ptr + token * (DIGITS * VALUES)
    digits, _ = _cut(counts, MOST, DIGIT, VALUES)
    found = tl.zeros([VALUES], tl.int32)
    for start in range(begin, end, TILE):
        n = start + tl.arange(0, TILE)
        keys = _keys(score_ptr + token * width, n)
        alike = n < end
        if DIGIT > 0:
            alike &= (keys >> (32 - 8 * DIGIT)) == digits
        value = ((keys >> (24 - 8 * DIGIT)) & 255).to(tl.int32)
        if tl.max(alike.to(tl.int32), axis=0) > 0:
            found += tl.histogram(value, VALUES, mask=alike)
    value = tl.arange(0, VALUES)
    tl.atomic_add(counts + DIGIT * VALUES + value, found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=["splits"])
def _share_kernel(
    score_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    share_ptr: tl.tensor,
    width: tl.tensor,
    splits: tl.tensor,
    DIGITS: tl.constexpr,
    VALUES: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """How many scores of each share lie above the cut, and how many on it."""
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    seen = tl.load(seen_ptr + token)
    if seen <= MOST:
        return
    begin, end = _share(seen, split, splits, TILE)
    cut, _ = _cut(counts_ptr + token * (DIGITS * VALUES), MOST, DIGITS, VALUES)
    above = tl.zeros([TILE], tl.int32)
    equal = tl.zeros([TILE], tl.int32)
    for start in range(begin, end, TILE):
        n = start + tl.arange(0, TILE)
        keys = _keys(score_ptr + token * width, n)
        above += ((keys > cut) & (n < end)).to(tl.int32)
        equal += ((keys == cut) & (n < end)).to(tl.int32)
    at = share_ptr + (token * splits + split) * 2
    tl.store(at, tl.sum(above, axis=0))
    tl.store(at + 1, tl.sum(equal, axis=0))


@triton.jit(do_not_specialize=["splits"])
def _write_kernel(
    score_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    row_ptr: tl.tensor,
    table_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    share_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    table_stride: tl.tensor,
    width: tl.tensor,
    splits: tl.tensor,
    DIGITS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    SHARES_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    seen = tl.load(seen_ptr + token)
    begin, end = _share(seen, split, splits, TILE)
    if begin >= end:
        return
    slots = slot_ptr + token * MOST
    table = table_ptr + tl.load(row_ptr + token).to(tl.int64) * table_stride
    if seen <= MOST:
        for start in range(begin, end, TILE):
            n = start + tl.arange(0, TILE)
            block = tl.load(table + n // BLOCK_SIZE, mask=n < end, other=0)
            tl.store(slots + n, block * BLOCK_SIZE + n % BLOCK_SIZE, mask=n < end)
    else:
        cut, room = _cut(counts_ptr + token * (DIGITS * VALUES), MOST, DIGITS, VALUES)
        s = tl.arange(0, SHARES_BLOCK)
        at = share_ptr + (token * splits + s) * 2
        above = tl.sum(tl.load(at, mask=s < split, other=0), axis=0)
        equal = tl.sum(tl.load(at + 1, mask=s < split, other=0), axis=0)
        for start in range(begin, end, TILE):
            n = start + tl.arange(0, TILE)
            keys = _keys(score_ptr + token * width, n)
            is_above = (keys > cut) & (n < end)
            is_equal = (keys == cut) & (n < end)
            # Both counts in one sum: neither reaches 2^16 in a tile.
            here = is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16)
            before = tl.cumsum(here, axis=0) - here
            above_before = above + (before & 0xFFFF)
            equal_before = equal + (before >> 16)
            taken = is_above | (is_equal & (equal_before < room))
            to = slots + above_before + tl.minimum(equal_before, room)
            block = tl.load(table + n // BLOCK_SIZE, mask=taken, other=0)
            tl.store(to, block * BLOCK_SIZE + n % BLOCK_SIZE, mask=taken)
            all_of = tl.sum(here, axis=0)
            above += all_of & 0xFFFF
            equal += all_of >> 16


def choose_best(
    scores: Tensor,
    seen: Tensor,
    rows: Tensor,
    counts: Tensor,
    batch: AttentionBatch,
    block_size: int,
    slots: Tensor,
    processors: int,
    *,
    pdl: bool = False,
) -> None:
    """Write the slots of the best of `scores` [n, width] into `slots` int32 [n, most], and of tokens that see no more
    than `most` all. `counts`: zeros where there is a choice; see `index_rows.ask`, which also says what `seen` is."""
    tokens, width, most = scores.shape[0], scores.shape[1], slots.shape[1]
    tile = TILE
    splits = min(ceil_div(width, tile), next_power_of_2(ceil_div(_WAVES * processors, tokens)), MOST_SHARES)
    shares = torch.empty((tokens, splits, 2), dtype=torch.int32, device=scores.device)
    grid, num_warps = (tokens, splits), max(1, min(8, tile // 256))
    for digit in range(DIGITS):
        launch(
            _digit_kernel,
            grid,
            scores,
            seen,
            counts,
            width,
            splits,
            DIGIT=digit,
            DIGITS=DIGITS,
            VALUES=VALUES,
            MOST=most,
            TILE=tile,
            num_warps=num_warps,
            pdl=pdl,
        )
    if splits > 1:
        launch(
            _share_kernel,
            grid,
            scores,
            seen,
            counts,
            shares,
            width,
            splits,
            DIGITS=DIGITS,
            VALUES=VALUES,
            MOST=most,
            TILE=tile,
            num_warps=num_warps,
            pdl=pdl,
        )
    launch(
        _write_kernel,
        grid,
        scores,
        seen,
        rows,
        batch.block_tables,
        counts,
        shares,
        slots,
        batch.block_tables.stride(0),
        width,
        splits,
        DIGITS=DIGITS,
        VALUES=VALUES,
        BLOCK_SIZE=block_size,
        MOST=most,
        TILE=tile,
        SHARES_BLOCK=MOST_SHARES,
        num_warps=num_warps,
        pdl=pdl,
    )
