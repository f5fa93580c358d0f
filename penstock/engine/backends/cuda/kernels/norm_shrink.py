"""RMS normalization of few rows, and in the same launch the products of the result with the A of each row's adapter.

Beside the program that normalizes a row stands one for every row of A: it normalizes the same row for itself, which
costs nothing while the chip is idle, and multiplies. So the linear that follows finds its products made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import launch, launch_successor, next_power_of_2, wait_for_inputs
from penstock.engine.backends.cuda.kernels.inline_lora import InlineLora


@triton.jit
def _norm_shrink_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bank_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    slot_stride: tl.tensor,
    start: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    token = tl.program_id(1)
    row = tl.program_id(0) - 1
    cols = tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    launch_successor(PDL)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + token.to(tl.int64) * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if row < 0:
        y = _normalized(x, weight, eps, HIDDEN).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token.to(tl.int64) * HIDDEN + cols, y, mask=mask)
    else:
        slot = tl.load(slots_ptr + token)
        rank = tl.load(ranks_ptr + token)
        if row < PARTS * rank:
            a_ptr = bank_ptr + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * start + row * HIDDEN
            a = tl.load(a_ptr + cols, mask=mask, other=0.0).to(tl.float32)
            y = _normalized(x, weight, eps, HIDDEN).to(out_ptr.dtype.element_ty)
            total = tl.sum(a * y.to(tl.float32), axis=0)
            tl.store(sums_ptr + token * (PARTS * R) + row, total.to(tl.int32, bitcast=True))


@triton.jit
def _normalized(x: tl.tensor, weight: tl.tensor, eps: tl.tensor, HIDDEN: tl.constexpr) -> tl.tensor:
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps) * weight


def rms_norm_shrink(
    x: Tensor, weight: Tensor, eps: float, lora: InlineLora, *, dtype: torch.dtype | None = None, pdl: bool = False
) -> Tensor:
    """`rms_norm(x, weight, eps)`; `lora.sums` holds each token's products with A afterwards."""
    tokens, hidden = x.shape
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    block = next_power_of_2(hidden)
    launch(
        _norm_shrink_kernel,
        (1 + lora.parts * lora.rank, tokens),
        x,
        weight,
        out,
        *lora.pointers,
        x.stride(0),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        R=lora.rank,
        PARTS=lora.parts,
        num_warps=min(16, max(1, block // 512)),
        pdl=pdl,
    )
    return out
