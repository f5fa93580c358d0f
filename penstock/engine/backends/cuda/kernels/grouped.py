"""Linear layers on integer weights in groups, y = x W^T with W = scale * q + minimum, q in 4 or 8 bits.

Weight rows are the tall side of a tensor-core product whose narrow side is the batch, from one token on: in ordinary
arithmetic turning 4 bits into a number costs more than reading them. So does a conversion; instead a nibble becomes
the low mantissa bits of a constant (128 in bfloat16, 1024 in float16), two instructions for four weights, and the
constant is taken back once per group, with the minimum, through the sum of the group's inputs. Scales meet float32
sums of whole groups, so the product is as exact as the checkpoint's own numbers.

The layout of `GroupedWeight` puts weight i of a block of 32 into the low and weight i + 16 into the high half of byte
i: both halves of a load are then contiguous inputs, and nothing moves between threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import (
    INTERPRETED,
    ceil_div,
    launch,
    launch_successor,
    wait_for_inputs,
)
from penstock.engine.backends.cuda.kernels.epilogue import epilogue
from penstock.engine.backends.cuda.kernels.norm import rms_norm

MAX_BATCH = 8
"""Up to here a linear is bound by reading its weights, and takes its neighbours into the same launch."""
MAX_TOKENS = 256
"""Above, widening the weights once for cuBLAS is cheaper than widening them for every tile."""
BLOCK = 32
_FIXED = 32
"""Tokens of a program in deterministic mode."""
_HALF = tl.constexpr(16)


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """W [out, in] on the device. `group` divides `in` and is a power of two from 32 on."""

    data: Tensor
    """uint8 [out, in / 2], or int8 [out, in]."""
    factors: Tensor
    """int32 [in / group, out]: two float16, the scale in the low half and the minimum in the high half. One word, so
    that it can travel through the asynchronous copy pipeline beside the weights."""
    bits: int
    group: int
    has_minimum: bool = True
    """False: all minima are zero and need no arithmetic."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.data, self.factors))

    def in_8_bits(self) -> GroupedWeight:
        """The same weights, a byte each."""
        if self.bits == 8:
            return self
        pairs = self.data.view(self.data.shape[0], -1, BLOCK // 2)
        data = torch.cat((pairs & 15, pairs >> 4), -1).flatten(1).view(torch.int8)
        return replace(self, data=data, bits=8)

    def factors_by(self, group: int) -> Tensor:
        """`factors` for every `group` inputs, which divides this group."""
        return self.factors.repeat_interleave(self.group // group, 0)


def join_factors(scale: Tensor, minimum: Tensor | None) -> Tensor:
    """`GroupedWeight.factors` of two float16 [in / group, out]."""
    low = torch.zeros_like(scale) if minimum is None else minimum
    return torch.stack((scale, low), dim=-1).contiguous().view(torch.int32).squeeze(-1)


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """Shape of a launch: weight rows per program, groups per step of the copy pipeline."""

    block_n: int
    unroll: int
    num_warps: int
    num_stages: int


@triton.jit
def split_factors(factors: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Scale and minimum, as float32."""
    scale = (factors & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    minimum = (factors >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, minimum


@triton.jit
def nibble_bias(dtype: tl.constexpr) -> tl.constexpr:
    """What `nibbles` adds to each weight."""
    return tl.constexpr(128.0 if dtype == tl.bfloat16 else 1024.0 if dtype == tl.float16 else 0.0)


@triton.jit
def nibbles(pairs: tl.tensor, HIGH: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Low or high halves of bytes as numbers of `dtype`, plus `nibble_bias`."""
    if INTERPRETED or dtype == tl.float32:
        half = (pairs >> 4) if HIGH else (pairs & 15)
        wide = (half.to(tl.float32) + nibble_bias(dtype)).to(dtype)
    elif dtype == tl.bfloat16:
        wide = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.b32 t, $2, 4; and.b32 t, t, 0x0f0f0f0f; "
            "prmt.b32 $0, t, 0x43434343, 0x5140; prmt.b32 $1, t, 0x43434343, 0x7362; }"
            if HIGH
            else "{ .reg .b32 t; and.b32 t, $2, 0x0f0f0f0f; "
            "prmt.b32 $0, t, 0x43434343, 0x5140; prmt.b32 $1, t, 0x43434343, 0x7362; }",
            "=r,=r,r",
            [pairs],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        wide = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.b32 t, $2, 4; and.b32 t, t, 0x0f0f0f0f; "
            "prmt.b32 $0, t, 0x64646464, 0x5140; prmt.b32 $1, t, 0x64646464, 0x7362; }"
            if HIGH
            else "{ .reg .b32 t; and.b32 t, $2, 0x0f0f0f0f; "
            "prmt.b32 $0, t, 0x64646464, 0x5140; prmt.b32 $1, t, 0x64646464, 0x7362; }",
            "=r,=r,r",
            [pairs],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return wide


@triton.jit
def group_sum(
    acc: tl.tensor,
    weights: tl.tensor,
    scale: tl.tensor,
    minimum: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    total: tl.tensor,
    BITS: tl.constexpr,
    MINIMUM: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """`acc` [rows, batch] plus one group's product. `low`, `high`: inputs [batch, n]; `total`: their sum."""
    if BITS == 4:
        dot = tl.dot(nibbles(weights, False, low.dtype), tl.trans(low), input_precision=PRECISION)
        dot = tl.dot(nibbles(weights, True, low.dtype), tl.trans(high), dot, input_precision=PRECISION)
        acc += dot * scale[:, None] + total * (minimum - scale * nibble_bias(low.dtype))[:, None]
    else:
        wide = weights.to(tl.float32).to(low.dtype) if INTERPRETED else weights.to(low.dtype)
        dot = tl.dot(wide, tl.trans(low), input_precision=PRECISION)
        acc += dot * scale[:, None]
        if MINIMUM:
            acc += total * minimum[:, None]
    return acc


@triton.jit
def _ones(weights: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Ones of `dtype`, laid out as the weights are: made from them, so that both products take the input alike."""
    if INTERPRETED or dtype == tl.float32:
        ones = (weights.to(tl.float32) * 0.0 + 1.0).to(dtype)
    elif dtype == tl.bfloat16:
        ones = tl.inline_asm_elementwise(
            "mov.b32 $0, 0x3f803f80; mov.b32 $1, 0x3f803f80;",
            "=r,=r,r",
            [weights],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        ones = tl.inline_asm_elementwise(
            "mov.b32 $0, 0x3c003c00; mov.b32 $1, 0x3c003c00;",
            "=r,=r,r",
            [weights],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return ones


@triton.jit
def input_totals(
    weights: tl.tensor, low: tl.tensor, high: tl.tensor, BITS: tl.constexpr, PRECISION: tl.constexpr
) -> tl.tensor:
    """Sums of the inputs of a group [1 or rows, batch]. For few tokens the tensor cores have time to add them up, and
    put the result where the group's product is; for many, they are better used for products."""
    if low.shape[0] <= 8:
        ones = _ones(weights, low.dtype)
        total = tl.dot(ones, tl.trans(low), input_precision=PRECISION)
        if BITS == 4:
            total = tl.dot(ones, tl.trans(high), total, input_precision=PRECISION)
    else:
        total = tl.sum(low.to(tl.float32), axis=1)[None, :]
        if BITS == 4:
            total += tl.sum(high.to(tl.float32), axis=1)[None, :]
    return total


@triton.jit(do_not_specialize=["batch"])
def _grouped_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    x_stride: tl.tensor,
    batch: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    MINIMUM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    ROWS: tl.constexpr = 2 * N if GATED else N
    BYTES: tl.constexpr = GROUP * BITS // 8
    PITCH: tl.constexpr = K * BITS // 8
    GROUPS: tl.constexpr = K // GROUP
    # The sum of a group's inputs is wanted for a minimum, and to take back the bias of 4-bit weights.
    SUMS: tl.constexpr = MINIMUM or BITS == 4
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.program_id(1) * BATCH + tl.arange(0, BATCH)
    j = tl.arange(0, BYTES)
    # The input of byte j's low half; that of its high half is 16 further.
    k = j // _HALF * 2 * _HALF + j % _HALF if BITS == 4 else j
    # Rows past the end read the last row: their sums are not stored, and loads need no mask along n.
    row = tl.minimum(n, N - 1)
    rows = weight_ptr + row.to(tl.int64)[:, None] * PITCH + j[None, :]
    inputs = x_ptr + b.to(tl.int64)[:, None] * x_stride + k[None, :]
    in_batch = (b < batch)[:, None]
    acc = tl.zeros([BLOCK_N, BATCH], tl.float32)
    up = tl.zeros([BLOCK_N, BATCH], tl.float32)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    # Set at the loop, the number of stages also applies to the factors, which no product reads directly.
    for start in tl.range(0, GROUPS, UNROLL, num_stages=STAGES):
        for u in tl.static_range(UNROLL):
            g = start + u
            low = tl.load(inputs + g * GROUP, mask=in_batch, other=0.0)
            high = tl.load(inputs + g * GROUP + _HALF, mask=in_batch, other=0.0) if BITS == 4 else low
            weights = tl.load(rows + g * BYTES)
            total = input_totals(weights, low, high, BITS, PRECISION) if SUMS else acc
            scale, minimum = split_factors(tl.load(factor_ptr + g * ROWS + row))
            acc = group_sum(acc, weights, scale, minimum, low, high, total, BITS, MINIMUM, PRECISION)
            if GATED:
                scale, minimum = split_factors(tl.load(factor_ptr + g * ROWS + N + row))
                weights = tl.load(rows + N * PITCH + g * BYTES)
                up = group_sum(up, weights, scale, minimum, low, high, total, BITS, MINIMUM, PRECISION)
    epilogue(
        tl.trans(acc),
        tl.trans(up),
        n,
        b,
        batch,
        out_ptr,
        bias_ptr,
        factor_ptr,
        residual_ptr,
        N,
        BIAS,
        False,
        RESIDUAL,
        GATED,
    )


@triton.jit
def _widen_kernel(
    weight_ptr: tl.tensor,
    factor_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    BYTES: tl.constexpr = GROUP * BITS // 8
    local = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(first + local, N - 1).to(tl.int64)
    g = tl.program_id(1)
    j = tl.arange(0, BYTES)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    q = tl.load(weight_ptr + n[:, None] * (K * BITS // 8) + (g * BYTES + j)[None, :])
    scale, minimum = split_factors(tl.load(factor_ptr + g * N + n))
    k = j // _HALF * 2 * _HALF + j % _HALF if BITS == 4 else j
    to = out_ptr + local.to(tl.int64)[:, None] * K + (g * GROUP + k)[None, :]
    inside = (first + local < N)[:, None]
    kind = out_ptr.dtype.element_ty
    if BITS == 4:
        tl.store(to, ((q & 15).to(tl.float32) * scale[:, None] + minimum[:, None]).to(kind), mask=inside)
        tl.store(to + _HALF, ((q >> 4).to(tl.float32) * scale[:, None] + minimum[:, None]).to(kind), mask=inside)
    else:
        tl.store(to, (q.to(tl.float32) * scale[:, None] + minimum[:, None]).to(kind), mask=inside)


def choose(n: int, batch: int, bits: int, group: int, gated: bool) -> tuple[GroupedConfig, int]:
    """The launch shape for `n` outputs, and how many tokens a program takes."""
    tokens = next(size for size in (8, 16, 32, 64) if batch <= size or size == 64)
    block_n = (16 if n <= 8192 else 32) if tokens <= 8 else 32 if tokens <= 16 else 64
    step = group * bits // 8 * block_n * (2 if gated else 1)
    # Enough bytes under way per program to cover the latency of memory, in a pipeline of a few steps.
    unroll = max(1, min(8 if group == 32 else 4, 4096 // step))
    warps = block_n // 16 if tokens <= 16 else 4
    return GroupedConfig(block_n, unroll, warps, 3 if gated or tokens > 16 else 4), tokens


def linear(
    x: Tensor,
    weight: GroupedWeight,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    config: GroupedConfig | None = None,
    fixed: bool = False,
    pdl: bool = False,
) -> Tensor:
    """`x` [T, in] times the transpose of `weight`; what can be folded in is as in `gemv.linear`. `fixed`: in one launch
    shape for any number of tokens, and so with one order of summation."""
    batch, k = x.shape
    rows, inputs = weight.shape
    if k != inputs:
        raise ValueError(f"linear of {inputs} inputs applied to {k}")
    n = rows // 2 if gated else rows
    if norm is not None:
        x = rms_norm(x, norm, eps, pdl=pdl)
    if out is None:
        out = torch.empty((batch, n), dtype=x.dtype, device=x.device)
    shape, tokens = choose(n, _FIXED if fixed else batch, weight.bits, weight.group, gated)
    if config is not None:
        shape = config
    groups = k // weight.group
    unroll = next(u for u in range(shape.unroll, 0, -1) if groups % u == 0)
    launch(
        _grouped_kernel,
        (ceil_div(n, shape.block_n), ceil_div(batch, tokens)),
        x,
        weight.data,
        weight.factors,
        out,
        x if bias is None else bias,
        x if residual is None else residual,
        x.stride(0),
        batch,
        N=n,
        K=k,
        GROUP=weight.group,
        BITS=weight.bits,
        BATCH=tokens,
        BLOCK_N=shape.block_n,
        UNROLL=unroll,
        STAGES=shape.num_stages,
        MINIMUM=weight.has_minimum,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        GATED=gated,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        pdl=pdl,
    )
    return out


def widen(weight: GroupedWeight, first: int, out: Tensor, *, pdl: bool = False) -> Tensor:
    """Rows from `first` on as dense numbers, as many as `out` [rows, in] has room for."""
    rows, k = weight.shape
    launch(
        _widen_kernel,
        (ceil_div(out.shape[0], 16), k // weight.group),
        weight.data,
        weight.factors,
        out,
        first,
        N=rows,
        K=k,
        GROUP=weight.group,
        BITS=weight.bits,
        BLOCK_N=16,
        num_warps=4,
        pdl=pdl,
    )
    return out
