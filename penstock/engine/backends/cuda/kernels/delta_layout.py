"""Where the parts of a gated delta net's heads stand in rows of projections, and arithmetic that its kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine.backends.interface import DeltaLayout

LEAST_SIDE = 16
"""Smallest side of a matrix product."""


@triton.jit
def columns(
    head: tl.tensor,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    GROUPED: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """First columns of a value head's query, key, value and output gate in a row of projections, and of its update rate
    and decay in a row of gates."""
    RATIO: tl.constexpr = V_HEADS // K_HEADS
    group = head // RATIO
    inner = head % RATIO
    if GROUPED:
        q = group * (2 * K_DIM + 2 * RATIO * V_DIM)
        k = q + K_DIM
        v = q + 2 * K_DIM + inner * V_DIM
        z = v + RATIO * V_DIM
        b = group * 2 * RATIO + inner
        a = b + RATIO
    else:
        q = group * K_DIM
        k = K_HEADS * K_DIM + group * K_DIM
        v = 2 * K_HEADS * K_DIM + head * V_DIM
        z = v + V_HEADS * V_DIM
        b = head
        a = head + V_HEADS
    return q, k, v, z, b, a


@triton.jit
def column_of(
    channel: tl.tensor,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    GROUPED: tl.constexpr,
) -> tl.tensor:
    """Where a channel of the convolution stands in a row of projections."""
    if not GROUPED:
        return channel
    RATIO: tl.constexpr = V_HEADS // K_HEADS
    KEYS: tl.constexpr = K_HEADS * K_DIM
    WIDTH: tl.constexpr = 2 * K_DIM + 2 * RATIO * V_DIM
    of_value = channel - 2 * KEYS
    inside = channel % KEYS
    key = (inside // K_DIM) * WIDTH + (channel // KEYS) * K_DIM + inside % K_DIM
    value = (of_value // (RATIO * V_DIM)) * WIDTH + 2 * K_DIM + of_value % (RATIO * V_DIM)
    return tl.where(channel < 2 * KEYS, key, value)


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def log_decay(rate: tl.tensor, x: tl.tensor, LOWEST: tl.constexpr) -> tl.tensor:
    """See `DeltaLayout.lowest`; `rate` is -exp(A)."""
    if LOWEST < 0.0:
        found = LOWEST / (1.0 + tl.exp(rate * x))
    else:
        found = rate * softplus(x)
    return found


@triton.jit
def gated_norm(
    o: tl.tensor, z: tl.tensor, norm: tl.tensor, V_DIM: tl.constexpr, eps: tl.tensor, SIGMOID: tl.constexpr
) -> tl.tensor:
    """RMS norm over the last axis, times silu of the gate, or its sigmoid: see `DeltaLayout.sigmoid_gate`."""
    normed = o * tl.rsqrt(tl.sum(o * o, axis=0) / V_DIM + eps) * norm
    if not SIGMOID:
        normed = normed * z
    return normed / (1.0 + tl.exp(-z))


def head_shape(layout: DeltaLayout) -> dict[str, int]:
    """Arguments that all kernels have."""
    return {"K_HEADS": layout.k_heads, "V_HEADS": layout.v_heads, "K_DIM": layout.k_dim, "V_DIM": layout.v_dim}
