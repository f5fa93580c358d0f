"""The cut of top-k, top-p and min-p, without a sort.

A token is kept when fewer than k tokens are larger, when the tokens larger than it hold less than p of the mass (of
what top-k keeps), and when it is at least min_p times as likely as the best; tokens with equal logits are kept or
dropped together. Each rule is a threshold on the logit.

Three passes make the search small. The first takes the maximum of every 64 logits, and the mass. From these a floor
follows that no kept token lies under: the k-th largest of the maxima, or the level below which the whole vocabulary
could not hold 1 - p of the mass. The second collects the tokens above the floor, usually a few hundred. The third
narrows an interval of float bit patterns, whose order is that of the floats, until it holds one value. A row with too
many tokens above its floor is searched in full: slower, with the same result. Masses are summed in fixed point, so
that the order in which tokens were collected does not show.
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
from penstock.engine.backends.cuda.kernels.filter_floor import (
    collect_kernel,
    filters_anything,
    fixed,
    floor_kernel,
    load_logits,
    maxima_kernel,
    ordered_bits,
    value_of,
)

_SHARE = 4096
_GROUP = 64
_CAPACITY = 8192
"""Tokens above the floor that are searched apart."""


@triton.jit
def _search(
    source_ptr: tl.tensor,
    count: tl.tensor,
    temperature: tl.tensor,
    peak: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    goal: tl.tensor,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The smallest value v such that the values above it weigh less than `goal`, as ordered bits.

    Invariant: v lies in (low, high]. A pass weighs what is above three pivots, which leaves a quarter, and finds the
    smallest and largest values inside, which ends the search as soon as they are one.
    """
    lane = tl.arange(0, TILE)
    while low + 1 < high:
        # In 64 bits: the distance of two ordered floats can exceed 31 bits.
        width = high.to(tl.int64) - low.to(tl.int64)
        first = (low.to(tl.int64) + (width + 3) // 4).to(tl.int32)
        second = (low.to(tl.int64) + (width + 1) // 2).to(tl.int32)
        third = (low.to(tl.int64) + (3 * width + 3) // 4).to(tl.int32)
        above_first = tl.zeros([TILE], tl.int64)
        above_second = tl.zeros([TILE], tl.int64)
        above_third = tl.zeros([TILE], tl.int64)
        smallest = high + tl.zeros([TILE], tl.int32)
        largest = low + tl.zeros([TILE], tl.int32)
        for start in range(0, count, TILE):
            x = load_logits(source_ptr, start + lane, count, temperature)
            bits = ordered_bits(x)
            if BY_MASS:
                weight = fixed(x, peak)
            else:
                weight = tl.full([TILE], 1, tl.int64)
            above_first += tl.where(bits > first, weight, 0)
            above_second += tl.where(bits > second, weight, 0)
            above_third += tl.where(bits > third, weight, 0)
            inside = (bits > low) & (bits <= high)
            smallest = tl.where(inside, tl.minimum(smallest, bits), smallest)
            largest = tl.where(inside, tl.maximum(largest, bits), largest)
        new_low = low
        new_high = high
        if tl.sum(above_first, axis=0) < goal:
            new_high = first
        elif tl.sum(above_second, axis=0) < goal:
            new_low = first
            new_high = second
        elif tl.sum(above_third, axis=0) < goal:
            new_low = second
            new_high = third
        else:
            new_low = third
        low = tl.maximum(new_low, tl.min(smallest, axis=0) - 1)
        high = tl.minimum(new_high, tl.max(largest, axis=0))
    return high


@triton.jit
def _cut(
    source_ptr: tl.tensor,
    count: tl.tensor,
    temperature: tl.tensor,
    peak: tl.tensor,
    mass: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The smallest value that top-k and top-p keep, among `count` values that hold all they keep."""
    lane = tl.arange(0, TILE)
    least = tl.full([TILE], float("inf"), tl.float32)
    for start in range(0, count, TILE):
        x = load_logits(source_ptr, start + lane, count, temperature)
        least = tl.where(start + lane < count, tl.minimum(least, x), least)
    high = ordered_bits(peak)
    cut = ordered_bits(tl.min(least, axis=0))
    by_count = (top_k > 0) & (top_k < VOCAB)
    if by_count:
        cut = _search(source_ptr, count, temperature, peak, cut - 1, high, top_k.to(tl.int64), False, TILE)
    if top_p < 1.0:
        if by_count:
            # The mass top-k leaves: all above its cut, and as many of the cut's equals as there is room for.
            above = tl.zeros([TILE], tl.int64)
            number = tl.zeros([TILE], tl.int64)
            for start in range(0, count, TILE):
                x = load_logits(source_ptr, start + lane, count, temperature)
                larger = (ordered_bits(x) > cut) & (start + lane < count)
                above += tl.where(larger, fixed(x, peak), 0)
                number += tl.where(larger, 1, 0).to(tl.int64)
            room = top_k.to(tl.int64) - tl.sum(number, axis=0)
            mass = (tl.sum(above, axis=0) + room * fixed(value_of(cut), peak)).to(tl.float32)
        else:
            mass = mass * 1099511627776.0
        goal = tl.maximum((top_p * mass).to(tl.int64), 1)
        cut = _search(source_ptr, count, temperature, peak, cut - 1, high, goal, True, TILE)
    return value_of(cut)


@triton.jit
def _threshold_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    floor_ptr: tl.tensor,
    count_ptr: tl.tensor,
    candidate_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    MAXIMA: tl.constexpr,
    MAXIMA_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row).to(tl.int32)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    peak = tl.load(floor_ptr + row * 3 + 1)
    mass = tl.load(floor_ptr + row * 3 + 2)
    threshold = float("-inf")
    if temperature > 0.0:
        if filters_anything(row, temperature_ptr, top_k_ptr, top_p_ptr, VOCAB):
            count = tl.load(count_ptr + row)
            if count <= CAPACITY:
                found = candidate_ptr + row * CAPACITY
                threshold = _cut(found, count, 1.0, peak, mass, top_k, top_p, VOCAB, TILE)
            else:
                whole = logits_ptr + row * stride
                threshold = _cut(whole, VOCAB, temperature, peak, mass, top_k, top_p, VOCAB, 2 * TILE)
        if min_p > 0.0:
            i = tl.arange(0, MAXIMA_BLOCK)
            maxima = tl.load(maxima_ptr + row * MAXIMA + i, mask=i < MAXIMA, other=float("-inf"))
            threshold = tl.maximum(threshold, tl.max(maxima, axis=0) + tl.log(min_p))
    tl.store(out_ptr + row, threshold)


def thresholds(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, pdl: bool = False
) -> Tensor:
    """float32 [rows]: the smallest logit / temperature that top-k, top-p and min-p all keep; -inf where none filters.

    `top_k` is an integer tensor (0: no limit), `top_p` and `min_p` float32, all [rows]. Top-p is taken over what top-k
    leaves. The best token is always kept.
    """
    rows, vocab = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return out
    shares, groups = ceil_div(vocab, _SHARE), _SHARE // _GROUP
    maxima = torch.empty((rows, shares, groups), dtype=torch.float32, device=device)
    mass = torch.empty((rows, shares), dtype=torch.float32, device=device)
    floor = torch.empty((rows, 3), dtype=torch.float32, device=device)
    count = torch.empty(rows, dtype=torch.int32, device=device)
    candidates = torch.empty((rows, _CAPACITY), dtype=torch.float32, device=device)
    stride = logits.stride(0)
    launch(
        maxima_kernel,
        (rows, shares),
        logits,
        temperatures,
        maxima,
        mass,
        stride,
        VOCAB=vocab,
        SHARE=_SHARE,
        GROUP=_GROUP,
        num_warps=4,
        pdl=pdl,
    )
    launch(
        floor_kernel,
        (rows,),
        temperatures,
        top_k,
        top_p,
        maxima,
        mass,
        floor,
        count,
        VOCAB=vocab,
        SHARES=shares,
        SHARE_BLOCK=next_power_of_2(shares),
        GROUPS=groups,
        num_warps=4,
        pdl=pdl,
    )
    launch(
        collect_kernel,
        (rows, shares),
        logits,
        temperatures,
        maxima,
        floor,
        count,
        candidates,
        stride,
        VOCAB=vocab,
        SHARE=_SHARE,
        GROUPS=groups,
        CAPACITY=_CAPACITY,
        num_warps=4,
        pdl=pdl,
    )
    launch(
        _threshold_kernel,
        (rows,),
        logits,
        temperatures,
        top_k,
        top_p,
        min_p,
        maxima,
        floor,
        count,
        candidates,
        out,
        stride,
        VOCAB=vocab,
        CAPACITY=_CAPACITY,
        TILE=1024,
        MAXIMA=shares * groups,
        MAXIMA_BLOCK=next_power_of_2(shares * groups),
        num_warps=4,
        pdl=pdl,
    )
    return out
