"""Tokens of a step grouped by adapter: the form in which every LoRA kernel takes them.

`order` lists the tokens that use an adapter, those of one slot together; a tile is up to `block` consecutive entries of
it, all of one slot. So a kernel reads an adapter's matrices once per tile instead of once per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Held = TypeVar("Held")


@dataclass(frozen=True, slots=True)
class Tiles:
    """int32 arrays."""

    order: np.ndarray
    slots: np.ndarray
    """Of each tile."""
    starts: np.ndarray
    """First entry of each tile in `order`."""
    counts: np.ndarray


def make_tiles(slots: np.ndarray, block: int) -> Tiles:
    """Tiles over tokens whose slots are `slots` (-1: no adapter)."""
    active = np.flatnonzero(slots >= 0)
    order = active[np.argsort(slots[active], kind="stable")]
    sorted_slots = slots[order]
    begins = np.flatnonzero(np.diff(sorted_slots, prepend=-1))
    lengths = np.diff(np.append(begins, len(order)))
    pieces = -(-lengths // block)
    within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(begins, pieces) + within * block
    counts = np.minimum(np.repeat(lengths, pieces) - within * block, block)
    return Tiles(
        order.astype(np.int32),
        sorted_slots[starts].astype(np.int32),
        starts.astype(np.int32),
        counts.astype(np.int32),
    )


def grouped(held: Sequence[Held | None], slots: np.ndarray, device: torch.device) -> list[tuple[Held, Tensor | None]]:
    """What the slots of a step's tokens hold, each with the tokens that have it; None: all of the step. `held`: of each
    slot; `slots`: as above."""
    found: list[tuple[Held, Tensor | None]] = []
    for slot in np.unique(slots[slots >= 0]).tolist() if any(held) else ():
        own = held[slot]
        if own:
            of = np.flatnonzero(slots == slot)
            found.append((own, None if len(of) == len(slots) else torch.from_numpy(of).to(device)))
    return found


def most_tiles(tokens: int, slots: int, block: int) -> int:
    """Upper bound of the tiles of a step of `tokens` tokens over `slots` adapters."""
    return min(tokens, slots + tokens // block)
