"""Choosing tokens from logits [rows, vocab]: argmax, Gumbel-max draws, and the cut of top-k, top-p and min-p.

A draw is the argmax of logits / temperature plus noise that depends on the row's key and the index alone
(`kernels.noise` defines it; the hash is computed here, so nothing but the logits is read). A row is cut among several
programs; a second, tiny kernel takes the best of them, the first of equals.

The filters need no sort. A token is kept when fewer than k tokens are larger, when the tokens larger than it hold less
than p of the mass (of what top-k keeps), and when it is at least min_p times as likely as the best; tokens with equal
logits are kept or dropped together. Each rule is a threshold on the logit, and the threshold is found by narrowing an
interval of float bit patterns, whose order is that of the floats, until it holds one value of the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.triton.common import (
    INTERPRETED,
    ceil_div,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)

_TILE = 1024


@triton.jit
def _fast_log(x: tl.tensor) -> tl.tensor:
    """Natural logarithm from the hardware's base-2 one: absolute error 2^-22 near one, relative 2^-22 elsewhere."""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y * 0.6931471805599453


@triton.jit
def gumbel_noise(key: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Noise of `index` (int64) under `key` (int64, the bits of an unsigned word); see `kernels.noise.gumbel`."""
    x = (key + index * -0x61C8864680B583EB).to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    bits = (x >> 41).to(tl.int32)
    u = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07
    # Near one, log(u) is small and its error is not: there, with the exact complement v = 1 - u, use the series
    # -log(1 - v) = v + v^2/2 + v^3/3 + ...
    v = ((8388607 - bits).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    near_one = v * (1.0 + v * (0.5 + v * (0.3333333333 + v * (0.25 + v * 0.2))))
    return -_fast_log(tl.where(v < 0.015625, near_one, -_fast_log(u)))


@triton.jit(do_not_specialize=["share"])
def _partial_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    key_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    value_ptr: tl.tensor,
    index_ptr: tl.tensor,
    stride: tl.tensor,
    share: tl.tensor,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    begin = split * share
    end = tl.minimum(begin + share, VOCAB)
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    where = begin + tl.zeros([TILE], tl.int32)
    temperature = 0.0
    inverse = 0.0
    key = tl.full([], 0, tl.int64)
    threshold = float("-inf")
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
        inverse = 1.0 / tl.where(temperature > 0.0, temperature, 1.0)
        key = tl.load(key_ptr + row)
        if FILTERED:
            threshold = tl.load(threshold_ptr + row)
    for start in range(begin, end, TILE):
        index = start + lane
        score = tl.load(logits_ptr + row * stride + index, mask=index < end, other=float("-inf")).to(tl.float32)
        if RANDOM:  # noqa: SIM102 (one is known when the kernel is built, the other when it runs)
            if temperature > 0.0:
                if FILTERED:
                    # Rounded as in the threshold's own computation, or a token on the cut could fall out.
                    score = tl.div_rn(score, tl.zeros([TILE], tl.float32) + temperature)
                    score = tl.where(score >= threshold, score, float("-inf"))
                else:
                    score *= inverse
                score += gumbel_noise(key, index.to(tl.int64))
        better = score > best
        best = tl.where(better, score, best)
        where = tl.where(better, index, where)
    top = tl.max(best, axis=0)
    tl.store(value_ptr + row * splits + split, top)
    tl.store(index_ptr + row * splits + split, tl.min(tl.where(best == top, where, VOCAB), axis=0))


@triton.jit
def _final_kernel(
    value_ptr: tl.tensor,
    index_ptr: tl.tensor,
    out_ptr: tl.tensor,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLIT_BLOCK)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    value = tl.load(value_ptr + row * SPLITS + s, mask=s < SPLITS, other=float("-inf"))
    index = tl.load(index_ptr + row * SPLITS + s, mask=s < SPLITS, other=VOCAB)
    top = tl.max(value, axis=0)
    token = tl.min(tl.where(value == top, index, VOCAB), axis=0)
    # A row of NaN has no largest entry; its token must still be one of the vocabulary.
    tl.store(out_ptr + row, tl.minimum(token, VOCAB - 1).to(tl.int64))


def _best(
    logits: Tensor,
    temperatures: Tensor | None,
    keys: Tensor | None,
    thresholds: Tensor | None,
    processors: int,
    pdl: bool,
) -> Tensor:
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    splits = max(1, min(ceil_div(vocab, _TILE), ceil_div(8 * processors, rows), 128))
    share = ceil_div(ceil_div(vocab, splits), _TILE) * _TILE
    splits = ceil_div(vocab, share)
    value = torch.empty((rows, splits), dtype=torch.float32, device=logits.device)
    index = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    _partial_kernel[(rows, splits)](
        logits,
        logits if temperatures is None else temperatures,
        logits if keys is None else keys,
        logits if thresholds is None else thresholds,
        value,
        index,
        logits.stride(0),
        share,
        VOCAB=vocab,
        TILE=_TILE,
        RANDOM=temperatures is not None,
        FILTERED=thresholds is not None,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    _final_kernel[(rows,)](
        value,
        index,
        out,
        VOCAB=vocab,
        SPLITS=splits,
        SPLIT_BLOCK=next_power_of_2(splits),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return out


def argmax(logits: Tensor, *, processors: int = 132, pdl: bool = False) -> Tensor:
    """int64 [rows]: index of the largest entry of each row; the first of equals."""
    return _best(logits, None, None, None, processors, pdl)


def gumbel_argmax(
    logits: Tensor,
    temperatures: Tensor,
    keys: Tensor,
    thresholds: Tensor | None = None,
    *,
    processors: int = 132,
    pdl: bool = False,
) -> Tensor:
    """int64 [rows]: a draw from softmax(logits / temperature) of each row; temperature 0 means argmax.

    `thresholds`, from `filter_thresholds`, leaves out what the filters exclude.
    """
    return _best(logits, temperatures, keys, thresholds, processors, pdl)


@triton.jit
def _ordered(x: tl.tensor) -> tl.tensor:
    """int32 whose order is the order of the floats `x`."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _scaled(row_ptr: tl.tensor, index: tl.tensor, temperature: tl.tensor, VOCAB: tl.constexpr) -> tl.tensor:
    """Logits over temperature, as the draw computes them; -inf past the end."""
    x = tl.load(row_ptr + index, mask=index < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, tl.zeros(x.shape, tl.float32) + temperature)


@triton.jit
def _weight(x: tl.tensor, peak: tl.tensor, BY_MASS: tl.constexpr) -> tl.tensor:
    if BY_MASS:
        weight = tl.exp(x - peak)
    else:
        weight = tl.full(x.shape, 1.0, tl.float32)
    return weight


@triton.jit
def _search(
    row_ptr: tl.tensor,
    temperature: tl.tensor,
    peak: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    goal: tl.tensor,
    BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The smallest value v of the row such that the values above it weigh less than `goal`, as ordered bits.

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
        above_first = tl.zeros([TILE], tl.float32)
        above_second = tl.zeros([TILE], tl.float32)
        above_third = tl.zeros([TILE], tl.float32)
        smallest = high + tl.zeros([TILE], tl.int32)
        largest = low + tl.zeros([TILE], tl.int32)
        for start in range(0, VOCAB, TILE):
            x = _scaled(row_ptr, start + lane, temperature, VOCAB)
            bits = _ordered(x)
            weight = _weight(x, peak, BY_MASS)
            above_first += tl.where(bits > first, weight, 0.0)
            above_second += tl.where(bits > second, weight, 0.0)
            above_third += tl.where(bits > third, weight, 0.0)
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
def _threshold_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row).to(tl.int32)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    by_count = (top_k > 0) & (top_k < VOCAB)
    by_mass = top_p < 1.0
    threshold = float("-inf")
    if (temperature > 0.0) & (by_count | by_mass | (min_p > 0.0)):
        row_ptr = logits_ptr + row * stride
        lane = tl.arange(0, TILE)
        most = tl.full([TILE], float("-inf"), tl.float32)
        least = tl.full([TILE], float("inf"), tl.float32)
        for start in range(0, VOCAB, TILE):
            x = _scaled(row_ptr, start + lane, temperature, VOCAB)
            most = tl.maximum(most, x)
            least = tl.where(start + lane < VOCAB, tl.minimum(least, x), least)
        peak = tl.max(most, axis=0)
        high = _ordered(peak)
        low = _ordered(tl.min(least, axis=0)) - 1
        cut = low + 1
        total = 0.0
        if by_count:
            cut = _search(row_ptr, temperature, peak, low, high, top_k.to(tl.float32), False, VOCAB, TILE)
        if by_mass:
            # The mass top-k leaves: all above its cut, and as many of the cut's equals as there is room for.
            above = tl.zeros([TILE], tl.float32)
            number = tl.zeros([TILE], tl.float32)
            for start in range(0, VOCAB, TILE):
                x = _scaled(row_ptr, start + lane, temperature, VOCAB)
                bits = _ordered(x)
                inside = start + lane < VOCAB
                above += tl.where(inside & (bits > cut), tl.exp(x - peak), 0.0)
                number += tl.where(inside & (bits > cut), 1.0, 0.0)
            limit = VOCAB * 1.0
            if by_count:
                limit = top_k.to(tl.float32)
            value = (cut ^ ((cut >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            room = limit - tl.sum(number, axis=0)
            total = tl.sum(above, axis=0) + room * tl.exp(value - peak)
            goal = tl.maximum(top_p * total, 1e-30)
            cut = _search(row_ptr, temperature, peak, cut - 1, high, goal, True, VOCAB, TILE)
        threshold = (cut ^ ((cut >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        if min_p > 0.0:
            threshold = tl.maximum(threshold, peak + tl.log(min_p))
    tl.store(out_ptr + row, threshold)


def filter_thresholds(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, pdl: bool = False
) -> Tensor:
    """float32 [rows]: the smallest logit / temperature that top-k, top-p and min-p all keep; -inf where none filters.

    `top_k` is an integer tensor (0: no limit), `top_p` and `min_p` float32, all [rows]. Top-p is taken over what top-k
    leaves. The best token is always kept.
    """
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _threshold_kernel[(rows,)](
            logits,
            temperatures,
            top_k,
            top_p,
            min_p,
            out,
            logits.stride(0),
            VOCAB=vocab,
            TILE=min(8192, next_power_of_2(vocab)),
            PDL=pdl,
            num_warps=16,
            launch_pdl=pdl,
        )
    return out
