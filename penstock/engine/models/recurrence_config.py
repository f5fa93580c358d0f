"""Layers that keep a state in place of keys and values. See `ModelConfig`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Gated delta nets in place of attention in some layers."""

    layers: tuple[bool, ...]
    """Which layers have one; the others have attention."""
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int
    """Width of the causal convolution."""
    grouped: bool
    """Whether the checkpoint stores projections by key head; see `DeltaLayout`."""
    by_channel: bool = False
    """Whether every channel has a decay of its own; see there. Decays and output gates are then projected through few
    numbers, which all heads share."""
    sigmoid_gate: bool = False
    """Whether output gates are sigmoids, not SiLUs."""
    lowest: float = 0.0
    """The least logarithm of a decay; 0: there is none. See `DeltaLayout`."""

    flat_rates: bool = False
    """Whether the tensor of decay rates has one dimension; with `by_channel` alone, others have four."""

    @property
    def rate_shape(self) -> tuple[int, ...]:
        return (self.v_heads,) if self.flat_rates else (1, 1, self.v_heads, 1)

    def __post_init__(self) -> None:
        if self.v_heads % self.k_heads:
            raise CheckpointError(f"{self.v_heads} value heads cannot share {self.k_heads} key heads evenly")


@dataclass(frozen=True, slots=True)
class BesideAttention:
    """Attention and Mamba in one layer: both read the same norm, and both are added to the residual stream."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    mamba_in: float = 1.0
    mamba_out: float = 1.0
    """Factors of what each reads and gives."""


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Mamba-2 layers in place of attention in some layers; see `MambaLayout`."""

    layers: tuple[bool, ...]
    """Which layers have one; the others have attention."""
    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    norm_groups: int
    norm_eps: float
    gate_first: bool = True
    dt_range: tuple[float, float] = (0.0, math.inf)
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors of what is projected: gates, x, B, C, time steps."""
    beside: BesideAttention | None = None
    """Where these layers have attention too."""
    norm_shards: int = 1
    """Shards that have parts of one run of channels that is normalized together."""

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise CheckpointError(f"{self.heads} Mamba heads cannot share {self.groups} groups evenly")
        low, high = self.dt_range
        if not 0.0 <= low <= high:
            raise CheckpointError(f"time steps of Mamba layers cannot lie between {low} and {high}")

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """Gated short convolutions in place of attention in some layers; see `Ops.short_conv`."""

    layers: tuple[bool, ...]
    """Which layers have one; the others have attention."""
    channels: int
    width: int
    """Tokens that one token sees, itself included."""
    bias: bool
    """Whether the convolution and both projections have biases."""
