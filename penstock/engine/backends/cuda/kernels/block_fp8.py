"""Products with FP8 weights whose scales are those of tiles, as DeepSeek V3 and others are published (128 x 128).

Weights are widened to the type of the activations, which stay as they are; the sum over a tile's inputs is multiplied
by the tile's scale before it is added up. One kernel for any number of tokens: few are bound by reading the weights
once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import (
    ceil_div,
    launch,
    launch_successor,
    wait_for_inputs,
)


@triton.jit(do_not_specialize=["batch"])
def _block_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    batch: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    # Rows past the end read the last row: their sums are not stored.
    row = tl.minimum(n, N - 1)
    weights = weight_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
    inputs = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    scales = scale_ptr + row // ROWS * (K // COLUMNS)
    in_m = (m < batch)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(inputs + start, mask=in_m, other=0.0)
        w = tl.load(weights + start)
        part = tl.dot(x, tl.trans(w.to(x.dtype)), input_precision=PRECISION)
        acc += part * tl.load(scales + start // COLUMNS)[None, :]
    if BIASED:
        acc += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    out = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=in_m & (n < N)[None, :])


def linear(
    x: Tensor, weight: Tensor, scale: Tensor, tile: tuple[int, int], bias: Tensor | None = None, *, pdl: bool = False
) -> Tensor:
    """`x` [T, in] times the transpose of e4m3 `weight` [out, in], of which `tile` outputs and inputs share a float32
    `scale` [out / tile, in / tile]. Tiles divide the weight, and have a multiple of 16 inputs."""
    batch, k = x.shape
    n = weight.shape[0]
    out = torch.empty((batch, n), dtype=x.dtype, device=x.device)
    if not batch:
        return out
    wide = x.element_size() == 4
    block_m = 16 if batch <= 16 or wide else 32 if batch <= 32 else 64 if batch <= 256 else 128
    block_n = 32 if wide else 16 if batch <= 16 and n <= 8192 else 32 if batch <= 16 else 64 if batch <= 64 else 128
    launch(
        _block_kernel,
        (ceil_div(n, block_n), ceil_div(batch, block_m)),
        x,
        weight,
        scale,
        x if bias is None else bias,
        out,
        x.stride(0),
        batch,
        N=n,
        K=k,
        ROWS=tile[0],
        COLUMNS=tile[1],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=min(32 if wide else 128 if block_m <= 32 else 64, tile[1] & -tile[1]),
        BIASED=bias is not None,
        PRECISION="ieee" if wide else "tf32",
        num_warps=8 if block_m == 128 else 4,
        num_stages=3 if block_m > 32 else 4,
        pdl=pdl,
    )
    return out
