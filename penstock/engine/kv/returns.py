"""Blocks that are to be copied back from the host, a few with every step, so that no step waits long for them.

A step makes at most `at_once` of these copies, in the order in which they were asked for; what is left waits here, with
its block taken and its slot held. Invariant: a block that waits here is held by some sequence, and holds nothing yet.
"""

from __future__ import annotations

from itertools import islice


class Returns:
    """Copies that later steps make. `in`: whether a block waits for its copy."""

    def __init__(self, at_once: int | None = None) -> None:
        """`at_once`: None where copies run beside the steps anyway, and all may be made at once."""
        self.at_once = at_once
        self._left = at_once
        """Copies that the step being scheduled may still make."""
        self._waiting: dict[int, tuple[bytes, int]] = {}
        """By block: its name and its slot."""
        self.slots: dict[bytes, int] = {}
        """Of the names that wait."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, block: int) -> bool:
        return block in self._waiting

    def begin_step(self) -> None:
        self._left = self.at_once

    def fits(self) -> bool:
        """Whether another copy may be made in this step, and none waits before it; then it counts."""
        if self._left is None:
            return True
        if self._waiting or self._left <= 0:
            return False
        self._left -= 1
        return True

    def add(self, block: int, name: bytes, slot: int) -> None:
        self._waiting[block] = (name, slot)
        self.slots[name] = slot

    def take(self, steps: int = 1) -> list[tuple[int, bytes, int]]:
        """Blocks, names and slots whose copies are made in this step: as many as may be, or as in so many steps."""
        if not self._waiting or self._left is None or self.at_once is None:
            return []
        taken: list[tuple[int, bytes, int]] = []
        for block in list(islice(self._waiting, self._left + (steps - 1) * self.at_once)):
            name, slot = self._waiting.pop(block)
            del self.slots[name]
            taken.append((block, name, slot))
        self._left = max(self._left - len(taken), 0)
        return taken

    def cancel(self, block: int) -> tuple[bytes, int] | None:
        """Nobody needs a block any more; its name and slot, if it waits."""
        found = self._waiting.pop(block, None)
        if found is not None:
            del self.slots[found[0]]
        return found

    def clear(self) -> dict[bytes, int]:
        """Nothing waits any more; the names and slots of what did."""
        found, self.slots = self.slots, {}
        self._waiting.clear()
        return found
