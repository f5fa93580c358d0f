"""What adapters do to single outputs of linears: y becomes scale * y + shift, with vectors of each token's adapter.

DoRA multiplies what a linear and its adapter give by a magnitude for every output; biases that were trained replace the
model's own. Both are known when an adapter is read (`adapters.vector_tensors`). With `VectorBank`, steps that have such
adapters are launched from the host, which knows the tokens of each slot; recorded steps contain none of this. On CUDA a
kernel looks up each token's vectors, also in captured steps (`backends/cuda/slot_tables.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.engine.adapters.layout import PlacedSite
from penstock.engine.adapters.tiles import grouped

_AT_ONCE = 1 << 24
"""Outputs that are widened at the same time: nothing is reserved for that."""


@dataclass(frozen=True, slots=True)
class SiteVectors:
    """The vectors of one adapter, of this process's part of it."""

    data: Tensor
    """float32 [2, columns]: scales and shifts, by `PlacedSite.column`."""
    touched: frozenset[tuple[int, int]]
    """(layer, site) of those that are not all ones and zeros."""

    def pinned(self) -> SiteVectors:
        return SiteVectors(self.data.pin_memory(), self.touched)

    def to(self, device: torch.device) -> SiteVectors:
        return SiteVectors(self.data.to(device, non_blocking=True), self.touched)


class Vectors(Protocol):
    """The vectors of all slots, as a backend keeps them. `begin` and `begin_head` are those of `LoraKernel`."""

    def put(self, slot: int, vectors: SiteVectors | None) -> None:
        """Bring the vectors of an adapter into a slot."""
        ...

    def begin(self, slots: np.ndarray) -> None: ...

    def begin_head(self, slots: np.ndarray) -> None: ...

    def clear(self) -> None:
        """The coming step changes nothing."""
        ...

    def alter(self, y: Tensor, placed: PlacedSite) -> None:
        """Scale and shift what a linear and its adapters gave, in place."""
        ...

    def alter_head(self, y: Tensor, placed: PlacedSite) -> None:
        """The same of logits."""
        ...


_Group = tuple[SiteVectors, Tensor | None]
"""Vectors, and the tokens that have them; None: all of the step."""


class VectorBank:
    """See `Vectors`; each adapter's are where PyTorch puts them."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._held: list[SiteVectors | None] = [None] * slots
        self._device = device
        self._groups: list[_Group] = []
        self._head_groups: list[_Group] = []

    def put(self, slot: int, vectors: SiteVectors | None) -> None:
        self._held[slot] = None if vectors is None else vectors.to(self._device)

    def begin(self, slots: np.ndarray) -> None:
        self._groups, self._head_groups = grouped(self._held, slots, self._device), []

    def begin_head(self, slots: np.ndarray) -> None:
        self._head_groups = grouped(self._held, slots, self._device)

    def clear(self) -> None:
        self._groups, self._head_groups = [], []

    def alter(self, y: Tensor, placed: PlacedSite) -> None:
        for held, tokens in self._groups:
            _alter(y, placed, held, tokens)

    def alter_head(self, y: Tensor, placed: PlacedSite) -> None:
        for held, tokens in self._head_groups:
            _alter(y, placed, held, tokens)


def _alter(y: Tensor, placed: PlacedSite, held: SiteVectors, tokens: Tensor | None) -> None:
    if (placed.layer, placed.index) not in held.touched:
        return
    scale, shift = held.data[:, placed.column : placed.column + placed.site.outputs]
    count = max(1, _AT_ONCE // placed.site.outputs)
    # Product and sum are rounded one by one, so that no output depends on how many there are.
    if tokens is None:
        for part in torch.split(y, count):
            part.copy_((part.float() * scale).add_(shift))
        return
    for some in torch.split(tokens, count):
        y[some] = (y[some].float() * scale).add_(shift).to(y.dtype)
