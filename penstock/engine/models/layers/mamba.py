"""Mamba-2: a state space whose decay and inputs depend on the token, in place of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import ActivationOps, AttentionBatch, MambaLayout, MambaWeights, Ops, OverRanks
from penstock.engine.kv.kinds import RecurrentCache, RecurrentState
from penstock.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Mamba2:
    """See `TokenMixer`. Gates, x, B, C and time steps are one matrix."""

    ops: ActivationOps
    mamba_ops: Ops
    in_proj: Linear
    out_proj: Linear
    layout: MambaLayout
    weights: MambaWeights
    dtype: torch.dtype
    """Of the activations."""
    over_ranks: OverRanks | None = None
    """Where channels that are normalized together are on several shards: the means [T, 1] of all of them. The layout
    then has no norm."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.in_proj, self.out_proj

    @property
    def weight_bytes(self) -> int:
        return self.in_proj.weight_bytes + self.out_proj.weight_bytes

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> RecurrentState:
        layout = self.layout
        return RecurrentState(layout.heads, layout.head_dim, layout.state, layout.channels, layout.conv, self.dtype)

    def forward(self, x: Any, batch: AttentionBatch, cache: RecurrentCache) -> Tensor:
        projected = self.in_proj(x)
        mixed = self.mamba_ops.mamba(projected, self.layout, self.weights, batch, cache.conv, cache.state)
        if self.over_ranks is not None:
            wide = mixed.float()
            means = self.over_ranks(wide.pow(2).mean(-1, keepdim=True))
            mixed = (wide * torch.rsqrt(means + self.weights.eps) * self.weights.norm).to(mixed.dtype)
        return self.out_proj(mixed)
