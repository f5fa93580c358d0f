"""What a linear of few tokens does with its sums before they are stored; shared by every form of weights."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def epilogue(
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
    delta: tl.tensor = 0.0,
    up_delta: tl.tensor = 0.0,
    ADAPTED: tl.constexpr = False,
) -> None:
    """From sums [batch, rows] to outputs: weight scale, bias, what adapters add, gate, residual."""
    in_n = n < N
    if SCALED:
        acc *= tl.load(scale_ptr + n, mask=in_n, other=0.0)[None, :]
        if GATED:
            up *= tl.load(scale_ptr + N + n, mask=in_n, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptr + N + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if ADAPTED:
        acc += delta
        if GATED:
            up += up_delta
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    at = b[:, None] * N + n[None, :]
    mask = (b < batch)[:, None] & in_n[None, :]
    if RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)
