"""Queries times a factor that grows with the logarithm of their position, each head at a rate of its own
(`Ops.scale_heads`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import ceil_div, launch, launch_successor, wait_for_inputs
from penstock.engine.backends.interface import HeadScales

_BLOCK = 512


@triton.jit
def _scale_kernel(
    query_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    rates_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    logarithms_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    launch_successor(PDL)
    logarithm = tl.load(logarithms_ptr + tl.load(positions_ptr + row))
    rate = tl.load(rates_ptr + cols // DIM, mask=mask, other=0.0)
    offset = tl.load(offsets_ptr + cols // DIM, mask=mask, other=0.0)
    wait_for_inputs(PDL)
    x = tl.load(query_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    y = x * (rate * logarithm + offset)
    tl.store(out_ptr + row * WIDTH + cols, y.to(out_ptr.dtype.element_ty), mask=mask)


def scale(queries: Tensor, positions: Tensor, scales: HeadScales, *, pdl: bool = False) -> Tensor:
    """See `Ops.scale_heads`."""
    tokens, width = queries.shape
    out = torch.empty((tokens, width), dtype=queries.dtype, device=queries.device)
    if not tokens:
        return out
    launch(
        _scale_kernel, (tokens, ceil_div(width, _BLOCK)), queries, positions, scales.rates, scales.offsets,
        scales.logarithms, out, queries.stride(0),
        WIDTH=width, DIM=width // len(scales.rates), BLOCK=_BLOCK, num_warps=4, pdl=pdl,
    )  # fmt: skip
    return out
