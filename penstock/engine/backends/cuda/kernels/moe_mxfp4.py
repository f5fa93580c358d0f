"""The grouped product of `moe` on experts in MXFP4, read as stored: 4-bit floats and a power of two for 32 of them.

Weight rows are the tall side of the tensor-core product and a tile's tokens the narrow one, so that weights go from
their bits to an operand within a thread. A float of e2m1 becomes one of bfloat16 by moving its bits: sign to sign, the
three others to where exponent and mantissa meet, which is the value times 2^-126, zero and subnormals included. For
few tokens the power of two of a group meets the float32 sum of the group's products; for many it meets the weights, and
sums run on in the accumulator.

A word holds weights j..j+3 and j+16..j+19 of a group of 32: even ones in its low half, odd ones in its high half. In a
half, from the top bit: s0 s3 h3 s1 l3 l3 s2 a0 a0 a0 a1 a1 a1 a2 a2 a2, where s0..s3 are the signs of weights 0, 2, 16
and 18 (or 1, 3, 17 and 19), a0..a2 the other bits of the first three, and h3 l3 l3 those of the fourth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.activation import gate_options, gated
from penstock.engine.backends.cuda.kernels.common import (
    INTERPRETED,
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)
from penstock.engine.backends.cuda.kernels.moe import Plan
from penstock.engine.backends.interface import Activation
from penstock.engine.loading.mxfp4 import Mxfp4

_GROUP = 8
"""See `moe`."""
_HALF = tl.constexpr(16)
_UNIT = tl.constexpr(2.0**126)
"""What a weight's bits are multiplied by in bfloat16 or float32."""


