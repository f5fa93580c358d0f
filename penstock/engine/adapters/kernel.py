"""What a backend does for adapters: it keeps them, and adds them to what linears give."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from penstock.engine.adapters.adaption_prompts import AdaptionBank
from penstock.engine.adapters.head_norms import HeadNormBank
from penstock.engine.adapters.inputs import InputBank
from penstock.engine.adapters.layout import PlacedSite
from penstock.engine.adapters.norms import Norms
from penstock.engine.adapters.peft import LoadedAdapter
from penstock.engine.adapters.prefixes import PrefixBank
from penstock.engine.adapters.rows import RowBank
from penstock.engine.adapters.vectors import Vectors
from penstock.engine.adapters.visits import VisitBank
from penstock.engine.models.layers.linear import Linear


class LoraKernel(Protocol):
    """Holds the adapters of all slots and adds them to the outputs of linears."""

    rows: RowBank | None
    """What adapters replace of embedding and head; None: none may. It is told of slots and steps as the kernel is."""
    vectors: Vectors | None
    """What adapters do to single outputs; the same. `add` and its like end with it."""
    norms: Norms | None
    """The norms that adapters replace; the same."""
    head_norms: HeadNormBank | None
    """Those of queries and keys; the same."""
    inputs: InputBank | None
    """What adapters do to the inputs of linears; the same."""
    prefixes: PrefixBank | None
    """Keys and values that adapters put before those of prompts; the same."""
    adaption: AdaptionBank | None
    """Learned tokens that queries attend to by themselves; the same."""
    visits: VisitBank | None
    """What adapters do to outputs and inputs of experts and of `kv_b_proj`; the same. Those who call `add_visits` ask
    it too."""

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
        inputs = self._kernel.inputs
        y = (self.base if inputs is None else inputs.over(self.base, self._placed))(x)
        self._kernel.add(x, y, self._placed)
        return y
