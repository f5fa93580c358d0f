"""Softmax attention over latents (MLA): one vector per token from which every head's key and value follow.

Queries, the latent and the key that is rotated come from one product with the layer's input, queries perhaps through
a narrower vector that is normalized. Everything between that and the output projection is one operation of the
backend (`Ops.latent_attention`), which chooses whether to make keys and values or to meet the latents as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import (
    ActivationOps,
    AttentionBatch,
    LatentAdditions,
    LatentLayout,
    LatentWeights,
    Ops,
)
from penstock.engine.kv.kinds import PagedLatent, PagedLatentCache
from penstock.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """See `TokenMixer`."""

    ops: ActivationOps
    attention_ops: Ops
    inputs: Linear
    """Queries, or the narrower vector that they are made of, then latent and rotated key."""
    output: Linear
    heads: LatentLayout
    weights: LatentWeights
    cos_sin: Tensor
    """Rotary table [positions, rotated dimensions], shared with other layers."""
    query_norm: Tensor | None = None
    query_up: Linear | None = None
    """Where queries go through a narrower vector: its norm, and what makes queries of it."""
    cache_scale: Tensor | None = None
    """With an FP8 cache: what is stored is divided by this, float32 [1]."""
    additions: LatentAdditions | None = None
    """Adapters of what makes keys and values of latents."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.inputs, self.output) if self.query_up is None else (self.inputs, self.query_up, self.output)

    @property
    def weight_bytes(self) -> int:
        up = self.weights.up
        return sum(linear.weight_bytes for linear in self.linears) + up.numel() * up.element_size()

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> PagedLatent:
        return PagedLatent(self.heads.cached, block_size, dtype)

    def forward(self, x: Any, batch: AttentionBatch, cache: PagedLatentCache) -> Tensor:
        made = self.inputs(x)
        split = made.shape[1] - self.heads.cached
        q, kv = made[:, :split], made[:, split:]
        if self.query_up is not None and self.query_norm is not None:
            q = self.query_up(self.ops.rms_norm(q, self.query_norm, self.weights.eps))
        return self.output(self._attend(q, kv, batch, cache))

    def fused(
        self, residual: Tensor, norm: Tensor, eps: float, batch: AttentionBatch, cache: PagedLatentCache
    ) -> Tensor:
        """See `FusedMixer`; for linears that are `FusedLinear`."""
        inputs: Any = self.inputs
        query_up: Any = self.query_up
        output: Any = self.output
        made: Tensor = inputs.fused(residual, norm=norm, eps=eps)
        split = made.shape[1] - self.heads.cached
        q, kv = made[:, :split], made[:, split:]
        if query_up is not None:
            q = query_up.fused(q, norm=self.query_norm, eps=self.weights.eps)
        out: Tensor = output.fused(self._attend(q, kv, batch, cache), residual=residual)
        return out

    def _attend(self, q: Tensor, kv: Tensor, batch: AttentionBatch, cache: PagedLatentCache) -> Tensor:
        scales = self.cache_scale if cache.scales is None else cache.scales
        return self.attention_ops.latent_attention(
            q, kv, self.heads, self.weights, self.cos_sin, batch, cache.latents, scales, self.additions
        )