@dataclass(frozen=True, slots=True)
class Mxfp4Config:
    """Shape of the launch."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    scaled_sums: bool
    """Whether the powers of two meet the sums of groups, not the weights."""


@dataclass(frozen=True, slots=True)
class Mxfp4Stack:
    """Matrices [experts, out, in]."""

    words: Tensor
    """uint8 [experts, in / 32, out, 16]; see the top of the file."""
    exponents: Tensor
    """int32 [experts, steps, out]: those of up to four consecutive groups, the first in the lowest byte."""
    bias: Tensor | None

    @property
    def unroll(self) -> int:
        """Groups of a step."""
        return self.words.shape[1] // self.exponents.shape[1]

    @property
    def nbytes(self) -> int:
        return self.words.numel() + 4 * self.exponents.numel()


def pack(weight: Mxfp4) -> tuple[Tensor, Tensor]:
    """Words [in / 32, out, 16] and exponents [steps, out] of one matrix."""
    out, inputs = weight.shape
    groups = inputs // 32
    codes = torch.stack((weight.blocks & 15, weight.blocks >> 4), -1).to(torch.int32)
    # [out, groups, halves of 16, words, first or second two, even or odd]
    parts = codes.view(out, groups, 2, 4, 2, 2)
    sign, rest = parts >> 3, parts & 7
    (s0, s1), (s2, s3) = ([sign[:, :, half, :, two] for two in (0, 1)] for half in (0, 1))
    (r0, r1), (r2, r3) = ([rest[:, :, half, :, two] for two in (0, 1)] for half in (0, 1))
    halves = s0 << 15 | r0 << 6 | s1 << 12 | r1 << 3 | s2 << 9 | r2 | s3 << 14 | (r3 >> 2) << 13 | (r3 & 3) << 10
    words = (halves[..., 0] | halves[..., 1] << 16).view(torch.uint8)
    unroll = next(count for count in (4, 3, 2, 1) if groups % count == 0)
    steps = weight.scales.to(torch.int32).view(out, groups // unroll, unroll)
    shifts = torch.arange(0, 8 * unroll, 8, device=steps.device, dtype=torch.int32)
    exponents = (steps << shifts).sum(-1, dtype=torch.int32)
    return words.view(out, groups, 16).transpose(0, 1).contiguous(), exponents.T.contiguous()


@triton.jit
def _pairs(words: tl.tensor, dtype: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The weights 0..15 and 16..31 of a group. `words` [rows, 16]: in column j the word that holds both weights j.

    One element at a time: inline assembly on four bytes would take eleven instructions for eight weights, but which
    bytes it is given together depends on the layout that the compiler chooses."""
    j = tl.arange(0, 16)
    half = (words >> ((j % 2) * 16)[None, :]) & 0xFFFF
    later = ((j // 2) % 2 == 1)[None, :]
    last = ((half << 1) & 0x8000) | ((half >> 4) & 0xC0) | ((half >> 5) & 0x100)
    low = tl.where(later, half << 3, half) & 0x81C0
    high = tl.where(later, last, (half << 6) & 0x81C0)
    low = ((low << 16).to(tl.float32, bitcast=True) * _UNIT).to(dtype)
    high = ((high << 16).to(tl.float32, bitcast=True) * _UNIT).to(dtype)
    return low, high


@triton.jit
def _group_sum(
    acc: tl.tensor,
    weights: tl.tensor,
    exponents: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    U: tl.constexpr,
    SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """`acc` [rows, tokens] plus the product of one group; `exponents`: of its step, where it is number U."""
    first, second = _pairs(weights, low.dtype)
    # 2^-127 has no exponent of its own in a float32.
    scale = tl.maximum(((exponents >> (8 * U)) & 255) << 23, 0x400000).to(tl.float32, bitcast=True)
    if SUMS:
        dot = tl.dot(first, tl.trans(low), input_precision=PRECISION)
        dot = tl.dot(second, tl.trans(high), dot, input_precision=PRECISION)
        acc += dot * scale[:, None]
    else:
        if INTERPRETED:  # it multiplies no bfloat16
            first = (first.to(tl.float32) * scale[:, None]).to(low.dtype)
            second = (second.to(tl.float32) * scale[:, None]).to(low.dtype)
        else:
            first *= scale.to(low.dtype)[:, None]
            second *= scale.to(low.dtype)[:, None]
        acc = tl.dot(first, tl.trans(low), acc, input_precision=PRECISION)
        acc = tl.dot(second, tl.trans(high), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["tiles"])
def _mxfp4_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    exponent_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    route_ptr: tl.tensor,
    tiles: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIASED: tl.constexpr,
    SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """`weight_ptr`: words."""
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    first = pid // (GROUP * COLUMNS) * GROUP
    size = tl.minimum(tiles - first, GROUP)
    within = pid % (GROUP * COLUMNS)
    tile = first + within % size
    n = within // size * BLOCK_N + tl.arange(0, BLOCK_N)
    launch_successor(PDL)
    wait_for_inputs(PDL)

    # Whose tile this is: experts without tokens have none.
    e = tl.arange(0, EXPERT_BLOCK)
    begins = tl.load(starts_ptr + e, mask=e < EXPERTS, other=0)
    ends = tl.load(starts_ptr + e + 1, mask=e < EXPERTS, other=0)
    needed = (ends - begins + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(needed, axis=0)
    if tile >= tl.max(upto, axis=0):
        return
    expert = tl.sum(((upto <= tile) & (e < EXPERTS)).to(tl.int32), axis=0)
    mine = e == expert
    local = tile - tl.sum(tl.where(mine, upto - needed, 0), axis=0)
    m = tl.sum(tl.where(mine, begins, 0), axis=0) + local * BLOCK_M + tl.arange(0, BLOCK_M)
    in_m = m < tl.sum(tl.where(mine, ends, 0), axis=0)

    pair = tl.load(order_ptr + m, mask=in_m, other=0)
    source = pair // TOP_K if GATED else m
    j = tl.arange(0, 16)
    rows = x_ptr + tl.where(in_m, source, 0).to(tl.int64)[:, None] * K + j[None, :]
    WIDE: tl.constexpr = 2 * N if GATED else N
    GROUPS: tl.constexpr = K // 32
    SIZE: tl.constexpr = 4
    # Rows past the end read the last one: their sums are not stored.
    row = tl.minimum(n, N - 1)
    at = row[:, None] * SIZE + (j // 4)[None, :]
    weights = weight_ptr + expert.to(tl.int64) * (GROUPS * WIDE * SIZE) + at
    exponents = exponent_ptr + expert.to(tl.int64) * (GROUPS // UNROLL * WIDE) + row
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(0, GROUPS // UNROLL, num_stages=STAGES):
        powers = tl.load(exponents + step * WIDE)
        if GATED:
            up_powers = tl.load(exponents + step * WIDE + N)
        for u in tl.static_range(UNROLL):
            g = step * UNROLL + u
            low = tl.load(rows + g * 32)
            high = tl.load(rows + g * 32 + _HALF)
            w = tl.load(weights + g * (WIDE * SIZE))
            acc = _group_sum(acc, w, powers, low, high, u, SUMS, PRECISION)
            if GATED:
                v = tl.load(weights + g * (WIDE * SIZE) + N * SIZE)
                up = _group_sum(up, v, up_powers, low, high, u, SUMS, PRECISION)
    if BIASED:
        biases = bias_ptr + expert * WIDE + row
        acc += tl.load(biases).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(biases + N).to(tl.float32)[:, None]
    if GATED:
        acc = gated(acc, up, GATE, ALPHA, LIMIT)
        target = m
    else:
        acc *= tl.load(route_ptr + pair, mask=in_m, other=0.0)[None, :]
        target = pair
    out = out_ptr + target.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=in_m[None, :] & (n < N)[:, None])


def choose(pairs: int, experts: int, wide: bool, element_size: int) -> Mxfp4Config:
    """Launch shape from host values; see `moe.choose`. `wide`: with two products in a program."""
    if element_size == 4:  # ordinary arithmetic, which wants small tiles
        return Mxfp4Config(block_m=16, block_n=32, num_warps=4, num_stages=2, scaled_sums=True)
    share = pairs / experts
    if share <= 16:
        return Mxfp4Config(block_m=16, block_n=64, num_warps=4, num_stages=4, scaled_sums=True)
    if share <= 64:
        return Mxfp4Config(64, 64 if wide else 128, num_warps=4, num_stages=3, scaled_sums=False)
    return Mxfp4Config(128, 64 if wide else 128, num_warps=4 if wide else 8, num_stages=3, scaled_sums=False)


def grouped_linear(
    x: Tensor,
    stack: Mxfp4Stack,
    schedule: Plan,
    top_k: int,
    *,
    route_weights: Tensor | None = None,
    activation: Activation = "silu",
    config: Mxfp4Config | None = None,
    pdl: bool = False,
) -> Tensor:
    """As `moe.grouped_linear`."""
    wide = route_weights is None
    experts, groups, outputs, _ = stack.words.shape
    n, pairs = outputs // 2 if wide else outputs, schedule.order.numel()
    out = torch.empty((pairs, n), dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out
    shape = config or choose(pairs, experts, wide, x.element_size())
    tiles = min(pairs, pairs // shape.block_m + experts)
    launch(
        _mxfp4_kernel,
        (tiles * ceil_div(n, shape.block_n),),
        x,
        stack.words.view(torch.int32),
        stack.exponents,
        x if stack.bias is None else stack.bias,
        out,
        schedule.order,
        schedule.starts,
        x if route_weights is None else route_weights,
        tiles,
        N=n,
        K=groups * 32,
        EXPERTS=experts,
        EXPERT_BLOCK=next_power_of_2(experts),
        TOP_K=top_k,
        GROUP=_GROUP,
        UNROLL=stack.unroll,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        STAGES=shape.num_stages,
        GATED=wide,
        **gate_options(activation),
        BIASED=stack.bias is not None,
        SUMS=shape.scaled_sums,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        pdl=pdl,
    )
    return out
