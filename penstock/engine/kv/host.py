"""The second tier: blocks that left the device and can come back, and the copies a step has to make.

The device pool says which block it is about to reuse, and which have been unused for a while; the tier gives each a
slot on the host under the same name, least recently used out first. Nothing is copied here: what is to be copied is
collected until the next step takes it (`take`). Invariant: a slot that is the source or target of a copy not yet taken
is not given to another name. Copies out run before copies back, so a block may be copied out and then filled from the
host in the same step.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from penstock.engine.request import EngineLoad

IDLE_COPIES = 32
"""Most idle blocks copied out in one step, so that no step is delayed noticeably."""


@dataclass(slots=True)
class Transfers:
    """Copies to make before a step: all of `out`, then all of `back`."""

    out: list[tuple[int, int]] = field(default_factory=list)
    """(block, slot)"""
    back: dict[int, int] = field(default_factory=dict)
    """Block: slot. A block given away and filled again before the step ran needs only the last."""


class HostTier:
    """Names and slots of the host's blocks."""

    def __init__(self, num_slots: int, idle_s: float) -> None:
        self.capacity = num_slots
        self.idle_s = idle_s
        self.offloaded = 0
        self.restored = 0
        self.now = 0.0
        """Set once per step; the tier has no clock of its own."""
        self._empty = list(range(num_slots - 1, -1, -1))
        self._resting: OrderedDict[bytes, int] = OrderedDict()
        self._moving: dict[bytes, int] = {}
        self._transfers = Transfers()
        self._cooling: OrderedDict[int, tuple[bytes, float]] = OrderedDict()

    @property
    def used(self) -> int:
        return len(self._resting) + len(self._moving)

    def __contains__(self, name: bytes) -> bool:
        return name in self._resting or name in self._moving

    def keep(self, block: int, name: bytes) -> bool:
        """Copy a device block before it is overwritten. False when every slot is busy: its content is lost."""
        if name in self._moving:
            return True
        if name in self._resting:
            self._resting.move_to_end(name)
            return True
        if self._empty:
            slot = self._empty.pop()
        elif self._resting:
            _, slot = self._resting.popitem(last=False)
        else:
            return False
        self._moving[name] = slot
        self._transfers.out.append((block, slot))
        self.offloaded += 1
        return True

    def hold(self, name: bytes) -> None:
        """Keep a block found here from being evicted: it is about to be copied back."""
        if name in self._resting:
            self._moving[name] = self._resting.pop(name)

    def restore(self, name: bytes, block: int) -> None:
        """Copy the content of a held name into a device block. The host keeps its copy."""
        self._transfers.back[block] = self._moving[name]
        self.restored += 1

    def cool(self, block: int, name: bytes) -> None:
        """A device block is no longer used, though it may be again."""
        if name not in self:
            self._cooling[block] = (name, self.now + self.idle_s)

    def warm(self, block: int) -> None:
        """A device block is used again, or given away."""
        self._cooling.pop(block, None)

    def copy_idle(self) -> None:
        """Copy blocks unused for `idle_s` ahead of their eviction, which then costs nothing."""
        for _ in range(IDLE_COPIES):
            if not self._cooling:
                return
            block, (name, due) = next(iter(self._cooling.items()))
            if due > self.now or not self.keep(block, name):
                return
            del self._cooling[block]

    def take(self) -> Transfers | None:
        """The copies collected so far, to be made before anything else happens on the device."""
        self._resting.update(self._moving)
        self._moving.clear()
        transfers = self._transfers
        if not transfers.out and not transfers.back:
            return None
        self._transfers = Transfers()
        return transfers

    def forget_all(self) -> None:
        """Drop every name: what was copied may have been wrong, or was not copied at all."""
        self._empty.extend(self._resting.values())
        self._empty.extend(self._moving.values())
        self._resting.clear()
        self._moving.clear()
        self._cooling.clear()
        self._transfers = Transfers()

    def report(self, load: EngineLoad) -> None:
        load.host_blocks, load.total_host_blocks = self.used, self.capacity
        load.offloaded_blocks, load.restored_blocks = self.offloaded, self.restored

    def check(self) -> None:
        """Assert the invariant; used by tests."""
        slots = [*self._empty, *self._resting.values(), *self._moving.values()]
        assert sorted(slots) == list(range(self.capacity)), "a slot is lost or has two names"
        assert not self._resting.keys() & self._moving.keys(), "a name has two slots"
        moving = set(self._moving.values())
        written = [slot for _, slot in self._transfers.out]
        assert len(written) == len(set(written)) and moving.issuperset(written), "a slot is written twice in a step"
        assert moving.issuperset(self._transfers.back.values()), "a slot may change before it is read"
