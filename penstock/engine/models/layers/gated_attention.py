"""Attention whose output passes a gate, which decides how much of every head's output goes on.

`GatedAttention`: the query projection is twice as wide, and its second half of each head is the gate.
`OutputGatedAttention`: the gate has a matrix of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.kv.kinds import PagedKVCache
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class GatedAttention(Attention):
    """See `Attention`. Rows of `qkv`: query and gate of each head in turn, then keys and values."""

    def forward(self, x: Any, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        return self.output(self.attend(self.qkv(x), batch, cache))

    def attend(self, qkv: Any, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        qkv, gate = self.attention_ops.split_gate(qkv, self.heads)
        return self.attention_ops.sigmoid_mul(Attention.attend(self, qkv, batch, cache), gate)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGatedAttention(Attention):
    """See `Attention`. `output_gate` reads what `qkv` reads."""

    output_gate: Linear
    """Gives a number for each of what heads give, or for each head."""
    softplus: bool = False
    """Whether heads' outputs are multiplied by the softplus of the gate, not by its sigmoid."""
    output_gains: Tensor | None = None
    """[head_dim]: of the norm of what each head gives, before the gate; None: there is none."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output_gate, self.output

    @property
    def weight_bytes(self) -> int:
        return self.qkv.weight_bytes + self.output_gate.weight_bytes + self.output.weight_bytes

    def forward(self, x: Any, batch: AttentionBatch, cache: PagedKVCache) -> Tensor:
        attended = self.attend(self.qkv(x), batch, cache)
        if self.output_gains is not None:
            heads = attended.reshape(-1, len(self.output_gains))
            attended = self.attention_ops.rms_norm(heads, self.output_gains, self.eps).view(attended.shape)
        gate = self.attention_ops.softplus_mul if self.softplus else self.attention_ops.sigmoid_mul
        return self.output(gate(attended, self.output_gate(x)))
