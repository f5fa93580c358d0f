"""A gated short convolution in place of attention: a token sees itself and a few tokens before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import ActivationOps, AttentionBatch, Ops, ShortConvWeights
from penstock.engine.kv.kinds import ConvolutionState
from penstock.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class ShortConv:
    """See `TokenMixer`. Input gates, output gates and inputs are one matrix."""

    ops: ActivationOps
    conv_ops: Ops
    in_proj: Linear
    out_proj: Linear
    weights: ShortConvWeights
    dtype: torch.dtype
    """Of the activations."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.in_proj, self.out_proj

    @property
    def weight_bytes(self) -> int:
        return self.in_proj.weight_bytes + self.out_proj.weight_bytes

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> ConvolutionState:
        width, channels = self.weights.taps.shape
        return ConvolutionState(channels, width, self.dtype)

    def forward(self, x: Any, batch: AttentionBatch, cache: Tensor) -> Tensor:
        return self.out_proj(self.conv_ops.short_conv(self.in_proj(x), self.weights, batch, cache))
