"""The grouped product of `moe` on experts in MXFP4, read as stored: 4-bit floats and a power of two for 32 of them.

Weight rows are the tall side of the tensor-core product and a tile's tokens the narrow one, so that weights go from
their bits to an operand within a thread. A float of e2m1 becomes one of bfloat16 by moving its bits: sign to sign, the
three others to where exponent and mantissa meet, which is the value times 2^-126, zero and subnormals included. One
multiplication by a power of two then makes the weight of it, in units of the largest power of its row; the sums are
multiplied by that one.

Inputs are taken 128 at a time. A word holds eight weights of a row: number i of word j is that of input 32 * (i // 2) +
16 * (i % 2) + j, so that the i-th weights of sixteen words are an operand of their own, whatever thread holds them. The
first four are in the low half of a word, the others in the high one. In a half, from the top bit: s0 s3 h3 s1 l3 l3 s2
a0 a0 a0 a1 a1 a1 a2 a2 a2, where s0..s3 are the signs, a0..a2 the other bits of the first three, and h3 l3 l3 those of
the fourth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cuda.kernels.activation import gate_options, gated
from penstock.engine.backends.cuda.kernels.common import (
    INTERPRETED,
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)
from penstock.engine.backends.cuda.kernels.moe_plan import (
    FEW,
    GROUP,
    FewPairs,
    Plan,
    add_up,
    few_tile,
    place_of,
    planned_tile,
)
from penstock.engine.backends.interface import Activation
from penstock.engine.loading.mxfp4 import Mxfp4

_STEP = 128
_TOP = 253
"""Exponent of a bfloat16 that is 2^126: what the bits of a weight are multiplied by where its power is its row's
largest."""


@dataclass(frozen=True, slots=True)
class Mxfp4Config:
    """Shape of the launch."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split: int = 1
    """Programs that share the inputs of a row; where the last program adds up the pairs, it adds up their parts too."""


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """One matrix [out, in], or a stack of them with one more axis in front."""

    words: Tensor
    """int32 [steps of 128 inputs, out, 16]; see the top of the file. Zeros past the last input."""
    exponents: Tensor
    """int32 [steps, out]: of the four groups of a step, the first in the lowest byte; see `_TOP`."""
    scale: Tensor
    """float32 [out]: the largest power of two of a row."""
    inputs: int

    @property
    def nbytes(self) -> int:
        """Of the weights and their powers; neither what is past the last input nor `scale`."""
        return self.scale.numel() * self.inputs * 17 // 32

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.words, self.exponents, self.scale

    def put(self, index: int, other: Mxfp4Matrix) -> None:
        """Another matrix, at a place of the stack."""
        for ours, theirs in zip(self.tensors, other.tensors, strict=True):
            ours[index].copy_(theirs)


