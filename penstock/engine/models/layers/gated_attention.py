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
        return self.output(self.attend(self.qkv(x), batch, cache))

    def attend(self, qkv: Any, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        qkv, gate = self.attention_ops.split_gate(qkv, self.heads)
        return self.attention_ops.sigmoid_mul(Attention.attend(self, qkv, batch, cache), gate)
