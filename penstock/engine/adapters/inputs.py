"""What adapters do to the inputs of linears: x becomes R x, where R is made of square blocks along its diagonal.

OFT turns inputs block by block; IA3 multiplies them, which is blocks of one number. The linear itself is called again
for the tokens of such adapters, with their inputs, once for every part of it that has blocks of its own. Steps with
such adapters are launched from the host, which knows the tokens of each slot; recorded and captured steps contain none
of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine.adapters.layout import PlacedSite
from penstock.engine.adapters.tiles import grouped

Parts = tuple[Tensor | None, ...]
"""Of each part of a site: float32 [blocks, size, size], which inputs are multiplied by from the left; None: they stay
as they are. Parts may share one tensor."""


@dataclass(frozen=True, slots=True)
class InputBlocks:
    """The blocks of one adapter, of this process's part of it."""

    of: Mapping[tuple[int, int], Parts]
    """By layer and site."""

    def to(self, device: torch.device) -> InputBlocks:
        moved: dict[int, Tensor] = {}

        def each(blocks: Tensor | None) -> Tensor | None:
            if blocks is None:
                return None
            if id(blocks) not in moved:
                moved[id(blocks)] = blocks.to(device, non_blocking=True)
            return moved[id(blocks)]

        return InputBlocks({place: tuple(map(each, parts)) for place, parts in self.of.items()})


class InputBank:
    """The blocks of all slots. `begin` is that of `LoraKernel`."""

    def __init__(self, slots: int, device: torch.device, *, one_by_one: bool = False) -> None:
        """`one_by_one`: what a token gets does not depend on the others of its step."""
        self._held: list[InputBlocks | None] = [None] * slots
        self._device = device
        self._one_by_one = one_by_one
        self._groups: list[tuple[InputBlocks, Tensor | None]] = []

    def put(self, slot: int, blocks: InputBlocks | None) -> None:
        """Bring the blocks of an adapter into a slot. Few adapters have some: nothing is reserved for them."""
        self._held[slot] = None  # what was there is freed first
        if blocks is not None:
            self._held[slot] = blocks.to(self._device)

    def begin(self, slots: np.ndarray) -> None:
        self._groups = grouped(self._held, slots, self._device)

    def clear(self) -> None:
        """The coming step is captured: it changes nothing."""
        self._groups = []

    def over(self, base: Callable[[Tensor], Tensor], placed: PlacedSite) -> Callable[[Tensor], Tensor]:
        """`base` with the inputs that the step's adapters make; itself where they change none of this site."""
        place = placed.layer, placed.index
        found = [(held.of[place], tokens) for held, tokens in self._groups if place in held.of]
        if not found:
            return base

        def with_inputs(x: Tensor) -> Tensor:
            y = base(x)
            for parts, tokens in found:
                rows = x if tokens is None else x[tokens]
                made: dict[int, Tensor] = {}
                begin = 0
                for size, blocks in zip(placed.site.sizes, parts, strict=True):
                    if blocks is not None:
                        if id(blocks) not in made:
                            made[id(blocks)] = base(turned(rows, blocks, one_by_one=self._one_by_one))
                        at = slice(None) if tokens is None else tokens
                        y[at, begin : begin + size] = made[id(blocks)][:, begin : begin + size]
                    begin += size
            return y

        return with_inputs


def turned(rows: Tensor, blocks: Tensor, *, one_by_one: bool = False) -> Tensor:
    """Rows of inputs multiplied by blocks; see `Parts`. `one_by_one`: no row depends on the others."""
    count, size, _ = blocks.shape
    pieces = torch.split(rows, 1) if one_by_one else (rows,)
    made = [torch.einsum("bij,tbj->tbi", blocks, piece.float().reshape(-1, count, size)) for piece in pieces]
    return torch.cat(made).flatten(1).to(rows.dtype).contiguous()
