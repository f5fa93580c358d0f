"""Which replica probably holds which prefix, judged by what was sent there.

An engine's own cache is the truth, but it is in another process; what a gateway sent to it is a good guess. Per replica
the names of blocks are kept in the order in which the engine would give them up, and as many as fit its cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

UNKNOWN_CAPACITY = 16_384
"""Names kept for a replica that does not tell the size of its cache."""


class PrefixIndex:
    """Names of blocks by replica."""

    def __init__(self) -> None:
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    def matched(self, replica: str, blocks: Sequence[bytes]) -> int:
        """How many leading blocks the replica probably has."""
        held = self._held.get(replica)
        if not held:
            return 0
        count = 0
        for name in blocks:
            if name not in held:
                break
            count += 1
        return count

    def sent(self, replica: str, blocks: Sequence[bytes], capacity: int = 0) -> None:
        """A prompt with these blocks went there."""
        held = self._held.setdefault(replica, OrderedDict())
        for name in reversed(blocks):  # beginnings last: they are the last to be given up
            held[name] = None
            held.move_to_end(name)
        excess = len(held) - (capacity or UNKNOWN_CAPACITY)
        for _ in range(excess):
            held.popitem(last=False)

    def forget(self, replica: str) -> None:
        self._held.pop(replica, None)
