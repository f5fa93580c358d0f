"""Adapters on what makes keys and values of latents (`kv_b_proj`), where that matrix is absorbed.

An adapter B A is added to the matrix. Queries then meet what A gives of the latents: a head's query goes through the
head's rows of B, backwards, and through A, backwards. What the head has seen goes through A and its rows of B. Both are
adapters of their own on every head, so a head is to `LoraKernel.add_visits` what an expert is.

A scale of what the matrix gives is one of queries before, and one of values. A summand is one of values only: to all
scores of a query that of the keys adds the same. What latents are multiplied by is turned around for queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.adapters.inputs import turned
from penstock.engine.adapters.kernel import LoraKernel
from penstock.engine.adapters.layout import PlacedSite
from penstock.engine.adapters.visits import VisitChange


@dataclass(frozen=True, slots=True)
class AbsorbedAdapters:
    """The adapters of a layer's tokens; see `LatentAdditions`."""

    kernel: LoraKernel
    keys: PlacedSite
    values_site: PlacedSite

    def scale(self, plain: Tensor) -> None:
        for change, tokens in self._changes(self.keys, plain):
            if change.scale is not None:
                plain[tokens] = (plain[tokens].float() * change.scale).to(plain.dtype)

    def queries(self, plain: Tensor, made: Tensor) -> None:
        self._add(plain, made, self.keys)
        self._turn(made, self.keys, backwards=True)

    def turn(self, seen: Tensor) -> None:
        self._turn(seen, self.values_site)

    def values(self, seen: Tensor, made: Tensor) -> None:
        self._add(seen, made, self.values_site)
        for change, tokens in self._changes(self.values_site, made):
            own = made[tokens].float()
            own = own if change.scale is None else own * change.scale
            made[tokens] = (own if change.shift is None else own + change.shift).to(made.dtype)

    def _changes(self, placed: PlacedSite, x: Tensor) -> list[tuple[VisitChange, Tensor]]:
        visits = self.kernel.banks.visits
        return [] if visits is None else visits.found(placed, self.kernel.token_slots[: x.shape[0]])

    def _turn(self, x: Tensor, placed: PlacedSite, *, backwards: bool = False) -> None:
        for change, tokens in self._changes(placed, x):
            for blocks in change.blocks[0].values() if change.blocks else ():
                own, of = x[tokens], blocks.transpose(1, 2) if backwards else blocks
                assert self.kernel.banks.visits is not None
                made = turned(own.flatten(0, 1), of, one_by_one=self.kernel.banks.visits.one_by_one)
                x[tokens] = made.view(own.shape)

    def _add(self, x: Tensor, y: Tensor, placed: PlacedSite) -> None:
        tokens, heads = x.shape[0], x.shape[1]
        of = self.kernel.token_slots[:tokens]
        # Not `reshape`: of one token it would be a view of one number, and kernels read row by row.
        slots = of.unsqueeze(1).expand(-1, heads).contiguous().view(-1)
        numbers = torch.arange(heads, dtype=torch.int32, device=x.device).expand(tokens, -1).reshape(-1)
        # `y` may be the first part of longer rows; those of all heads are equally far apart.
        rows = y.as_strided((tokens * heads, y.shape[2]), (y.stride(1), 1))
        self.kernel.add_visits(x.reshape(tokens * heads, -1).contiguous(), rows, placed, slots, numbers)
