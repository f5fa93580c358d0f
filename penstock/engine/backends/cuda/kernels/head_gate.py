"""Attention with a gate for each head's output (`Ops.split_gate`, `Ops.sigmoid_mul`, `Ops.softplus_mul`).

Nothing is copied to split queries and gates: the rotation reads queries where they stand (`GatedRows`), and the gate is
a view.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import ceil_div, launch, launch_successor, wait_for_inputs
from penstock.engine.backends.interface import HeadLayout


@dataclass(frozen=True, slots=True)
class GatedRows:
    """Rows of query and gate of each head in turn, then keys and values."""

    rows: Tensor


def split(qkv: Tensor, layout: HeadLayout) -> tuple[GatedRows, Tensor]:
    """What `rope_and_cache` takes, and the gates [T, heads, head_dim]."""
    heads, dim = layout.heads, layout.head_dim
    gate = qkv.as_strided((len(qkv), heads, dim), (qkv.stride(0), 2 * dim, 1), qkv.storage_offset() + dim)
    return GatedRows(qkv), gate


@triton.jit
def _sigmoid_mul_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    out_ptr: tl.tensor,
    gate_stride: tl.tensor,
    head_stride: tl.tensor,
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
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    at = gate_ptr + row * gate_stride + (cols // DIM) * head_stride + cols % DIM * stride
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    y = x / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * WIDTH + cols, y.to(out_ptr.dtype.element_ty), mask=mask)


def sigmoid_mul(x: Tensor, gate: Tensor, *, pdl: bool = False) -> Tensor:
    """x [T, heads * head_dim] times the sigmoid of `gate` [T, heads, head_dim], in which a number may stand for all of
    a head."""
    assert x.is_contiguous()
    out, block = torch.empty_like(x), 512
    if not len(x):
        return out
    launch(
        _sigmoid_mul_kernel, (x.shape[0], ceil_div(x.shape[1], block)), x, gate, out, *gate.stride(),
        WIDTH=x.shape[1], DIM=gate.shape[2], BLOCK=block, num_warps=4, pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def _softplus_mul_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    out_ptr: tl.tensor,
    gate_stride: tl.tensor,
    WIDTH: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    launch_successor(PDL)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + cols // RUN, mask=mask, other=0.0).to(tl.float32)
    # log(1 + e), of a small e too, whose digits the sum loses. Of large gates it is the gate itself.
    e = tl.exp(tl.minimum(gate, 20.0))
    total = 1.0 + e
    lost = total == 1.0
    factor = tl.where(lost, e, tl.log(total) * (e / tl.where(lost, 1.0, total - 1.0)))
    factor = tl.where(gate > 20.0, gate, factor)
    tl.store(out_ptr + row * WIDTH + cols, (x * factor).to(out_ptr.dtype.element_ty), mask=mask)


def softplus_mul(x: Tensor, gate: Tensor, *, pdl: bool = False) -> Tensor:
    """x [T, n] times the softplus of `gate` [T, g], each of which is for a run of n / g numbers."""
    assert x.is_contiguous() and gate.stride(1) == 1 and x.shape[1] % gate.shape[1] == 0
    out, block = torch.empty_like(x), 512
    if not len(x):
        return out
    launch(
        _softplus_mul_kernel, (x.shape[0], ceil_div(x.shape[1], block)), x, gate, out, gate.stride(0),
        WIDTH=x.shape[1], RUN=x.shape[1] // gate.shape[1], BLOCK=block, num_warps=4, pdl=pdl,
    )  # fmt: skip
    return out
