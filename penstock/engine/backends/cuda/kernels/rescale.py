"""Scales of an FP8 product, applied behind it.

The vendor's product with one scale per token and per output has few forms; without scales it also cuts the inputs among
multiprocessors, which is up to twice as fast where there are few tiles of outputs. Products of FP8 numbers fit into
bfloat16 unscaled, whose relative precision does not depend on the scale.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import ceil_div, launch, launch_successor, wait_for_inputs

_TILE = 128
"""Tokens and outputs of one program of the vendor's product with scales."""
_BLOCK = 1024
_MOST_GATED = 128
"""Tokens above which a gate's programs, each of which reads all scales, cost more than the product gains."""
_WIDEST_GATE = 16384
"""Outputs of a gate above which a program has no registers for their scales."""


@triton.jit
def _rescale_kernel(
    y_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    launch_successor(PDL)
    scale = tl.load(columns_ptr + n, mask=mask, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    scale *= tl.load(rows_ptr + row)
    y = tl.load(y_ptr + row * N + n, mask=mask, other=0.0).to(tl.float32) * scale
    if BIAS:
        y += bias
    tl.store(y_ptr + row * N + n, y.to(y_ptr.dtype.element_ty), mask=mask)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def pays(tokens: int, weight: Tensor) -> bool:
    """Whether a product without scales and a launch for them are faster: where the product with scales has programs for
    less than half of the multiprocessors (measured on an H200)."""
    return 2 * ceil_div(tokens, _TILE) * ceil_div(weight.shape[0], _TILE) <= _processors(weight.device)


def gate_pays(tokens: int, weight: Tensor) -> bool:
    """The same of a product whose scales are applied by the gate behind it."""
    return tokens <= _MOST_GATED and weight.shape[0] <= 2 * _WIDEST_GATE


def rescale(y: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None = None, *, pdl: bool = False) -> Tensor:
    """`y` [T, N] times `rows` [T, 1] and `columns` [N], plus `bias`, in place."""
    tokens, n = y.shape
    if tokens:
        launch(
            _rescale_kernel,
            (tokens, ceil_div(n, _BLOCK)),
            y,
            rows,
            columns,
            y if bias is None else bias,
            N=n,
            BLOCK=_BLOCK,
            BIAS=bias is not None,
            num_warps=4,
            pdl=pdl,
        )
    return y
