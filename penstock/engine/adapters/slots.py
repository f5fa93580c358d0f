"""Device slots: which adapter is in which, how many sequences use it, and which one to evict for another.

Invariant: a slot in use (`users > 0`) or pinned keeps its adapter; idle ones are given away, least recently used first.
A plain object: `moves` lists the copies its owner has to make before the next step runs. A copy that was not made when
the last user of its adapter ends is given up: one that fails must not fail the steps of others.
"""

from __future__ import annotations

from collections import OrderedDict

from penstock.engine.adapters.peft import LoadedAdapter


class SlotTable:
    """Adapters in a fixed number of slots. Every operation is O(1), eviction past pinned ones aside."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.moves: list[tuple[int, LoadedAdapter]] = []
        self.copies = 0
        self.evictions = 0
        self._free = list(range(count - 1, -1, -1))
        self._slot_of: dict[LoadedAdapter, int] = {}
        self._users: dict[LoadedAdapter, int] = {}
        self._idle: OrderedDict[LoadedAdapter, None] = OrderedDict()
        self._pinned: set[LoadedAdapter] = set()

    @property
    def occupied(self) -> int:
        return len(self._slot_of)

    @property
    def placed(self) -> dict[LoadedAdapter, int]:
        """Every adapter in a slot, and which."""
        return dict(self._slot_of)

    @property
    def in_use(self) -> list[LoadedAdapter]:
        return list(self._users)

    @property
    def room(self) -> int:
        """How many more adapters fit now."""
        return len(self._free) + sum(adapter not in self._pinned for adapter in self._idle)

    def holds(self, adapter: LoadedAdapter) -> bool:
        return adapter in self._slot_of

    def acquire(self, adapter: LoadedAdapter) -> int:
        """A slot with `adapter` in it (once `moves` are made), kept until released as often. There must be room."""
        slot = self._slot_of.get(adapter)
        if slot is None:
            slot = self._free.pop() if self._free else self._evict()
            self._slot_of[adapter] = slot
            self.moves.append((slot, adapter))
            self.copies += 1
        self._idle.pop(adapter, None)
        self._users[adapter] = self._users.get(adapter, 0) + 1
        return slot

    def release(self, adapter: LoadedAdapter) -> None:
        left = self._users[adapter] - 1
        if left:
            self._users[adapter] = left
            return
        del self._users[adapter]
        self._idle[adapter] = None
        if any(move[1] is adapter for move in self.moves):  # not copied yet, perhaps because it cannot be
            self._take_out(adapter)

    def pin(self, adapter: LoadedAdapter, pinned: bool) -> None:
        """Whether an idle `adapter` may lose its slot."""
        if pinned:
            self._pinned.add(adapter)
        else:
            self._pinned.discard(adapter)

    def drop(self, adapter: LoadedAdapter) -> bool:
        """Free the slot of an unused adapter. False while it is in use."""
        self._pinned.discard(adapter)
        if adapter in self._users:
            return False
        if adapter in self._slot_of:
            self._take_out(adapter)
        return True

    def check(self) -> None:
        """Assert the invariant; used by tests."""
        assert len(self._free) + len(self._slot_of) == self.count
        assert sorted([*self._free, *self._slot_of.values()]) == list(range(self.count))
        assert set(self._users) | set(self._idle) == set(self._slot_of)
        assert not set(self._users) & set(self._idle)

    def _take_out(self, adapter: LoadedAdapter) -> None:
        del self._idle[adapter]
        self._free.append(self._slot_of.pop(adapter))
        self.moves[:] = [move for move in self.moves if move[1] is not adapter]

    def _evict(self) -> int:
        victim = next(adapter for adapter in self._idle if adapter not in self._pinned)
        del self._idle[victim]
        self.evictions += 1
        return self._slot_of.pop(victim)
