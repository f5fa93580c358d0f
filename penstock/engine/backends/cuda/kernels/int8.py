"""Activations in int8, for int8 products: rounding each token by its largest value, and scaling the sums back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import (
    INTERPRETED,
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)

MIN_ROWS = 32
"""The vendor's int8 product refuses fewer than 17 rows: there are rows of no meaning below."""


@triton.jit
def _round(x: tl.tensor) -> tl.tensor:
    """To the nearest integer, ties to even."""
    return x + 12582912.0 - 12582912.0 if not INTERPRETED else tl.floor(x + 0.5)


@triton.jit
def _quantize_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    top = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12)
    tl.store(scale_ptr + row, top / 127.0)
    tl.store(out_ptr + row * WIDTH + cols, _round(x * (127.0 / top)).to(tl.int8), mask=cols < WIDTH)


@triton.jit
def _rescale_kernel(
    sums_ptr: tl.tensor,
    token_scale_ptr: tl.tensor,
    weight_scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    launch_successor(PDL)
    wait_for_inputs(PDL)
    y = tl.load(sums_ptr + row * N + n, mask=inside, other=0).to(tl.float32)
    y *= tl.load(weight_scale_ptr + n, mask=inside, other=0.0) * tl.load(token_scale_ptr + row)
    if BIAS:
        y += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + n, y.to(out_ptr.dtype.element_ty), mask=inside)


def quantize(x: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """`x` [T, width] as int8 [max(T, MIN_ROWS), width], and the scales [T] of its rows."""
    tokens, width = x.shape
    out = torch.empty((max(tokens, MIN_ROWS), width), dtype=torch.int8, device=x.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    block = next_power_of_2(width)
    launch(
        _quantize_kernel,
        (tokens,),
        x,
        out,
        scale,
        x.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=max(1, min(16, block // 1024)),
        pdl=pdl,
    )
    return out, scale


def rescale(
    sums: Tensor,
    token_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    pdl: bool = False,
) -> Tensor:
    """The first T rows of int32 `sums` [>= T, N] times `token_scale` [T] and `weight_scale` [N], plus `bias`."""
    tokens, n = token_scale.shape[0], sums.shape[1]
    out = torch.empty((tokens, n), dtype=dtype, device=sums.device)
    launch(
        _rescale_kernel,
        (tokens, ceil_div(n, 1024)),
        sums,
        token_scale,
        weight_scale,
        sums if bias is None else bias,
        out,
        N=n,
        BLOCK=1024,
        BIAS=bias is not None,
        num_warps=4,
        pdl=pdl,
    )
    return out
