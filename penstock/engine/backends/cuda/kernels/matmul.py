"""x W^T with one order of summation, whatever the number of rows: the batch-invariant linear of deterministic mode.

Tiles depend on the shape of the weights alone, and there is no split over the input, so every output is one chain of
tensor-core products over the same slices of the input in the same order. Rows beyond the last are zeros. FP8 weights
are widened in the kernel, with a scale for every output or for every tile; activations stay as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.backends.cuda.kernels.common import launch, launch_successor, wait_for_inputs

_BLOCK_M = 64
_BLOCK_K = 64


@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_successor(PDL)
    wait_for_inputs(PDL)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_columns = m < rows, n < N
    x_at = x_ptr + (m.to(tl.int64) * x_stride)[:, None]
    w_at = w_ptr + (n.to(tl.int64) * K)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if TILE_COLUMNS:
        tiled = n // TILE_ROWS * (K // TILE_COLUMNS)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        in_depth = k < K
        x = tl.load(x_at + k[None, :], mask=in_rows[:, None] & in_depth[None, :], other=0.0)
        w = tl.load(w_at + k[:, None], mask=in_depth[:, None] & in_columns[None, :], other=0.0)
        if TILE_COLUMNS:
            # One scale for a tile of the weights: sums over its inputs are scaled before they are added up.
            scale = tl.load(scale_ptr + tiled + start // TILE_COLUMNS, mask=in_columns, other=0.0)
            acc += tl.dot(x, w.to(x.dtype), input_precision=PRECISION) * scale[None, :]
        else:
            acc = tl.dot(x, w.to(x.dtype), acc, input_precision=PRECISION)
    if SCALED and not TILE_COLUMNS:
        acc *= tl.load(scale_ptr + n, mask=in_columns, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + (m.to(tl.int64) * N)[:, None] + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None = None,
    tile: tuple[int, int] | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """[T, K] and [N, K] to [T, N]. `scale`: float32 [N] of an e4m3 weight, or with `tile` one for every so many
    outputs and inputs."""
    rows, outputs = x.shape[0], weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    # Narrow tiles keep the chip busy at one row; wide ones where there are enough columns anyway.
    block_n = 32 if outputs < 8192 else 64
    if x.dtype == torch.float32:
        block_n = 32
    block_k = _BLOCK_K if x.dtype != torch.float32 else 32
    launch(
        _matmul_kernel,
        (triton.cdiv(rows, _BLOCK_M), triton.cdiv(outputs, block_n)),
        x,
        weight,
        weight if bias is None else bias,
        weight if scale is None else scale,
        out,
        rows,
        x.stride(0),
        N=outputs,
        K=weight.shape[1],
        BLOCK_M=_BLOCK_M,
        BLOCK_N=block_n,
        BLOCK_K=block_k if tile is None else min(block_k, tile[1] & -tile[1]),
        BIAS=bias is not None,
        SCALED=scale is not None,
        TILE_ROWS=0 if tile is None else tile[0],
        TILE_COLUMNS=0 if tile is None else tile[1],
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=4 if x.dtype != torch.float32 else 2,
        pdl=pdl,
    )
    return out


class BatchInvariantLinear:
    """See `Linear`: weights [out, in] on CUDA, dense or in e4m3 with scales; see `matmul`."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None = None,
        tile: tuple[int, int] | None = None,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.scale = scale
        self.tile = tile
        self.weight_bytes = weight.numel() * weight.element_size()
        if tile is not None and scale is not None:
            self.weight_bytes += scale.numel() * scale.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        return matmul(x, self.weight, self.bias, self.scale, self.tile)
