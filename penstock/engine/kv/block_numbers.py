"""Blocks and slots of several caches, numbered through: those of the first cache, then those of the second, and so on.

For ranks that have sequences of their own (`kv.partition`). Every cache has as many blocks, and as many slots in host
memory. Whose a copy is follows from its block.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.kv.host import Transfers
from penstock.engine.kv.mover import BlockMover


@dataclass(frozen=True, slots=True)
class Numbering:
    """Of the blocks of a cache and their slots, or of states and theirs."""

    blocks: int
    """Of each cache, the null block included."""
    slots: int

    def through(self, cache: int, transfers: Transfers) -> Transfers:
        """The copies of one cache as everybody numbers them."""
        block, slot = cache * self.blocks, cache * self.slots
        return Transfers(
            [(block + one, slot + other) for one, other in transfers.out],
            {block + one: slot + other for one, other in transfers.back.items()},
        )

    def of(self, cache: int, transfers: Transfers) -> Transfers:
        """Of the copies of all caches those of one, as that one numbers them."""
        first, slot = cache * self.blocks, cache * self.slots
        own = range(first, first + self.blocks)
        return Transfers(
            [(block - first, at - slot) for block, at in transfers.out if block in own],
            {block - first: at - slot for block, at in transfers.back.items() if block in own},
        )


class OwnMover(BlockMover):
    """Makes those copies that are of one cache; it is told of all."""

    def __init__(self, mover: BlockMover, numbering: Numbering, cache: int, rows: BlockMover | None = None) -> None:
        """`rows`: makes all copies, of what is kept here of every cache's blocks."""
        self._mover = mover
        self._numbering = numbering
        self._cache = cache
        self._rows = rows

    def memory(self, slot: int) -> list[memoryview]:
        return self._mover.memory(slot)

    def is_idle(self, slot: int) -> bool:
        return self._mover.is_idle(slot)

    def run(self, transfers: Transfers) -> None:
        own = self._numbering.of(self._cache, transfers)
        if own.out or own.back:
            self._mover.run(own)
        if self._rows is not None:
            self._rows.run(transfers)


class CacheMover(BlockMover):
    """Takes the copies of one cache, for a mover that is told of all."""

    def __init__(self, mover: BlockMover, numbering: Numbering, cache: int) -> None:
        self._mover = mover
        self._numbering = numbering
        self._cache = cache

    def memory(self, slot: int) -> list[memoryview]:
        return self._mover.memory(self._cache * self._numbering.slots + slot)

    def is_idle(self, slot: int) -> bool:
        return self._mover.is_idle(self._cache * self._numbering.slots + slot)

    def run(self, transfers: Transfers) -> None:
        self._mover.run(self._numbering.through(self._cache, transfers))
