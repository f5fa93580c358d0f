"""What outlives an engine: blocks, and states, on a disk that keeps them.

Blocks go there as soon as no sequence uses them (`kv.host`): with the steps, and here between them when there are none.
Invariant: used by the thread that steps the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.kv.host import HostTier
from penstock.engine.kv.kept_folder import KeptSlot
from penstock.engine.kv.mover import BlockMover

SLEEP_S = 2.0
"""Most time for it when the engine goes to sleep."""
_LAST_S = 2.0
"""Further time for copies that are under way."""
_POLL_S = 0.001

log = logging.getLogger(__name__)


class Persistence:
    """Saves what an engine without work still has in memory only."""

    def __init__(
        self,
        allocator: BlockAllocator,
        blocks: list[tuple[HostTier, BlockMover]],
        states: list[tuple[HostTier, BlockMover]],
        slot: KeptSlot,
    ) -> None:
        """`blocks`, `states`: the tier behind every cache, with what makes its copies. `slot`: the lock on the
        files."""
        self._allocator = allocator
        self._slot = slot
        self._blocks = [host.disk for host, _ in blocks if host.disk is not None]
        self._states = [host.disk for host, _ in states if host.disk is not None]
        self._tiers = blocks + states

    def restore(self) -> None:
        """Take over what the engine before has left."""
        for disk in self._blocks + self._states:
            disk.restore()
        found = sum(disk.restored for disk in self._blocks)
        states = f" and {sum(disk.restored for disk in self._states)} states" if self._states else ""
        log.info("found %d KV blocks%s on disk (slot %d)", found, states, self._slot.number)

    @property
    def names(self) -> list[bytes]:
        """Of the blocks on disk, the least recently used of each cache first."""
        return list(dict.fromkeys(name for disk in self._blocks for name in disk.names))

    def advance(self, now: float) -> bool:
        """Copy some blocks further, while no step is in flight; False when there is nothing left to do."""
        self._allocator.tick(now)
        busy = False
        for host, mover in self._tiers:
            transfers = host.take()
            if transfers is not None:
                mover.run(transfers)
            busy |= transfers is not None or (host.disk is not None and host.disk.writing > 0)
        return busy

    def flush(self, limit_s: float, clock: Callable[[], float], hurry: Callable[[], bool] = lambda: False) -> None:
        """Save everything that can be, within a limit and until `hurry` says so."""
        begin = time.monotonic()
        while self.advance(clock()) and time.monotonic() < begin + limit_s and not hurry():
            time.sleep(_POLL_S)
        left = sum(host.unsaved for host, _ in self._tiers)
        if left:
            log.warning("%d KV blocks and states were not saved to disk in %.1f s", left, time.monotonic() - begin)
        disks = [(host, host.disk) for host, _ in self._tiers if host.disk is not None]
        end = begin + limit_s + _LAST_S
        while any(disk.slots for _, disk in disks) and time.monotonic() < end and not hurry():
            time.sleep(_POLL_S)
            for host, _ in disks:
                host.land()
        for _, disk in disks:
            disk.remember_order()

    def close(self) -> None:
        """After the files were closed."""
        self._slot.close()
