"""Attention and Mamba-2 side by side in one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import ActivationOps, AttentionBatch
from penstock.engine.kv.kinds import BothKinds
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.layers.mamba import Mamba2
from penstock.engine.models.recurrence_config import BesideAttention


@dataclass(frozen=True, slots=True)
class SideBySide:
    """See `TokenMixer`. Both parts read the same; what they give is added up."""

    ops: ActivationOps
    attention: Attention
    mamba: Mamba2
    scales: BesideAttention
    over_ranks: Callable[[Tensor], Any] | None = None
    """Where other ranks have parts of the sum: makes it of this rank's part."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.attention.linears, *self.mamba.linears

    @property
    def weight_bytes(self) -> int:
        return self.attention.weight_bytes + self.mamba.weight_bytes

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> BothKinds:
        return BothKinds(self.attention.cache_kind(block_size, dtype), self.mamba.cache_kind(block_size, dtype))

    def forward(self, x: Tensor, batch: AttentionBatch, cache: tuple[Any, Any]) -> Any:
        scales, (blocks, states) = self.scales, cache
        attended = self.attention.forward(_times(x, scales.attention_in), batch, blocks)
        mixed = self.mamba.forward(_times(x, scales.mamba_in), batch, states)
        both = torch.add(_times(mixed, scales.mamba_out), attended, alpha=scales.attention_out)
        return both if self.over_ranks is None else self.over_ranks(both)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
