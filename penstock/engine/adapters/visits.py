"""What adapters do to single outputs, and to the inputs, of linears that a token visits: those of experts, and the
matrix that makes keys and values of latents, head by head.

For other linears that is `adapters.vectors` and `adapters.inputs`. Here every expert has vectors and blocks of its own,
so they are kept beside the slots, and steps with such adapters are launched from the host. A row may be of a token that
came from another rank: which rows an adapter has follows from the slots of the rows, not from those of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.engine.adapters.inputs import turned
from penstock.engine.adapters.layout import PlacedSite


@dataclass(frozen=True, slots=True)
class VisitChange:
    """Of the linears of a site in one layer. Of heads: keys have scales for what they read, since queries go through
    their matrix backwards."""

    scale: Tensor | None = None
    """float32 [experts, outputs]."""
    shift: Tensor | None = None
    """The same."""
    blocks: tuple[Mapping[int, Tensor], ...] = ()
    """Of each part, by expert: see `inputs.Parts`. Of heads: one for all of them, as that of head 0."""

    def to(self, device: torch.device) -> VisitChange:
        scale, shift = (
            None if each is None else each.to(device, non_blocking=True) for each in (self.scale, self.shift)
        )
        blocks = tuple({expert: one.to(device, non_blocking=True) for expert, one in of.items()} for of in self.blocks)
        return VisitChange(scale, shift, blocks)


@dataclass(frozen=True, slots=True)
class VisitChanges:
    """Those of one adapter, of this process's part of it."""

    of: Mapping[tuple[int, int], VisitChange]
    """By layer and site."""

    def to(self, device: torch.device) -> VisitChanges:
        return VisitChanges({place: change.to(device) for place, change in self.of.items()})


def changes_of(
    vectors: Mapping[tuple[int, int], VisitChange] | None,
    blocks: Mapping[tuple[int, int], Sequence[Mapping[int, Tensor]]] | None,
) -> VisitChanges | None:
    """This process's part of both; None: the adapter has neither on any rank."""
    if vectors is None and blocks is None:
        return None
    vectors, blocks = vectors or {}, blocks or {}
    return VisitChanges(
        {
            place: replace(vectors.get(place, VisitChange()), blocks=tuple(blocks.get(place, ())))
            for place in sorted({*vectors, *blocks})
        }
    )


class VisitBank:
    """Those of all slots."""

    def __init__(self, slots: int, device: torch.device, *, one_by_one: bool = False) -> None:
        """`one_by_one`: what a token gets does not depend on the others of its step."""
        self._held: list[VisitChanges | None] = [None] * slots
        self._device = device
        self.one_by_one = one_by_one
        self._active = False

    def put(self, slot: int, changes: VisitChanges | None) -> None:
        """Bring those of an adapter into a slot. Few adapters have some: slots reserve nothing for them."""
        self._held[slot] = None  # what was there is freed first
        if changes is not None:
            self._held[slot] = changes.to(self._device)

    def begin(self) -> None:
        """The coming step is launched from the host."""
        self._active = True

    def clear(self) -> None:
        """The coming step is captured: it changes nothing."""
        self._active = False

    def found(self, placed: PlacedSite, slots: Tensor) -> list[tuple[VisitChange, Tensor]]:
        """What adapters change of a site, each with the rows that have it. `slots` [rows]: -1: no adapter."""
        if not self._active:
            return []
        place = placed.layer, placed.index
        changes = [(slot, held.of[place]) for slot, held in enumerate(self._held) if held and place in held.of]
        each = [(change, (slots == slot).nonzero().flatten()) for slot, change in changes]
        return [(change, rows) for change, rows in each if len(rows)]

    def over(
        self, base: Callable[[Tensor], Tensor], x: Tensor, placed: PlacedSite, slots: Tensor, experts: Tensor
    ) -> Tensor:
        """base(x) with the inputs that the rows' adapters make. `base` is called with all rows, once more for every
        part that has blocks of its own."""
        y = base(x)
        found = [(change, rows) for change, rows in self.found(placed, slots) if any(change.blocks)]
        begin = 0
        for part, size in enumerate(placed.site.sizes if found else ()):
            own = x
            changed: list[Tensor] = []
            for change, rows in found:
                blocks = change.blocks[part] if change.blocks else {}
                at = experts[rows]
                for expert in torch.unique(at).tolist() if blocks else ():
                    if expert in blocks:
                        some = rows[at == expert]
                        own = own.clone() if own is x else own
                        own[some] = turned(x[some], blocks[expert], one_by_one=self.one_by_one)
                        changed.append(some)
            if changed:
                of = torch.cat(changed)
                y[of, begin : begin + size] = base(own)[of, begin : begin + size]
            begin += size
        return y

    def alter(
        self, y: Tensor, placed: PlacedSite, slots: Tensor, experts: Tensor, weights: Tensor | None = None
    ) -> None:
        """Scale and shift what linears and their adapters gave, in place. `weights`: see `LoraKernel.add_visits`."""
        for change, rows in self.found(placed, slots):
            of, made = experts[rows].long(), y[rows].float()
            if change.scale is not None:
                made = made * change.scale[of]
            if change.shift is not None:
                shift = change.shift[of]
                made = made + (shift if weights is None else shift * weights.reshape(-1, 1)[rows])
            y[rows] = made.to(y.dtype)
