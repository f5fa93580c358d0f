"""Linear layers of a few tokens, y = x W^T: bound by reading the weights once, so built to keep reads in flight.

Two kernels. `rows`, for one token: each program owns a few weight rows and multiplies them in ordinary arithmetic,
with many independent wide loads in flight. `tiles`, for more: ordinary arithmetic would be the limit, so weight rows
are the tall side of a tensor-core product whose narrow side is the batch, fed by an asynchronous copy pipeline.

What follows the linear in a decoder layer can be folded in, which saves launches: the residual, and the SiLU gate. The
RMS norm before it is a launch of its own: folded in, every program would read the gains and square the input again,
which costs more than the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.kernels.triton.activation import silu_mul, to_half
from penstock.engine.kernels.triton.common import ceil_div, launch, launch_successor, next_power_of_2, wait_for_inputs
from penstock.engine.kernels.triton.norm import rms_norm

MAX_BATCH = 8
"""Above this the vendor's matrix product is the better choice."""


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Shape of the launch: weight rows per program, columns per step.

    `rows` takes 1, 2 or 4 rows, and `block_k` = 8 elements per thread: then x and every weight row are laid out over
    the threads alike, and nothing moves between threads until the final sum.
    """

    kernel: Literal["rows", "tiles"]
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@triton.jit
def _epilogue(
    acc: tl.tensor,
    up: tl.tensor,
    n: tl.tensor,
    b: tl.tensor,
    batch: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    N: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
) -> None:
    """From sums [batch, rows] to outputs: weight scale, bias, gate, residual."""
    in_n = n < N
    if SCALED:
        acc *= tl.load(scale_ptr + n, mask=in_n, other=0.0)[None, :]
        if GATED:
            up *= tl.load(scale_ptr + N + n, mask=in_n, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + N + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    at = b[:, None] * N + n[None, :]
    mask = (b < batch)[:, None] & in_n[None, :]
    if RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sums(parts: tl.tensor, FIRST: tl.constexpr, COUNT: tl.constexpr) -> tl.tensor:
    """Sums of `COUNT` of the vectors `parts`, in one reduction; four come in the order 0, 2, 1, 3."""
    if COUNT == 1:
        total = tl.sum(parts[FIRST], axis=0) + tl.zeros([1], tl.float32)
    elif COUNT == 2:
        total = tl.sum(tl.join(parts[FIRST], parts[FIRST + 1]), axis=0)
    else:
        low = tl.join(parts[FIRST], parts[FIRST + 1])
        high = tl.join(parts[FIRST + 2], parts[FIRST + 3])
        total = tl.reshape(tl.sum(tl.join(low, high), axis=0), [4])
    return total


@triton.jit
def _weights(
    weight_ptr: tl.tensor,
    first: tl.tensor,
    r: tl.constexpr,
    at: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Columns `at` of a program's r-th weight row. Rows past the end read the last row: their sums are not stored."""
    row = tl.minimum(first + r % BLOCK_N, N - 1).to(tl.int64) + r // BLOCK_N * N
    return tl.load(weight_ptr + row * K + at, mask=at < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _rows_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    # One vector of partial sums per weight row (gate rows, then up rows), each laid out over the threads as x is.
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EARLY: tl.constexpr = min(STEPS, max(1, 8 // ROWS))
    first = tl.program_id(0) * BLOCK_N
    k = tl.arange(0, BLOCK_K)
    acc = ()
    for _r in tl.static_range(ROWS):
        acc = acc + (tl.zeros([BLOCK_K], tl.float32),)  # type: ignore[assignment]
    launch_successor(PDL)
    # Weights are constants: their first loads may be under way before the input is there.
    early = ()
    for step in tl.static_range(EARLY):
        at = step * BLOCK_K + k
        for r in tl.static_range(ROWS):
            early = early + (_weights(weight_ptr, first, r, at, N, K, BLOCK_N),)  # type: ignore[assignment]
    wait_for_inputs(PDL)
    for step in tl.static_range(STEPS):
        at = step * BLOCK_K + k
        in_k = at < K
        x = tl.load(x_ptr + at, mask=in_k, other=0.0, eviction_policy="evict_last").to(tl.float32)
        new = ()
        for r in tl.static_range(ROWS):
            if step >= EARLY:
                w = _weights(weight_ptr, first, r, at, N, K, BLOCK_N)
            else:
                w = early[step * ROWS + r]
            new = new + (acc[r] + w.to(tl.float32) * x,)  # type: ignore[assignment]
        acc = new
    i = tl.arange(0, BLOCK_N)
    n = first + (i // 2 + 2 * (i % 2) if BLOCK_N == 4 else i)
    y = _sums(acc, 0, BLOCK_N)[None, :]
    one = tl.arange(0, 1)
    _epilogue(
        y,
        _sums(acc, BLOCK_N, BLOCK_N)[None, :] if GATED else y,
        n,
        one,
        1,
        out_ptr,
        bias_ptr,
        scale_ptr,
        residual_ptr,
        N,
        BIAS,
        SCALED,
        RESIDUAL,
        GATED,
    )


@triton.jit(do_not_specialize=["batch"])
def _tiles_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    x_stride: tl.tensor,
    batch: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.arange(0, BATCH)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end read the last row: their sums are not stored, and loads need no mask along n.
    rows = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_N, BATCH], tl.float32)
    up = tl.zeros([BLOCK_N, BATCH], tl.float32)
    launch_successor(PDL)
    wait_for_inputs(PDL)
    for start in range(0, K, BLOCK_K):
        x_mask = (b < batch)[:, None]
        if K % BLOCK_K != 0:
            in_k = start + k < K
            x_mask = x_mask & in_k[None, :]
            w = tl.load(rows + start, mask=in_k[None, :], other=0.0)
        else:
            w = tl.load(rows + start)
        x = tl.load(x_ptr + b[:, None] * x_stride + (start + k)[None, :], mask=x_mask, other=0.0)
        acc = tl.dot(w.to(x.dtype), tl.trans(x), acc, input_precision=PRECISION)
        if GATED:
            if K % BLOCK_K != 0:
                u = tl.load(rows + N * K + start, mask=(start + k < K)[None, :], other=0.0)
            else:
                u = tl.load(rows + N * K + start)
            up = tl.dot(u.to(x.dtype), tl.trans(x), up, input_precision=PRECISION)
    _epilogue(
        tl.trans(acc),
        tl.trans(up),
        n,
        b,
        batch,
        out_ptr,
        bias_ptr,
        scale_ptr,
        residual_ptr,
        N,
        BIAS,
        SCALED,
        RESIDUAL,
        GATED,
    )


def _vendor_wins(rows: int, batch: int, weight_size: int) -> bool:
    """Several tokens and a middling number of rows: the vendor's product is a little ahead (measured on an H200)."""
    return batch > 1 and weight_size > 1 and 5000 <= rows <= 65536


def choose(n: int, k: int, batch: int, weight_size: int, gated: bool) -> GemvConfig:
    """The launch shape for an [n, k] weight of `weight_size`-byte elements (measured on an H200)."""
    if batch == 1:
        return _choose_rows(n, k, weight_size, gated)
    block_n = 16 if n <= 2048 else 32
    step = 1024 // weight_size if block_n == 16 else 512 // weight_size
    # At least four steps, or there is nothing to pipeline.
    block_k = max(32, min(next_power_of_2(k) // 4, step))
    return GemvConfig("tiles", block_n, block_k, block_n // 16, 3 if gated else 4 if block_n == 16 else 5)


def _choose_rows(n: int, k: int, weight_size: int, gated: bool) -> GemvConfig:
    fit = max(1, next_power_of_2(k) // 256)
    if weight_size == 1:
        # Loads are half as wide, so more rows make up for it; small weights want more programs instead.
        warps, rows = (4, 2) if n * k < 8 << 20 else (2, 2) if k > 8192 else (2, 4)
    elif k > 8192:
        warps, rows = 4, 4
    elif n * k < 8 << 20:
        warps, rows = 4, 2
    else:
        warps, rows = 8, 1
    warps = min(warps, fit)
    # A gated program reads as many up rows as gate rows.
    return GemvConfig("rows", max(1, rows // 2) if gated else rows, warps * 256, warps, 1)


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    weight_scale: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    config: GemvConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """`x` [B, K] times the transpose of `weight` [N, K], for B up to `MAX_BATCH`.

    `weight_scale`: float32 [N], with an e4m3 weight. `norm`, `eps`: x is RMS-normalized first (one more launch).
    `gated`: the weight is [2 * N, K], gate rows then up rows, and the result is silu(gate) * up. `residual` [B, N] is
    added last. `out` may be `residual`, never `x`.
    """
    batch, k = x.shape
    if batch > MAX_BATCH:
        raise ValueError(f"linear of {batch} tokens: this kernel is for up to {MAX_BATCH}")
    if residual is None and out is None and _vendor_wins(weight.shape[0], batch, weight.element_size()):
        if norm is not None:
            x = rms_norm(x, norm, eps, pdl=pdl)
        y = F.linear(x, weight, bias)
        return silu_mul(y, pdl=pdl) if gated else y
    if out is None:
        out = torch.empty((batch, weight.shape[0] // 2 if gated else weight.shape[0]), dtype=x.dtype, device=x.device)
    # In a product an fp8 weight widens to float16, in one instruction and exactly; so must the input.
    half = batch > 1 and weight.dtype == torch.float8_e4m3fn
    if norm is not None:
        x = rms_norm(x, norm, eps, dtype=torch.float16 if half else None, pdl=pdl)
    elif half:
        x = to_half(x, pdl=pdl)
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    shape = config or choose(n, k, batch, weight.element_size(), gated)
    pointers = (
        x,
        weight,
        out,
        x if bias is None else bias,
        x if weight_scale is None else weight_scale,
        x if residual is None else residual,
    )
    flags = {
        "BIAS": bias is not None,
        "SCALED": weight_scale is not None,
        "RESIDUAL": residual is not None,
        "GATED": gated,
    }
    if batch > 1 and shape.kernel == "rows":
        raise ValueError(f"linear of {batch} tokens: the rows kernel is for one")
    grid = (ceil_div(n, shape.block_n),)
    if shape.kernel == "rows":
        launch(
            _rows_kernel,
            grid,
            *pointers,
            N=n,
            K=k,
            BLOCK_N=shape.block_n,
            BLOCK_K=shape.block_k,
            **flags,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            pdl=pdl,
        )
    else:
        launch(
            _tiles_kernel,
            grid,
            *pointers,
            x.stride(0),
            batch,
            N=n,
            K=k,
            BATCH=MAX_BATCH,
            BLOCK_N=shape.block_n,
            BLOCK_K=max(16, shape.block_k),
            **flags,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
            pdl=pdl,
        )
    return out
