"""What adapters do to single outputs and norms, on CUDA: tables by slot at fixed addresses, reserved at the start.

Kernels look up a token's slot and what that holds, so a captured step serves any adapters. Steps without such adapters
launch nothing for it: the host knows which slots hold something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.adapters.layout import AdapterLayout, PlacedSite
from penstock.engine.adapters.norms import Norm
from penstock.engine.adapters.vectors import SiteVectors
from penstock.engine.backends.cuda.kernels import norm
from penstock.engine.backends.cuda.kernels.alter import alter
from penstock.engine.backends.cuda.kernels.own_gains import OwnGains
from penstock.engine.models.layers.forwarder import Forwarder


class SlotTables:
    """Of a step: whether some of its slots hold anything, and the slot of each token."""

    def __init__(self, slots: int) -> None:
        self.active = False
        """Whether the step that has begun looks anything up."""
        self.token_slots: Tensor | None = None
        """int32 [T] on the device; -1: none."""
        self._filled = np.zeros(slots, bool)

    def _fill(self, slot: int, held: Tensor, marks: Tensor | None) -> None:
        """Note what a slot holds, `marks`, in its row of `held`; None: nothing. Most adapters have nothing for a table,
        and they come and go: the host waits for no copy, and there is none where nothing changes."""
        if marks is not None or self._filled[slot]:
            held[slot].copy_(
                torch.zeros(held.shape[1], dtype=held.dtype) if marks is None else marks, non_blocking=True
            )
        self._filled[slot] = marks is not None

    def begin(self, slots: np.ndarray) -> None:
        self.active = bool(self._filled[slots[slots >= 0]].any())

    def begin_head(self, slots: np.ndarray) -> None:
        self.begin(slots)

    def clear(self) -> None:
        self.active = False


class VectorTable(SlotTables):
    """See `Vectors`."""

    def __init__(self, layout: AdapterLayout, slots: int, device: torch.device) -> None:
        super().__init__(slots)
        self._sites = len(layout.sites)
        self._bank = torch.zeros(slots, 2, layout.columns, dtype=torch.float32, device=device)
        self._held = torch.zeros(slots, layout.layers * self._sites, dtype=torch.int32, device=device)

    def put(self, slot: int, vectors: SiteVectors | None) -> None:
        marks = None
        if vectors is not None:
            marks = torch.zeros(self._held.shape[1], dtype=torch.int32)
            self._bank[slot].copy_(vectors.data, non_blocking=True)
            for layer, site in vectors.touched:
                marks[layer * self._sites + site] = 1
        self._fill(slot, self._held, marks)

    def alter(self, y: Tensor, placed: PlacedSite) -> None:
        if self.active:
            assert self.token_slots is not None
            where = placed.column, placed.layer * self._sites + placed.index, placed.site.outputs
            alter(y, self._bank, self._held, self.token_slots, *where)

    def alter_head(self, y: Tensor, placed: PlacedSite) -> None:
        self.alter(y, placed)


class NormTable(SlotTables):
    """See `Norms`."""

    def __init__(self, norms: Sequence[tuple[Norm, Tensor]], slots: int, device: torch.device) -> None:
        super().__init__(slots)
        self._norms = list(norms)
        starts = [0, *np.cumsum([gains.numel() for _, gains in norms]).tolist()]
        self._places = {id(gains): (index, starts[index]) for index, (_, gains) in enumerate(norms)}
        self._bank = torch.zeros(slots, starts[-1], dtype=torch.float32, device=device)
        self._held = torch.zeros(slots, len(norms), dtype=torch.int32, device=device)

    def put(self, slot: int, norms: Mapping[Norm, Tensor] | None) -> None:
        marks = torch.zeros(len(self._norms), dtype=torch.int32) if norms else None
        for index, (at, gains) in enumerate(self._norms):
            own = None if norms is None else norms.get(at)
            if own is not None and marks is not None:
                marks[index] = 1
                start = self._places[id(gains)][1]
                self._bank[slot, start : start + len(own)].copy_(own.to(gains.dtype).float(), non_blocking=True)
        self._fill(slot, self._held, marks)

    def on(self, ops: Any) -> Any:
        return NormTableOps(ops, self)

    def lookup(self, *norms: Tensor | None) -> OwnGains | None:
        """For the kernel of one or two norms with these gains; None: the step replaces none of them."""
        if not self.active:
            return None
        found = [None if gains is None else self._places.get(id(gains)) for gains in (*norms, None)]
        if found[0] is None and found[1] is None:
            return None
        assert self.token_slots is not None
        return OwnGains(self._bank, self._held, self.token_slots, found[0], found[1])


class NormTableOps(Forwarder):
    """Operations whose norms have the gains of each token's adapter; see `ActivationOps`."""

    def __init__(self, base: Any, table: NormTable) -> None:
        super().__init__(base)
        self._table = table

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NormTableOps) and self._base == other._base and self._table is other._table

    __hash__ = object.__hash__

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Any:
        own = self._table.lookup(weight)
        if own is None:
            return self._base.rms_norm(x, weight, eps, dtype)
        return norm.rms_norm(x, weight, eps, dtype=dtype, pdl=self._pdl, own=own)

    def add_rms_norm(
        self, x: Any, residual: Tensor, weight: Tensor | None, eps: float, x_weight: Tensor | None = None
    ) -> Any:
        own = self._table.lookup(weight, x_weight)
        if own is None:
            return self._base.add_rms_norm(x, residual, weight, eps, x_weight)
        return norm.add_rms_norm(x, residual, weight, eps, x_weight, pdl=self._pdl, own=own)

    @property
    def _pdl(self) -> bool:
        """Operations that round activations to FP8 have no such setting; linears take what is not rounded, too."""
        return bool(getattr(self._base, "pdl", False))