def pack(weight: Mxfp4) -> Mxfp4Matrix:
    out, inputs = weight.shape
    steps = ceil_div(inputs, _STEP)
    codes = torch.stack((weight.blocks & 15, weight.blocks >> 4), -1).view(out, inputs).to(torch.int32)
    codes = (
        F.pad(codes, (0, steps * _STEP - inputs)).view(out, steps, 8, 16).permute(2, 1, 0, 3)
    )  # number, step, out, j
    halves = [_half(codes[first : first + 4]) for first in (0, 4)]
    top = weight.scales.to(torch.int32).amax(1, keepdim=True)
    powers = (weight.scales.to(torch.int32) - top + _TOP).clamp_(min=0)
    powers = F.pad(powers, (0, steps * 4 - inputs // 32)).view(out, steps, 4)
    shifts = torch.arange(0, 32, 8, device=powers.device, dtype=torch.int32)
    exponents = (powers << shifts).sum(-1, dtype=torch.int32)
    scale = torch.ldexp(torch.ones_like(top, dtype=torch.float32), top - 127).view(out)
    return Mxfp4Matrix((halves[0] | halves[1] << 16).contiguous(), exponents.T.contiguous(), scale, inputs)


def _half(codes: Tensor) -> Tensor:
    """Four codes into sixteen bits."""
    (s0, s1, s2, s3), (r0, r1, r2, r3) = codes >> 3, codes & 7
    bits: Tensor = s0 << 15 | r0 << 6 | s1 << 12 | r1 << 3 | s2 << 9 | r2 | s3 << 14 | (r3 >> 2) << 13 | (r3 & 3) << 10
    return bits


def stacked(matrices: list[Mxfp4Matrix]) -> Mxfp4Matrix:
    words, exponents, scale = (torch.stack(parts) for parts in zip(*(m.tensors for m in matrices), strict=True))
    return Mxfp4Matrix(words, exponents, scale, matrices[0].inputs)


# Two words, and two rows' multipliers of each of the four groups, twice in each. What is in both halves of a register
# belongs to the two words: so no two elements need be neighbours.
_UNPACK = tl.constexpr("""{
.reg .b32 t, u, m;
prmt.b32 t, $8, $9, 0x5410;
prmt.b32 m, $10, $11, 0x7610;
and.b32 $0, t, 0x81C081C0;
mul.bf16x2 $0, $0, m;
shl.b32 u, t, 3;
and.b32 u, u, 0x81C081C0;
mul.bf16x2 $1, u, m;
prmt.b32 m, $12, $13, 0x7610;
shl.b32 u, t, 6;
and.b32 u, u, 0x81C081C0;
mul.bf16x2 $2, u, m;
shl.b32 u, t, 1;
and.b32 $3, u, 0x80008000;
shr.b32 u, t, 4;
lop3.b32 $3, u, 0x00C000C0, $3, 0xEA;
shr.b32 u, t, 5;
lop3.b32 $3, u, 0x01000100, $3, 0xEA;
mul.bf16x2 $3, $3, m;
prmt.b32 t, $8, $9, 0x7632;
prmt.b32 m, $14, $15, 0x7610;
and.b32 $4, t, 0x81C081C0;
mul.bf16x2 $4, $4, m;
shl.b32 u, t, 3;
and.b32 u, u, 0x81C081C0;
mul.bf16x2 $5, u, m;
prmt.b32 m, $16, $17, 0x7610;
shl.b32 u, t, 6;
and.b32 u, u, 0x81C081C0;
mul.bf16x2 $6, u, m;
shl.b32 u, t, 1;
and.b32 $7, u, 0x80008000;
shr.b32 u, t, 4;
lop3.b32 $7, u, 0x00C000C0, $7, 0xEA;
shr.b32 u, t, 5;
lop3.b32 $7, u, 0x01000100, $7, 0xEA;
mul.bf16x2 $7, $7, m;
}""")


@triton.jit
def _weight(words: tl.tensor, exponents: tl.tensor, NUMBER: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Weight NUMBER of every word, in plain operations."""
    half = (words >> (16 * (NUMBER // 4))) & 0xFFFF
    if NUMBER % 4 == 3:
        bits = ((half << 1) & 0x8000) | ((half >> 4) & 0xC0) | ((half >> 5) & 0x100)
    else:
        bits = (half << (3 * (NUMBER % 4))) & 0x81C0
    power = ((exponents >> (8 * (NUMBER // 2))) & 255) << 23
    return ((bits << 16).to(tl.float32, bitcast=True) * power.to(tl.float32, bitcast=True)[:, None]).to(dtype)


@triton.jit
def _weights(words: tl.tensor, exponents: tl.tensor, dtype: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Operands [rows, 16] of the eight weights in `words` [rows, 16]; `exponents` [rows]."""
    if INTERPRETED or dtype != tl.bfloat16:
        parts = ()
        for i in tl.static_range(8):
            parts = parts + (_weight(words, exponents, i, dtype),)  # type: ignore[assignment]
    else:
        parts = tl.inline_asm_elementwise(
            _UNPACK,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r",
            [
                words,
                ((exponents & 255) * 0x800080)[:, None],
                (((exponents >> 8) & 255) * 0x800080)[:, None],
                (((exponents >> 16) & 255) * 0x800080)[:, None],
                (((exponents >> 24) & 255) * 0x800080)[:, None],
            ],
            dtype=(
                tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
            ),
            is_pure=True,
            pack=2,
        )  # fmt: skip
    return parts


@triton.jit(do_not_specialize=["tiles"])
def _mxfp4_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    exponent_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    route_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    counter_ptr: tl.tensor,
    tiles: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    WIDE: tl.constexpr = 2 * N if GATED else N
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    STEPS: tl.constexpr = (K + 127) // 128
    SHARE: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    pid = tl.program_id(0)
    share = pid % SPLIT
    tile, block = place_of(pid // SPLIT, tiles, COLUMNS, GROUP)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    if PAIR_BLOCK > 0:
        present, expert, m, in_m, pair, here = few_tile(order_ptr, tile, tiles, EXPERTS, PAIR_BLOCK, BLOCK_M)
    else:
        present, expert, m, in_m, pair = planned_tile(order_ptr, starts_ptr, tile, EXPERTS, EXPERT_BLOCK, BLOCK_M)
    if not present:
        return
    source = pair // TOP_K if GATED else tl.where(in_m, m, 0)
    j = tl.arange(0, 16)
    x_rows = x_ptr + source.to(tl.int64)[:, None] * K + j[None, :]
    if WEIGHTED:
        route = tl.load(route_ptr + pair, mask=in_m, other=0.0)
    # Gate rows, then up rows. Those past the end read the last one: their sums are not stored.
    r = tl.arange(0, ROWS)
    row = tl.minimum(block * BLOCK_N + r % BLOCK_N, N - 1) + r // BLOCK_N * N
    words = weight_ptr + expert.to(tl.int64) * (STEPS * WIDE * 16) + row[:, None] * 16 + j[None, :]
    exponents = exponent_ptr + expert.to(tl.int64) * (STEPS * WIDE) + row
    acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
    for step in tl.range(share * SHARE, tl.minimum(share * SHARE + SHARE, STEPS), num_stages=STAGES):
        parts = _weights(tl.load(words + step * (WIDE * 16)), tl.load(exponents + step * WIDE), x_ptr.dtype.element_ty)
        for i in tl.static_range(8):
            mask = in_m[:, None] | (BLOCK_M > 16)
            if K % 128 != 0:
                mask = mask & (step * 128 + i * 16 < K)
            x = tl.load(x_rows + step * 128 + i * 16, mask=mask, other=0.0)
            if WEIGHTED and GATED:
                x = (x.to(tl.float32) * route[:, None]).to(x.dtype)
            acc = tl.dot(parts[i], tl.trans(x), acc, input_precision=PRECISION)
    acc *= tl.load(scale_ptr + expert * WIDE + row)[:, None]
    if BIASED:
        bias = tl.load(bias_ptr + expert * WIDE + row).to(tl.float32)
        acc += tl.where(share == 0, bias, 0.0)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, BLOCK_N, BLOCK_M]), [1, 2, 0]))
        acc = gated(gate, up, GATE, ALPHA, LIMIT)
    elif WEIGHTED:
        acc *= route[None, :]
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if PAIR_BLOCK > 0 and not GATED:
        add_up(
            tl.trans(acc), pair * SPLIT + share, in_m, n, block, here, tiles * SPLIT, sums_ptr, counter_ptr, out_ptr,
            N, TOP_K * SPLIT, BLOCK_M,
        )  # fmt: skip
    else:
        out = out_ptr + (m if GATED else pair).to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=in_m[None, :] & (n < N)[:, None])


