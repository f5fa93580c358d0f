"""Recurrent layers: how projections split into heads, and the operations that carry a state from token to token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.engine.backends.interface.batch import AttentionBatch


@dataclass(frozen=True, slots=True)
class DeltaLayout:
    """How the projections of a gated delta net split into heads. A key head serves `v_heads / k_heads` value heads."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int
    """Width of the causal convolution over queries, keys and values."""
    grouped: bool
    """Whether a row of projections is ordered by key head, each with its query, key, values and output gates, and the
    row of gates likewise with the update rates and decays of its value heads; else all queries come first, then all
    keys, values and output gates."""
    by_channel: bool = False
    """Whether every channel of a key has a decay of its own (KDA), where others have one for each value head. Not with
    `grouped`."""
    sigmoid_gate: bool = False
    """Whether output gates are sigmoids, not SiLUs."""
    lowest: float = 0.0
    """The least logarithm of a decay, below zero: that many times the sigmoid of exp(A) times what is projected, with
    its bias. 0: there is none, and the logarithm is -exp(A) times the softplus of what is projected. Only with
    `by_channel`."""

    @property
    def channels(self) -> int:
        """Of the convolution: all queries, all keys, all values."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    @property
    def width(self) -> int:
        """Of a row of projections: those, and the output gates."""
        return self.channels + self.v_heads * self.v_dim

    @property
    def decays(self) -> int:
        """Of a row of gates, behind the update rates."""
        return self.v_heads * (self.k_dim if self.by_channel else 1)


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """What a gated delta net has beside its projections, all float32."""

    conv: Tensor
    """[channels, conv]: the last column belongs to the token itself."""
    decay: Tensor
    """[v_heads]: -exp(A)."""
    decay_bias: Tensor
    """[decays]."""
    norm: Tensor
    """[v_dim]."""
    eps: float


@dataclass(frozen=True, slots=True)
class MambaLayout:
    """How the projections of a Mamba-2 layer split: output gates, what is convolved (x, B, C), time steps.

    Heads have an x of their own and share B and C with the other heads of their group.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    """Width of B and C: a head's state is [head_dim, state]."""
    conv: int
    """Width of the causal convolution."""
    norm_groups: int = 1
    """Runs of channels that are normalized by themselves; 0: nothing is normalized."""
    gate_first: bool = True
    """Whether the gate is applied before the norm."""

    @property
    def inner(self) -> int:
        """Of what the layer gives, and of the gates."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x of all heads, B of all groups, C of all groups."""
        return self.inner + 2 * self.groups * self.state

    @property
    def width(self) -> int:
        """Of a row of projections."""
        return self.inner + self.channels + self.heads


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """What a Mamba-2 layer has beside its projections, all float32."""

    conv: Tensor
    """[channels, conv]: the last column belongs to the token itself."""
    conv_bias: Tensor
    """[channels]."""
    decay: Tensor
    """[heads]: -exp(A)."""
    dt_bias: Tensor
    """[heads]."""
    skip: Tensor
    """[heads]: how much of its input a head passes on."""
    norm: Tensor
    """[inner]."""
    eps: float
    dt_range: tuple[float, float] = (0.0, math.inf)
    """Time steps are kept within it."""
    gate_scale: float = 1.0
    dt_scale: float = 1.0
    """Factors of the projected gates and time steps."""


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """What a gated short convolution has beside its projections, all float32."""

    taps: Tensor
    """[width, channels]: the last row belongs to the token itself."""
    bias: Tensor
    """[channels]."""


class RecurrentOps(Protocol):
    """Of layers that keep a state for each sequence; `StateBatch` says where states lie."""

    def delta_net(
        self,
        projected: Tensor,
        gates: Tensor,
        layout: DeltaLayout,
        weights: DeltaWeights,
        batch: AttentionBatch,
        conv_cache: Tensor,
        state_cache: Tensor,
    ) -> Tensor:
        """A gated delta net between its projections: [T, v_heads * v_dim].

        `projected` is [T, layout.width], `gates` [T, v_heads + decays]: an update rate b and a decay a for each value
        head, or a for each channel of its keys, of which then each decays its row of the state.
        Queries, keys and values pass a causal convolution and silu. Queries and keys are scaled to length one, queries
        then by 1 / sqrt(k_dim). The state S [k_dim, v_dim] of a value head becomes

            S = exp(g) S,  S = S + k (sigmoid(b) (v - S^T k))^T    with g = decay * softplus(a + decay_bias)

        and gives S^T q, which is RMS-normalized, scaled by `norm` and multiplied by silu of the output gate, or by its
        sigmoid.

        `batch.states` says where states lie: `state_cache` float32 [slots, v_heads, k_dim, v_dim] and `conv_cache`
        [slots, conv, channels], the inputs of the convolution at the last positions, a token's at position % conv.
        """
        ...

    def mamba(
        self,
        projected: Tensor,
        layout: MambaLayout,
        weights: MambaWeights,
        batch: AttentionBatch,
        conv_cache: Tensor,
        state_cache: Tensor,
    ) -> Tensor:
        """A Mamba-2 layer between its projections: [T, heads * head_dim].

        `projected` is [T, layout.width]. x, B and C pass a causal convolution and silu. The state S of a head becomes

            S = exp(decay * dt) S + dt x B^T    with dt = softplus(dt + dt_bias), kept within `dt_range`

        and gives S C + skip * x, which is multiplied by silu of the gate and RMS-normalized in `norm_groups` runs of
        channels, or first normalized and then multiplied. Caches are as in `delta_net`; a state is [head_dim, state].
        """
        ...

    def short_conv(
        self, projected: Tensor, weights: ShortConvWeights, batch: AttentionBatch, conv_cache: Tensor
    ) -> Tensor:
        """A gated short convolution between its projections: [T, channels].

        `projected` is [T, 3 * channels]: input gates, output gates, inputs. Inputs times their gates, rounded to the
        activations' type, pass a causal convolution of each channel; what it gives is multiplied by the output gates.
        `conv_cache` [slots, width, channels] is as in `delta_net`, and has these products.
        """
        ...
