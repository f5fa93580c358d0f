"""What a backend does for adapters: it keeps them, and adds them to what linears give."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from penstock.engine.adapters.banks import Banks
from penstock.engine.adapters.layout import PlacedSite
from penstock.engine.adapters.peft import LoadedAdapter
from penstock.engine.models.layers.linear import Linear


class LoraKernel(Protocol):
    """Holds the adapters of all slots and adds them to the outputs of linears."""

    banks: Banks
    """What adapters bring beside their matrices. It is told of slots and steps as the kernel is."""

    def put(self, slot: int, adapter: LoadedAdapter) -> None:
        """Bring an adapter into a slot; returns before the copy is done where the device works by itself."""
        ...

    def begin(self, slots: np.ndarray) -> None:
        """The adapter slot of every token of the coming step; -1 where there is none."""
        ...

    def add(self, x: Tensor, y: Tensor, placed: PlacedSite) -> None:
        """y[t] += B(A x[t]) of each token's adapter, in place. `x` is what the linear read, `y` what it gave."""
        ...

    def begin_head(self, slots: np.ndarray) -> None:
        """The adapter slot of every row of logits that comes next, where these are not the step's tokens."""
        ...

    def add_head(self, x: Tensor, y: Tensor, placed: PlacedSite) -> None:
        """`add` for logits, which may be wider than `x`."""
        ...

    def add_embedding(self, token_ids: Tensor, y: Tensor, placed: PlacedSite) -> None:
        """y[t] += B A[:, token_ids[t]] of each token's adapter, in place; `y` is the residual stream."""
        ...

    @property
    def token_slots(self) -> Tensor:
        """int32 [T] on the device: the slots of the step that has begun."""
        ...

    def add_visits(
        self, x: Tensor, y: Tensor, placed: PlacedSite, slots: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> None:
        """y[i] += weights[i] * B(A x[i]) of expert `experts[i]` of the adapter in slot `slots[i]`, in place; nothing
        where that is -1. The site is one of experts."""
        ...


class AdaptedLinear:
    """A linear, then its adapters."""

    def __init__(self, base: Linear, kernel: LoraKernel, placed: PlacedSite) -> None:
        self.base = base
        self.weight_bytes = base.weight_bytes
        self._kernel = kernel
        self._placed = placed

    def __call__(self, x: Tensor) -> Tensor:
        inputs = self._kernel.banks.inputs
        y = (self.base if inputs is None else inputs.over(self.base, self._placed))(x)
        self._kernel.add(x, y, self._placed)
        return y
