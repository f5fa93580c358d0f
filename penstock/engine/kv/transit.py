"""Slots of host memory between a cache and the network: blocks, or states, that are handed over.

A slot holds one of them in one piece, filled and emptied by a `BlockMover`: its copies may run beside the steps, so a
slot is touched again only when its copy is over (`is_idle`). Slots come from `slots` and go back there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.engine.kv.host import Transfers
from penstock.engine.kv.mover import BlockMover
from penstock.engine.kv.pool import BlockPool
from penstock.errors import ReplicaLost

MakeMover = Callable[[int], BlockMover]
"""Makes a mover with this many slots."""


class CachePool(NamedTuple):
    """The blocks, or states, of one cache, as far as they are handed over."""

    pool: BlockPool
    room: Callable[[], int]
    """How many may come in now."""
    flush: Callable[[Transfers], None] | None = None
    """Makes copies to the host tier, if there is one."""
    base: int = 0
    """The number of its block 0, where the blocks of several caches are numbered through (`kv.partition`)."""


class Transit:
    """What is copied out of the pools of an engine and into one of them, by name. Where that fails because a rank is
    gone (`ReplicaLost`), no slot and no block is held."""

    def __init__(self, caches: Sequence[CachePool], make_mover: MakeMover, *, num_slots: int, piece_bytes: int) -> None:
        """`piece_bytes`: of one slot."""
        self.caches = list(caches)
        self.make_mover = make_mover
        self.num_slots = num_slots
        self.piece_bytes = piece_bytes
        self._mover: BlockMover | None = None
        self._slots: list[int] = []

    @property
    def slots(self) -> list[int]:
        """Free slots. Their memory is taken when they are first asked for."""
        if self._mover is None:
            self._mover = self.make_mover(self.num_slots)
            self._slots = list(range(self.num_slots))
        return self._slots

    def memory(self, slot: int) -> list[memoryview]:
        """A slot's bytes: one piece for each tensor of the cache."""
        assert self._mover is not None
        return self._mover.memory(slot)

    def is_idle(self, slot: int) -> bool:
        """Whether no copy from or to the slot is under way."""
        return self._mover is None or self._mover.is_idle(slot)

    def find(self, name: bytes) -> int | None:
        """What is called `name` in any cache, numbered through; not while it still comes from the host tier."""
        for pool, _, _, base in self.caches:
            block = pool.find(name)
            if block is not None and (pool.host is None or block not in pool.host.returns):
                return base + block
        return None

    def copy_out(self, names: Sequence[bytes]) -> list[int]:
        """Begin to copy what is in a pool to free slots; their slots, in this order."""
        slots = [self.slots.pop() for _ in names]
        assert self._mover is not None
        out: list[tuple[int, int]] = []
        for name, slot in zip(names, slots, strict=True):
            block = self.find(name)
            assert block is not None, "asked for a block that is not here"
            out.append((block, slot))
        if out:
            try:
                self._mover.run(Transfers(out=out))
            except ReplicaLost:
                self._slots += slots
                raise
        return slots

    def take_in(self, arrived: Sequence[tuple[bytes, int]], cache: int = 0) -> tuple[list[int], int]:
        """Begin to copy (name, slot) pairs into the pool of a cache; what they are there, held, and how many were
        copied. Fewer than came when there is no room."""
        pool, room, flush, base = self.caches[cache]
        blocks: list[int] = []
        back: dict[int, int] = {}
        for name, slot in arrived:
            block = pool.find(name)
            if block is not None:  # another request brought or computed it meanwhile
                pool.share(block)
            elif room() < 1:
                break
            else:
                block = pool.allocate()
                pool.name(block, name)
                back[base + block] = slot
            blocks.append(block)
        try:
            if pool.host is not None and flush is not None:
                pending = pool.host.take()  # blocks just reused must be copied out before they are overwritten
                if pending is not None:
                    flush(pending)
            if back:
                assert self._mover is not None
                self._mover.run(Transfers(back=back))
        except ReplicaLost:
            for block in blocks:
                pool.release(block)
            raise
        return blocks, len(back)
