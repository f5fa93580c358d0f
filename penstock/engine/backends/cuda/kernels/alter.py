"""Outputs of linears scaled and shifted by the vectors of each token's adapter, looked up by its slot.

A program owns a part of one token's outputs. One whose adapter does not touch the linear, or that has none, returns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import ceil_div, launch, launch_successor, wait_for_inputs

_BLOCK = 1024


@triton.jit(do_not_specialize=["column", "site", "sites"])
def _alter_kernel(
    y_ptr: tl.tensor,
    bank_ptr: tl.tensor,
    held_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    y_stride: tl.tensor,
    columns: tl.tensor,
    column: tl.tensor,
    sites: tl.tensor,
    site: tl.tensor,
    outputs: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    launch_successor(PDL)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    held = tl.load(held_ptr + slot * sites + site, mask=slot >= 0, other=0)
    mask = (cols < outputs) & (held > 0)
    scale_at = bank_ptr + slot * 2 * columns + column + cols
    scale = tl.load(scale_at, mask=mask, other=0.0)
    shift = tl.load(scale_at + columns, mask=mask, other=0.0)
    wait_for_inputs(PDL)
    at = y_ptr + token * y_stride + cols
    y = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (y * scale + shift).to(y_ptr.dtype.element_ty), mask=mask)


def alter(
    y: Tensor, bank: Tensor, held: Tensor, slots: Tensor, column: int, site: int, outputs: int, *, pdl: bool = False
) -> None:
    """y[t] = scale * y[t] + shift in place, in float32. `bank`: float32 [slots, 2, columns]; `held`: int32 [slots,
    sites], whether a slot has vectors for a site; `slots`: int32 [T], -1: none."""
    if not len(y):
        return
    assert y.stride(1) == 1 and len(slots) >= len(y)
    launch(
        _alter_kernel,
        (len(y), ceil_div(outputs, _BLOCK)),
        y,
        bank,
        held,
        slots,
        y.stride(0),
        bank.shape[2],
        column,
        held.shape[1],
        site,
        outputs,
        BLOCK=_BLOCK,
        num_warps=4,
        pdl=pdl,
    )
