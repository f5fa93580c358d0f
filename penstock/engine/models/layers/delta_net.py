"""A gated delta net: linear attention whose state forgets and corrects itself, in place of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import ActivationOps, AttentionBatch, DeltaLayout, DeltaWeights, Ops
from penstock.engine.kv.kinds import RecurrentCache, RecurrentState
from penstock.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """See `TokenMixer`. Queries, keys, values and output gates are one matrix; the gates of the state too, where that
    matrix is dense: they decide how fast a state forgets, so they are not rounded with it."""

    ops: ActivationOps
    delta_ops: Ops
    mix: Linear
    gates: Linear | None
    """Update rates and decays; None: they are the last rows of `mix`."""
    output: Linear
    layout: DeltaLayout
    weights: DeltaWeights
    dtype: torch.dtype
    """Of the activations."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.mix, self.output) if self.gates is None else (self.mix, self.gates, self.output)

    @property
    def weight_bytes(self) -> int:
        return sum(linear.weight_bytes for linear in self.linears)

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> RecurrentState:
        layout = self.layout
        return RecurrentState(layout.v_heads, layout.k_dim, layout.v_dim, layout.channels, layout.conv, self.dtype)

    @property
    def _before_gates(self) -> int:
        """Rows of `mix` before those of the gates, where it has them."""
        return self.layout.width

    def forward(self, x: Any, batch: AttentionBatch, cache: RecurrentCache) -> Tensor:
        projected = self.mix(x)
        if self.gates is None:
            projected, gates = projected[:, : self._before_gates], projected[:, self._before_gates :]
        else:
            gates = self.gates(x)
        return self.output(self._mixed(projected, gates, batch, cache))

    def fused(self, residual: Tensor, norm: Tensor, eps: float, batch: AttentionBatch, cache: RecurrentCache) -> Tensor:
        """See `FusedMixer`; for linears that are `FusedLinear`."""
        mix: Any = self.mix
        gates: Any = self.gates
        output: Any = self.output
        if gates is None:
            both = mix.fused(residual, norm=norm, eps=eps)
            projected, gated = both[:, : self._before_gates], both[:, self._before_gates :]
        else:
            x = self.delta_ops.rms_norm(residual, norm, eps)
            projected, gated = mix.fused(x), gates.fused(x)
        out: Tensor = output.fused(self._mixed(projected, gated, batch, cache), residual=residual)
        return out

    def _mixed(self, projected: Tensor, gates: Tensor, batch: AttentionBatch, cache: RecurrentCache) -> Tensor:
        return self.delta_ops.delta_net(projected, gates, self.layout, self.weights, batch, cache.conv, cache.state)


@dataclass(frozen=True, slots=True)
class ChannelDeltaNet(GatedDeltaNet):
    """A delta net in which every channel of a key forgets at its own rate (KDA). So many decays, and the output gates,
    are each made of as many numbers as a head has: these stand behind the update rates in the gates."""

    decay_expand: Linear
    gate_expand: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        mixed = (self.mix,) if self.gates is None else (self.mix, self.gates)
        return *mixed, self.decay_expand, self.gate_expand, self.output

    @property
    def _before_gates(self) -> int:
        return self.layout.channels

    def _mixed(self, projected: Tensor, gates: Tensor, batch: AttentionBatch, cache: RecurrentCache) -> Tensor:
        rates, decays, narrow = torch.split(gates, [self.layout.v_heads, self.layout.k_dim, self.layout.v_dim], -1)
        output_gates = self.gate_expand(narrow.contiguous())
        every = torch.cat((rates, self.decay_expand(decays.contiguous())), -1)
        rows = torch.cat((projected, output_gates), -1)
        return self.delta_ops.delta_net(rows, every, self.layout, self.weights, batch, cache.conv, cache.state)
