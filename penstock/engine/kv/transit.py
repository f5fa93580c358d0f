"""Slots of host memory between a cache and the network: blocks, or states, that are handed over.

A slot holds one of them in one piece, filled and emptied by a `BlockMover`: its copies may run beside the steps, so a
slot is touched again only when its copy is over (`is_idle`). Slots come from `slots` and go back there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.engine.kv.host import Transfers
from penstock.engine.kv.mover import BlockMover
from penstock.engine.kv.pool import BlockPool

MakeMover = Callable[[int], BlockMover]
"""Makes a mover with this many slots."""


class Transit:
    """What is copied out of one pool and into it, by name."""

    def __init__(
        self,
        pool: BlockPool,
        make_mover: MakeMover,
        *,
        num_slots: int,
        piece_bytes: int,
        flush: Callable[[Transfers], None] | None,
        room: Callable[[], int],
    ) -> None:
        """`piece_bytes`: of one slot. `flush`: makes copies to the host tier, if there is one. `room`: how many may
        come in now."""
        self.pool = pool
        self.make_mover = make_mover
        self.num_slots = num_slots
        self.piece_bytes = piece_bytes
        self._flush = flush
        self._room = room
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

    def copy_out(self, names: Sequence[bytes]) -> list[int]:
        """Begin to copy what is in the pool to free slots; their slots, in this order."""
        slots = [self.slots.pop() for _ in names]
        assert self._mover is not None
        out: list[tuple[int, int]] = []
        for name, slot in zip(names, slots, strict=True):
            block = self.pool.find(name)
            assert block is not None, "asked for a block that is not here"
            out.append((block, slot))
        if out:
            self._mover.run(Transfers(out=out))
        return slots

    def take_in(self, arrived: Sequence[tuple[bytes, int]]) -> tuple[list[int], int]:
        """Begin to copy (name, slot) pairs into the pool; what they are there, held, and how many were copied. Fewer
        than came when there is no room."""
        blocks: list[int] = []
        back: dict[int, int] = {}
        for name, slot in arrived:
            block = self.pool.find(name)
            if block is not None:  # another request brought or computed it meanwhile
                self.pool.share(block)
            elif self._room() < 1:
                break
            else:
                block = self.pool.allocate()
                self.pool.name(block, name)
                back[block] = slot
            blocks.append(block)
        if self.pool.host is not None and self._flush is not None:
            pending = self.pool.host.take()  # blocks just reused must be copied out before they are overwritten
            if pending is not None:
                self._flush(pending)
        if back:
            assert self._mover is not None
            self._mover.run(Transfers(back=back))
        return blocks, len(back)
