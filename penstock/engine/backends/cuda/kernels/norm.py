"""RMS normalization of rows, optionally after adding the residual, optionally into fp8 with one scale per row; and
centring of the residual stream, which makes a LayerNorm of it.

One program owns one row and holds it in registers, so the row is read once and written once whatever is fused.
The sum is rounded to the residual's dtype before it is normalized: the next layer reads the rounded value too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.addends import Addends, Summands, parts, second
from penstock.engine.backends.cuda.kernels.common import (
    FP8_MAX,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)
from penstock.engine.backends.cuda.kernels.own_gains import OwnGains, own_arguments, own_gains


@triton.jit(do_not_specialize=["gains", "norms", "norm", "norm_start", "x_norm", "x_norm_start"])
def _norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    x_weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    delta_ranks_ptr: tl.tensor,
    bank_ptr: tl.tensor,
    held_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    gains: tl.tensor,
    norms: tl.tensor,
    norm: tl.tensor,
    norm_start: tl.tensor,
    x_norm: tl.tensor,
    x_norm_start: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    X_NORM: tl.constexpr,
    OWN_FIRST: tl.constexpr,
    OWN_SECOND: tl.constexpr,
    QUANTIZE: tl.constexpr,
    DELTA: tl.constexpr,
    SUMMED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    launch_successor(PDL)
    if OWN_FIRST or OWN_SECOND:
        slot = tl.load(slots_ptr + row).to(tl.int64)
    if NORM:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if OWN_FIRST:
            weight = own_gains(weight, bank_ptr, held_ptr, slot, gains, norms, norm, norm_start, cols, mask)
    if DELTA:
        rank = tl.load(delta_ranks_ptr + row)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(1, SUMMED):
        x += tl.load(x_ptr + row * x_stride + i * HIDDEN + cols, mask=mask, other=0.0).to(tl.float32)
    if DELTA:
        x += second(delta_ptr + row * HIDDEN + cols, mask, rank)
    if X_NORM:
        x_weight = tl.load(x_weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if OWN_SECOND:
            x_weight = own_gains(x_weight, bank_ptr, held_ptr, slot, gains, norms, x_norm, x_norm_start, cols, mask)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps) * x_weight
    if ADD:
        residual = residual_ptr + row * HIDDEN + cols
        x += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
        total = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual, total, mask=mask)
        x = total.to(tl.float32)
    y = x
    if NORM:
        y = x * tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps) * weight
    out = out_ptr + row * HIDDEN + cols
    if QUANTIZE:
        scale = tl.maximum(tl.max(tl.abs(y), axis=0), 1e-12) / FP8_MAX
        y = tl.clamp(y / scale, -FP8_MAX, FP8_MAX)
        tl.store(scale_ptr + row, scale)
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _centre_kernel(
    residual_ptr: tl.tensor,
    x_ptr: tl.tensor,
    x_delta_ptr: tl.tensor,
    x_ranks_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_delta_ptr: tl.tensor,
    y_ranks_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
    X_DELTA: tl.constexpr,
    Y_DELTA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    at = row * HIDDEN + cols
    mask = cols < HIDDEN
    launch_successor(PDL)
    wait_for_inputs(PDL)
    total = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if ADDED > 0:
        total += tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if X_DELTA:
        total += second(x_delta_ptr + at, mask, tl.load(x_ranks_ptr + row))
    if ADDED > 1:
        total += tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if Y_DELTA:
        total += second(y_delta_ptr + at, mask, tl.load(y_ranks_ptr + row))
    total -= tl.sum(total, axis=0) / HIDDEN
    tl.store(residual_ptr + at, total.to(residual_ptr.dtype.element_ty), mask=mask)


def centre(residual: Tensor, added: tuple[Tensor | Addends, ...], *, pdl: bool = False) -> None:
    """See `Ops.centre`."""
    tokens, hidden = residual.shape
    if tokens == 0:
        return
    block = next_power_of_2(hidden)
    (x, x_delta, x_options), (y, y_delta, y_options) = map(parts, (*added, residual, residual)[:2])
    launch(
        _centre_kernel,
        (tokens,),
        residual,
        x,
        *x_delta,
        y,
        *y_delta,
        HIDDEN=hidden,
        BLOCK=block,
        ADDED=len(added),
        X_DELTA=x_options["DELTA"],
        Y_DELTA=y_options["DELTA"],
        in_order=x_options["DELTA"] or y_options["DELTA"],
        num_warps=min(16, max(1, block // 512)),
        pdl=pdl,
    )


def _launch(
    x: Tensor | Addends | Summands,
    residual: Tensor | None,
    weight: Tensor | None,
    x_weight: Tensor | None,
    eps: float,
    out: Tensor,
    scale: Tensor | None,
    pdl: bool,
    own: OwnGains | None = None,
) -> None:
    summed = 1
    if isinstance(x, Summands):
        summed, x = x.count, x.rows.view(-1, x.count * x.rows.shape[1])
    x, delta, options = parts(x)
    tokens, hidden = out.shape
    if tokens == 0:
        return
    block = next_power_of_2(hidden)
    arguments, owned = own_arguments(own, x)
    launch(
        _norm_kernel,
        (tokens,),
        x,
        x if residual is None else residual,
        x if weight is None else weight,
        x if x_weight is None else x_weight,
        out,
        x if scale is None else scale,
        *delta,
        *arguments,
        x.stride(0),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        NORM=weight is not None,
        ADD=residual is not None,
        X_NORM=x_weight is not None,
        **owned,
        QUANTIZE=scale is not None,
        SUMMED=summed,
        **options,
        num_warps=min(16, max(1, block // 512)),
        pdl=pdl,
    )


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    dtype: torch.dtype | None = None,
    pdl: bool = False,
    own: OwnGains | None = None,
) -> Tensor:
    """`x` [T, hidden] (rows may be strided) normalized in float32 and scaled by `weight`; a new tensor of `dtype`.
    Without `weight`, a copy; so too below."""
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    _launch(x, None, weight, None, eps, out, None, pdl, own)
    return out


def add_rms_norm(
    x: Tensor | Addends | Summands,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    x_weight: Tensor | None = None,
    *,
    pdl: bool = False,
    own: OwnGains | None = None,
) -> Tensor:
    """`residual += x` (with `x_weight`: x normalized) in place, then `rms_norm(residual)`; a new tensor."""
    out = torch.empty_like(residual)
    _launch(x, residual, weight, x_weight, eps, out, None, pdl, own)
    return out


def rms_norm_fp8(
    x: Tensor | Summands,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    x_weight: Tensor | None = None,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `rms_norm` (`add_rms_norm` with `residual`), into e4m3 with one float32 scale per row.

    The scales are [T, 1], as `torch._scaled_mm` wants them for row-wise scaling.
    """
    like = residual
    if like is None:
        assert isinstance(x, Tensor)
        like = x
    out = torch.empty(like.shape, dtype=torch.float8_e4m3fn, device=like.device)
    scale = torch.empty((len(like), 1), dtype=torch.float32, device=like.device)
    _launch(x, residual, weight, x_weight, eps, out, scale, pdl)
    return out, scale
