"""Attention whose output passes a gate: the query projection is twice as wide, and its second half of each head decides
how much of that head's output goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.kv.kinds import PagedKVCache
from penstock.engine.models.layers.attention import Attention


@dataclass(frozen=True, slots=True)
class GatedAttention(Attention):
    """See `Attention`. Rows of `qkv`: query and gate of each head in turn, then keys and values."""

    def forward(self, x: Any, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        qkv, gate = self.attention_ops.split_gate(self.qkv(x), self.heads)
        attended = self._attend(qkv, batch, cache)
        return self.output(self.attention_ops.sigmoid_mul(attended, gate))

    def fused(self, residual: Tensor, norm: Tensor, eps: float, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        """See `FusedMixer`; for linears that are `FusedLinear`."""
        made: Any = self.qkv
        output: Any = self.output
        qkv, gate = self.attention_ops.split_gate(made.fused(residual, norm=norm, eps=eps), self.heads)
        attended = self._attend(qkv, batch, cache)
        out: Tensor = output.fused(self.attention_ops.sigmoid_mul(attended, gate), residual=residual)
        return out
