"""What stands in a layer for a part that it does not have: no matrices, nothing kept, and never called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.interface import ActivationOps, AttentionBatch
from penstock.engine.kv.kinds import NothingKept
from penstock.engine.models.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class NoMixer:
    """Of a layer that is a feed-forward; see `TokenMixer`."""

    ops: ActivationOps

    @property
    def linears(self) -> tuple[Linear, ...]:
        return ()

    @property
    def weight_bytes(self) -> int:
        return 0

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> NothingKept:
        return NothingKept()

    def forward(self, x: Any, batch: AttentionBatch, cache: Any) -> Tensor:
        raise NotImplementedError("this layer has no mixer")


@dataclass(frozen=True, slots=True)
class NoFeedForward:
    """Of a layer that is a mixer; see `FeedForward`."""

    ops: ActivationOps

    @property
    def linears(self) -> tuple[Linear, ...]:
        return ()

    @property
    def weight_bytes(self) -> int:
        return 0

    def forward(self, x: Any) -> Tensor:
        raise NotImplementedError("this layer has no feed-forward")
