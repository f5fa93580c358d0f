"""Gating of the feed-forward (SiLU, GELU in its tanh form, or clamped), and the fp8 row quantization of what follows.

The plain gate cuts a row into chunks (no row-wide value is needed); the quantized one holds a whole row of the
result in one program, because the row's largest value sets its scale.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.addends import Addends, parts, second
from penstock.engine.backends.cuda.kernels.common import (
    FP8_MAX,
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)
from penstock.engine.backends.interface import (
    Activation,
    BoundedSilu,
    ClampedSilu,
    ClampedSwiglu,
    Clip,
    Pointwise,
    Xielu,
)

SILU, GELU, CLAMPED, SQUARED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
CLAMPED_SILU, BOUNDED_SILU = tl.constexpr(4), tl.constexpr(9)
PLAIN_GELU, PLAIN_GELU_TANH, XIELU, CLIP = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
"""Values of GATE; the last line, and SQUARED, of FUNCTION. SQUARED: there is no gate, and what there is becomes the
square of its ReLU."""


def gate_options(activation: Activation) -> dict[str, Any]:
    """The arguments of `gated`, for a launch."""
    if isinstance(activation, ClampedSwiglu):
        return {"GATE": CLAMPED.value, "ALPHA": activation.alpha, "LIMIT": activation.limit}
    if isinstance(activation, ClampedSilu):
        return {"GATE": CLAMPED_SILU.value, "ALPHA": 1.0, "LIMIT": activation.limit}
    if isinstance(activation, BoundedSilu):
        return {"GATE": BOUNDED_SILU.value, "ALPHA": 1.0, "LIMIT": activation.limit}
    gates: dict[Any, Any] = {"silu": SILU, "gelu_tanh": GELU, "relu2": SQUARED}
    return {"GATE": gates[activation].value, "ALPHA": 1.0, "LIMIT": 0.0}


@triton.jit
def gated(x: tl.tensor, up: tl.tensor, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """silu(x) * up, gelu(x) * up with gelu in its tanh form x / 2 * (1 + tanh(u)) = x / (1 + exp(-2u)), or
    `ClampedSwiglu`, `ClampedSilu`, or `BoundedSilu`."""
    if GATE == CLAMPED or GATE == CLAMPED_SILU:  # noqa: SIM109 - Triton has no `in`
        x = tl.minimum(x, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        if GATE == CLAMPED:
            up += 1.0
        x = x / (1.0 + tl.exp(-ALPHA * x))
    elif GATE == GELU:
        x = x / (1.0 + tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * x * x)))
    else:
        x = x / (1.0 + tl.exp(-x))
        if GATE == BOUNDED_SILU:
            x = tl.minimum(x, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return x * up


@triton.jit
def _gate_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    delta_ranks_ptr: tl.tensor,
    stride: tl.tensor,
    FFN: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    DELTA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < FFN
    launch_successor(PDL)
    if DELTA:
        rank = tl.load(delta_ranks_ptr + row)
    wait_for_inputs(PDL)
    x = tl.load(gate_up_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + FFN + cols, mask=mask, other=0.0).to(tl.float32)
    if DELTA:
        x += second(delta_ptr + row * 2 * FFN + cols, mask, rank)
        up += second(delta_ptr + row * 2 * FFN + FFN + cols, mask, rank)
    y = gated(x, up, GATE, ALPHA, LIMIT)
    tl.store(out_ptr + row * FFN + cols, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RESCALED: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    launch_successor(PDL)
    wait_for_inputs(PDL)
    y = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    if RESCALED:
        factor = tl.load(rows_ptr + row)
        y *= factor * tl.load(columns_ptr + cols, mask=mask, other=0.0)
    if GATED:
        up = tl.load(x_ptr + row * stride + WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
        if RESCALED:
            up *= factor * tl.load(columns_ptr + WIDTH + cols, mask=mask, other=0.0)
        y = gated(y, up, GATE, ALPHA, LIMIT)
    scale = tl.maximum(tl.max(tl.abs(y), axis=0), 1e-12) / FP8_MAX
    y = tl.clamp(y / scale, -FP8_MAX, FP8_MAX)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * WIDTH + cols, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _half_kernel(
    x_ptr: tl.tensor, out_ptr: tl.tensor, stride: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    launch_successor(PDL)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + cols, tl.clamp(x, -65504.0, 65504.0).to(tl.float16), mask=mask)


def to_half(x: Tensor, *, pdl: bool = False) -> Tensor:
    """`x` [T, width] in float16; what float16 cannot hold becomes its largest value."""
    tokens, width = x.shape
    out = torch.empty((tokens, width), dtype=torch.float16, device=x.device)
    if tokens:
        launch(
            _half_kernel,
            (tokens, ceil_div(width, 1024)),
            x,
            out,
            x.stride(0),
            WIDTH=width,
            BLOCK=1024,
            num_warps=4,
            pdl=pdl,
        )
    return out


def silu_mul(gate_up: Tensor | Addends, *, pdl: bool = False) -> Tensor:
    """[T, 2 * ffn] to [T, ffn]: silu of the first half times the second half."""
    return _gate_mul(gate_up, "silu", pdl)


def gelu_mul(gate_up: Tensor | Addends, *, pdl: bool = False) -> Tensor:
    """As `silu_mul`, with gelu in its tanh form."""
    return _gate_mul(gate_up, "gelu_tanh", pdl)


def clamped_swiglu(gate_up: Tensor | Addends, alpha: float, limit: float, *, pdl: bool = False) -> Tensor:
    """As `silu_mul`, with the gate `ClampedSwiglu`."""
    return _gate_mul(gate_up, ClampedSwiglu(alpha, limit), pdl)


def bounded_silu(gate_up: Tensor | Addends, limit: float, *, pdl: bool = False) -> Tensor:
    """As `silu_mul`, with the gate `BoundedSilu`."""
    return _gate_mul(gate_up, BoundedSilu(limit), pdl)


def _gate_mul(x: Tensor | Addends, activation: Activation, pdl: bool) -> Tensor:
    gate_up, delta, options = parts(x)
    tokens, ffn = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, ffn), dtype=gate_up.dtype, device=gate_up.device)
    if tokens == 0:
        return out
    # Few rows: more, smaller programs, so that a single token still spreads over the chip.
    block = 512 if tokens <= 32 else 2048
    launch(
        _gate_mul_kernel,
        (tokens, ceil_div(ffn, block)),
        gate_up,
        out,
        *delta,
        gate_up.stride(0),
        FFN=ffn,
        BLOCK=block,
        **gate_options(activation),
        **options,
        num_warps=block // 256,
        pdl=pdl,
    )
    return out


@triton.jit
def _pointwise_kernel(
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    delta_ranks_ptr: tl.tensor,
    positive: tl.tensor,
    negative: tl.tensor,
    beta: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr,
    DELTA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    launch_successor(PDL)
    if DELTA:
        rank = tl.load(delta_ranks_ptr + row)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    if DELTA:
        x += second(delta_ptr + row * WIDTH + cols, mask, rank)
    if FUNCTION == PLAIN_GELU:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == PLAIN_GELU_TANH:
        x = x / (1.0 + tl.exp(-1.5957691216057308 * x * (1.0 + 0.044715 * x * x)))
    elif FUNCTION == XIELU:
        # exp(y) - 1 loses the digits of a small y, so there it is the beginning of its series.
        y = tl.minimum(x, eps)
        small = y * (1.0 + y * (0.5 + y * (0.16666667 + y * 0.041666668)))
        less = tl.where(y > -0.05, small, tl.exp(y) - 1.0) - x
        x = tl.where(x > 0.0, positive * x * x, negative * less) + beta * x
    elif FUNCTION == CLIP:
        x = tl.minimum(tl.maximum(x, -positive), positive)
    else:
        x = tl.maximum(x, 0.0)
        x = x * x
    tl.store(x_ptr + row * WIDTH + cols, x.to(x_ptr.dtype.element_ty), mask=mask)


def pointwise(x: Tensor | Addends, function: Pointwise, *, pdl: bool = False) -> Tensor:
    """See `ActivationOps.pointwise`; in place."""
    rows, delta, options = parts(x)
    assert rows.is_contiguous()
    tokens, width = rows.shape
    numbers = (0.0,) * 4
    if isinstance(function, Xielu):
        kind, numbers = XIELU, (function.positive, function.negative, function.beta, function.eps)
    elif isinstance(function, Clip):
        kind, numbers = CLIP, (function.limit, 0.0, 0.0, 0.0)
    else:
        kind = {"relu2": SQUARED, "plain_gelu": PLAIN_GELU, "plain_gelu_tanh": PLAIN_GELU_TANH}[function]
    if tokens:
        block = 512 if tokens <= 32 else 2048
        launch(
            _pointwise_kernel,
            (tokens, ceil_div(width, block)),
            rows,
            *delta,
            *numbers,
            WIDTH=width,
            BLOCK=block,
            FUNCTION=kind.value,
            **options,
            num_warps=block // 256,
            pdl=pdl,
        )
    return rows


def _quantize(
    x: Tensor, width: int, gate: Activation | None, pdl: bool, scales: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    tokens = x.shape[0]
    out = torch.empty((tokens, width), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((tokens, 1), dtype=torch.float32, device=x.device)
    if tokens == 0:
        return out, scale
    block = next_power_of_2(width)
    launch(
        _quantize_kernel,
        (tokens,),
        x,
        out,
        scale,
        *(scales or (scale, scale)),
        x.stride(0),
        WIDTH=width,
        BLOCK=block,
        RESCALED=scales is not None,
        GATED=gate is not None,
        **gate_options(gate or "silu"),
        num_warps=min(32, max(1, block // 1024)),
        pdl=pdl,
    )
    return out, scale


def quantize_fp8(x: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """`x` [T, width] in e4m3, and its scales [T, 1]: row t of `x` is about `out[t] * scale[t]`."""
    return _quantize(x, x.shape[1], None, pdl)


def silu_mul_fp8(gate_up: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """`silu_mul` followed by `quantize_fp8`, in one pass."""
    return _quantize(gate_up, gate_up.shape[1] // 2, "silu", pdl)


def gelu_mul_fp8(gate_up: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """`gelu_mul` followed by `quantize_fp8`, in one pass."""
    return _quantize(gate_up, gate_up.shape[1] // 2, "gelu_tanh", pdl)


def clamped_swiglu_fp8(gate_up: Tensor, alpha: float, limit: float, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """`clamped_swiglu` followed by `quantize_fp8`, in one pass."""
    return _quantize(gate_up, gate_up.shape[1] // 2, ClampedSwiglu(alpha, limit), pdl)


def bounded_silu_fp8(gate_up: Tensor, limit: float, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """`bounded_silu` followed by `quantize_fp8`, in one pass."""
    return _quantize(gate_up, gate_up.shape[1] // 2, BoundedSilu(limit), pdl)


def gate_mul_fp8(
    gate_up: Tensor, rows: Tensor, columns: Tensor, activation: Activation, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """`silu_mul_fp8`, or with another gate, of `gate_up` times `rows` [T, 1] and `columns` [2 * ffn]."""
    return _quantize(gate_up, gate_up.shape[1] // 2, activation, pdl, (rows, columns))
