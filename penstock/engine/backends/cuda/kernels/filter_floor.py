"""The first passes of the filters (`filters`): the floor that no kept token lies under, and the tokens above it.

Logits are compared as integers in the order of the floats, and masses summed in fixed point.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine.backends.cuda.kernels.common import launch_successor, wait_for_inputs


@triton.jit
def fixed(x: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """exp(x - peak), at most one, as a multiple of 2^-40."""
    return (tl.exp(x - peak) * 1099511627776.0).to(tl.int64)


@triton.jit
def ordered_bits(x: tl.tensor) -> tl.tensor:
    """int32 whose order is the order of the floats `x`."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(ordered: tl.tensor) -> tl.tensor:
    """The float of an ordered int32."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(source_ptr: tl.tensor, index: tl.tensor, count: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Logits over temperature, rounded as the draw rounds them; -inf past the end."""
    x = tl.load(source_ptr + index, mask=index < count, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, tl.zeros(x.shape, tl.float32) + temperature)


@triton.jit
def filters_anything(
    row: tl.tensor, temperature_ptr: tl.tensor, top_k_ptr: tl.tensor, top_p_ptr: tl.tensor, VOCAB: tl.constexpr
) -> tl.tensor:
    """Whether top-k or top-p limit the row; min-p alone needs no search."""
    top_k = tl.load(top_k_ptr + row)
    limited = ((top_k > 0) & (top_k < VOCAB)) | (tl.load(top_p_ptr + row) < 1.0)
    return limited & (tl.load(temperature_ptr + row) > 0.0)


@triton.jit
def maxima_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    SHARE: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    temperature = tl.load(temperature_ptr + row)
    GROUPS: tl.constexpr = SHARE // GROUP
    g = tl.arange(0, GROUPS)
    index = tl.program_id(1) * SHARE + g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if temperature > 0.0:
        x = load_logits(logits_ptr + row * stride, index, VOCAB, temperature)
        maxima = tl.max(x, axis=1)
        peak = tl.max(maxima, axis=0)
        part = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(maxima_ptr + part * GROUPS + g, maxima)
        # A share of nothing but -inf has no mass.
        mass = tl.sum(tl.sum(tl.exp(x - tl.maximum(peak, -1.0e30)), axis=1), axis=0)
        tl.store(mass_ptr + part, mass)


@triton.jit
def floor_kernel(
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    mass_ptr: tl.tensor,
    floor_ptr: tl.tensor,
    count_ptr: tl.tensor,
    VOCAB: tl.constexpr,
    SHARES: tl.constexpr,
    SHARE_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Per row: the floor, the largest value and the mass relative to it (three floats); zero the count."""
    row = tl.program_id(0).to(tl.int64)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    floor = float("inf")
    peak = 0.0
    mass = 0.0
    if filters_anything(row, temperature_ptr, top_k_ptr, top_p_ptr, VOCAB):
        s = tl.arange(0, SHARE_BLOCK)
        i = tl.arange(0, SHARE_BLOCK * GROUPS)
        maxima = tl.load(maxima_ptr + row * SHARES * GROUPS + i, mask=i < SHARES * GROUPS, other=float("-inf"))
        peaks = tl.max(tl.reshape(maxima, [SHARE_BLOCK, GROUPS]), axis=1)
        peak = tl.max(peaks, axis=0)
        masses = tl.load(mass_ptr + row * SHARES + s, mask=s < SHARES, other=0.0)
        mass = tl.sum(masses * tl.exp(tl.maximum(peaks, -1.0e30) - peak), axis=0)
        top_k = tl.load(top_k_ptr + row).to(tl.int32)
        if (top_k > 0) & (top_k < VOCAB):
            floor = float("-inf")
            if top_k <= SHARES * GROUPS:
                # The k-th largest maximum: at least k tokens are as large.
                ordered = ordered_bits(maxima)
                low = tl.min(ordered, axis=0).to(tl.int64) - 1
                high = ordered_bits(peak).to(tl.int64)
                while low + 1 < high:
                    middle = low + (high - low) // 2
                    above = tl.sum((ordered > middle.to(tl.int32)).to(tl.int32), axis=0)
                    if above < top_k:
                        high = middle
                    else:
                        low = middle
                floor = value_of(high.to(tl.int32))
        else:
            # All tokens under this level together weigh less than 1 - p; the slack covers rounding.
            rest = tl.maximum(1.0 - tl.load(top_p_ptr + row), 1.0e-7)
            floor = peak + tl.log(rest * mass / VOCAB) - 0.001
    tl.store(floor_ptr + row * 3, floor)
    tl.store(floor_ptr + row * 3 + 1, peak)
    tl.store(floor_ptr + row * 3 + 2, mass)
    tl.store(count_ptr + row, 0)


@triton.jit
def collect_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    floor_ptr: tl.tensor,
    count_ptr: tl.tensor,
    candidate_ptr: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    SHARE: tl.constexpr,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    floor = tl.load(floor_ptr + row * 3)
    part = row * tl.num_programs(1) + tl.program_id(1)
    # An infinite floor marks a row without a search; most shares of the others hold nothing above it.
    if floor < float("inf"):
        largest = tl.max(tl.load(maxima_ptr + part * GROUPS + tl.arange(0, GROUPS)), axis=0)
        if largest >= floor:
            index = tl.program_id(1) * SHARE + tl.arange(0, SHARE)
            x = load_logits(logits_ptr + row * stride, index, VOCAB, tl.load(temperature_ptr + row))
            above = (x >= floor) & (index < VOCAB)
            if tl.load(count_ptr + row) <= CAPACITY:
                at = tl.atomic_add(count_ptr + row + tl.zeros([SHARE], tl.int32), 1, mask=above, sem="relaxed")
                tl.store(candidate_ptr + row * CAPACITY + at, x, mask=above & (at < CAPACITY))