def choose(pairs: int, experts: int, wide: bool, element_size: int, few: int = 0) -> Mxfp4Config:
    """Launch shape from host values; see `moe.choose`. `wide`: with two products in a program. `few`: tokens, where
    there are few."""
    if element_size == 4:  # ordinary arithmetic, which wants small tiles
        return Mxfp4Config(block_m=16, block_n=32, num_warps=4, num_stages=2)
    if few:
        split = 2 if pairs <= 8 and not wide else 1
        return Mxfp4Config(8 if few <= 8 else FEW, 16, num_warps=2 if wide else 1, num_stages=4, split=split)
    share = pairs / experts
    if share <= 16:
        return Mxfp4Config(block_m=16, block_n=64, num_warps=2, num_stages=3 if wide else 4)
    if share <= 64:
        return Mxfp4Config(64, 64 if wide else 128, num_warps=4, num_stages=3)
    # So many rows that reading tokens from the L2 cache takes no longer than the product.
    return Mxfp4Config(128, 128, num_warps=8, num_stages=3)


def fixed(wide: bool, element_size: int) -> Mxfp4Config:
    """The one launch shape of deterministic mode; see `moe.fixed`."""
    return choose(1, 1, wide, element_size)


def grouped_linear(
    x: Tensor,
    stack: Mxfp4Matrix,
    bias: Tensor | None,
    schedule: Plan | FewPairs,
    top_k: int,
    *,
    gated: bool,
    route_weights: Tensor | None = None,
    activation: Activation = "silu",
    counters: Tensor | None = None,
    config: Mxfp4Config | None = None,
    pdl: bool = False,
) -> Tensor:
    """As `moe.grouped_linear`."""
    experts, _, outputs, _ = stack.words.shape
    n, pairs = outputs // 2 if gated else outputs, schedule.pairs
    few = len(schedule.chosen) if isinstance(schedule, FewPairs) else 0
    summed = few > 0 and not gated
    out = torch.empty((pairs // top_k if summed else pairs, n), dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out
    shape = config or choose(pairs, experts, gated, x.element_size(), few)
    tiles = schedule.tiles(shape.block_m)
    split = shape.split if summed else 1
    launch(
        _mxfp4_kernel,
        (tiles * ceil_div(n, shape.block_n) * split,),
        x,
        *stack.tensors,
        x if bias is None else bias,
        out,
        *schedule.pointers,
        x if route_weights is None else route_weights,
        torch.empty((pairs * split, n), dtype=torch.float32, device=x.device) if summed else x,
        x if counters is None else counters,
        tiles,
        N=n,
        K=x.shape[1],
        EXPERTS=experts,
        EXPERT_BLOCK=next_power_of_2(experts),
        PAIR_BLOCK=next_power_of_2(pairs) if few else 0,
        TOP_K=top_k,
        GROUP=GROUP,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        SPLIT=split,
        STAGES=shape.num_stages,
        GATED=gated,
        WEIGHTED=route_weights is not None,
        **gate_options(activation),
        BIASED=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        pdl=pdl,
    )
    return out
