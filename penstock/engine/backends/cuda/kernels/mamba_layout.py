"""What the kernels of Mamba-2 share: their shape, the convolution with a bias, time steps."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine.backends.cuda.kernels.delta_conv import conv_input
from penstock.engine.backends.cuda.kernels.delta_layout import softplus
from penstock.engine.backends.interface import DeltaLayout, MambaLayout


@triton.jit
def biased(
    x_ptr: tl.tensor,
    ring_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    channel: tl.tensor,
    mask: tl.tensor,
    token: tl.tensor,
    first: tl.tensor,
    position: tl.tensor,
    read: tl.tensor,
    x_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    CONV: tl.constexpr,
) -> tl.tensor:
    """Convolution, bias and silu of one token's channels; masked ones are zero."""
    total = tl.load(bias_ptr + channel, mask=mask, other=0.0)
    for back in tl.static_range(CONV):
        weight = tl.load(weight_ptr + channel * CONV + (CONV - 1 - back), mask=mask, other=0.0)
        x = conv_input(x_ptr, ring_ptr, channel, channel, mask, token, first, position, read, back, x_stride, CHANNELS,
                       CONV)  # fmt: skip
        total += weight * x
    return total / (1.0 + tl.exp(-total))


@triton.jit
def time_steps(raw: tl.tensor, bias: tl.tensor, scale: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(softplus(raw * scale + bias), low), high)


def head_shape(layout: MambaLayout) -> dict[str, int]:
    """Arguments that all kernels have."""
    return {"HEADS": layout.heads, "DIM": layout.head_dim, "GROUPS": layout.groups, "STATE": layout.state}


def as_delta(layout: MambaLayout) -> DeltaLayout:
    """A delta net whose convolution has the same channels in the same order; its inputs are those behind the gates."""
    return DeltaLayout(layout.groups, layout.heads, layout.state, layout.head_dim, layout.conv, grouped=False)
