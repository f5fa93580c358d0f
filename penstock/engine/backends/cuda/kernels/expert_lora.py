"""Adapters on experts: y[i] += w[i] * B(A x[i]), each row with the matrices of its expert in its adapter's slot.

A row is one token's visit to one expert, so few rows share matrices: two launches over single rows. The first
multiplies by A, cut along the input; the second adds up those partial sums and multiplies by B. Rows without an adapter
cost an early return. Everything a program needs is read on the device, so a captured graph serves any adapters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.adapters.layout import PlacedSite
from penstock.engine.backends.cuda.kernels.common import (
    ceil_div,
    launch,
    launch_successor,
    next_power_of_2,
    wait_for_inputs,
)


@triton.jit
def _shrink_kernel(
    x_ptr: tl.tensor,
    bank_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    slot_stride: tl.tensor,
    start: tl.tensor,
    SITES: tl.constexpr,
    SITE: tl.constexpr,
    EACH: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Partial sums [rows, SPLITS, PARTS * R] in float32."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) % PARTS
    split = tl.program_id(1) // PARTS
    launch_successor(PDL)
    wait_for_inputs(PDL)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    rank = tl.load(ranks_ptr + slot * SITES + SITE).to(tl.int64)
    if rank == 0:
        return
    expert = tl.load(experts_ptr + row).to(tl.int64)
    r = tl.arange(0, R)
    k = tl.arange(0, BLOCK_K)
    a_ptr = bank_ptr + slot.to(tl.int64) * slot_stride + rank * (start + expert * EACH + part * K)
    acc = tl.zeros([R], tl.float32)
    SHARE: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    for offset in range(0, SHARE, BLOCK_K):
        at = split * SHARE + offset + k
        in_k = at < K
        x = tl.load(x_ptr + row * x_stride + at, mask=in_k, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + r[:, None] * K + at[None, :], mask=(r < rank)[:, None] & in_k[None, :], other=0.0)
        acc += tl.sum(a.to(tl.float32) * x[None, :], axis=1)
    tl.store(out_ptr + (row * SPLITS + split) * (PARTS * R) + part * R + r, acc)


@triton.jit
def _expand_kernel(
    sums_ptr: tl.tensor,
    bank_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    y_ptr: tl.tensor,
    y_stride: tl.tensor,
    slot_stride: tl.tensor,
    start: tl.tensor,
    SITES: tl.constexpr,
    SITE: tl.constexpr,
    EACH: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    END: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """B is [outputs, rank]; the first `END` outputs belong to the first part."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    rank = tl.load(ranks_ptr + slot * SITES + SITE).to(tl.int64)
    if rank == 0:
        return
    expert = tl.load(experts_ptr + row).to(tl.int64)
    r = tl.arange(0, R)
    b_ptr = bank_ptr + slot.to(tl.int64) * slot_stride + rank * (start + expert * EACH + PARTS * K)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for part in tl.static_range(PARTS):
        sums = tl.zeros([R], tl.float32)
        for split in tl.static_range(SPLITS):
            sums += tl.load(sums_ptr + (row * SPLITS + split) * (PARTS * R) + part * R + r)
        if PARTS == 1:
            mine = n < N
        else:
            mine = (n < END) if part == 0 else (n >= END) & (n < N)
        b = tl.load(b_ptr + n[:, None] * rank + r[None, :], mask=(r < rank)[None, :] & mine[:, None], other=0.0)
        acc += tl.sum(b.to(tl.float32) * sums[None, :], axis=1)
    if WEIGHTED:
        acc *= tl.load(weights_ptr + row)
    at = y_ptr + row * y_stride + n
    acc += tl.load(at, mask=n < N, other=0.0).to(tl.float32)
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=n < N)


def add_visits(
    x: Tensor,
    y: Tensor,
    bank: Tensor,
    ranks: Tensor,
    placed: PlacedSite,
    rank: int,
    slots: Tensor,
    experts: Tensor,
    weights: Tensor | None,
    *,
    pdl: bool = False,
) -> None:
    """See `LoraKernel.add_visits`. `bank` [slots, numbers] and `ranks` int32 [slots, sites] are those of all slots,
    `rank` a power of two that none is above."""
    site, rows = placed.site, x.shape[0]
    if not rows:
        return
    parts, splits = len(site.sizes), max(1, min(8, site.inputs // 512))
    sums = torch.empty((rows, splits, parts * rank), dtype=torch.float32, device=x.device)
    common = {
        "SITES": ranks.shape[1],
        "SITE": placed.index,
        "EACH": site.each,
        "K": site.inputs,
        "PARTS": parts,
        "R": rank,
        "SPLITS": splits,
    }
    of = bank, ranks, slots, experts
    launch(
        _shrink_kernel,
        (rows, parts * splits),
        x,
        *of,
        sums,
        x.stride(0),
        bank.stride(0),
        placed.start,
        BLOCK_K=min(next_power_of_2(site.inputs), max(32, 4096 // rank)),
        num_warps=4,
        pdl=pdl,
        **common,
    )
    block_n = min(next_power_of_2(site.outputs), max(32, 4096 // rank))
    launch(
        _expand_kernel,
        (rows, ceil_div(site.outputs, block_n)),
        sums,
        *of,
        x if weights is None else weights,
        y,
        y.stride(0),
        bank.stride(0),
        placed.start,
        N=site.outputs,
        END=site.sizes[0],
        BLOCK_N=block_n,
        WEIGHTED=weights is not None,
        num_warps=4,
        pdl=pdl,
        **common,
    )
