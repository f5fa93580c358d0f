"""Attention whose heads of values are smaller than those of queries and keys.

The cache has one size of heads: values are stored with zeros behind them, which come out of attention as zeros and are
left out there. So every kernel, cache format and path of blocks is that of other attention, at the price of a cache
that is as large as with wide values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.kv.kinds import PagedKVCache
from penstock.engine.models.layers.attention import Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowValueAttention(Attention):
    """See `Attention`. Rows of `qkv`: queries, keys, and values of `value_dim` numbers a head; `output` reads as many
    of each head."""

    value_dim: int
    value_scale: float = 1.0
    """Factor of the values."""

    def forward(self, x: Any, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        return self.output(self.attend(self.qkv(x), batch, cache))

    def attend(self, qkv: Any, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        heads = self.heads
        qkv = self.attention_ops.pad_values(qkv, heads, self.value_dim, self.value_scale)
        attended = Attention.attend(self, qkv, batch, cache).view(-1, heads.heads, heads.head_dim)
        return attended[..., : self.value_dim].reshape(len(attended), -1)
