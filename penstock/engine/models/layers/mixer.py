"""The token mixer of a layer: the interface of attention, and of whatever takes its place.

A mixer is the only part of a layer in which the tokens of a sequence see each other. What it must remember of earlier
tokens lies in a cache of its own kind (`kv.kinds`), which the engine allocates and passes to every call.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock.engine.backends.interface import ActivationOps, AttentionBatch
from penstock.engine.kv.kinds import CacheKind
from penstock.engine.models.layers.linear import Linear


class TokenMixer(Protocol):
    """[T, hidden] normalized to [T, hidden], which is added to the residual stream."""

    @property
    def ops(self) -> ActivationOps:
        """Their norm makes the input; that of FP8 linears hands over FP8 activations with their scales."""
        ...

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that every token passes."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of all its matrices."""
        ...

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> CacheKind:
        """The cache it needs; `dtype` is that of the engine's KV cache."""
        ...

    def forward(self, x: Any, batch: AttentionBatch, cache: Any) -> Tensor:
        """`cache`: this layer's share of what the cache kind allocated; it knows the new tokens afterwards."""
        ...


@runtime_checkable
class FusedMixer(TokenMixer, Protocol):
    """One whose linears take the norm and the residual addition into their launches."""

    def fused(self, residual: Tensor, norm: Tensor, eps: float, batch: AttentionBatch, cache: Any) -> Tensor:
        """`residual` plus the mixed, normalized `residual`; may update it in place."""
        ...
