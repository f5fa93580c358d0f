"""Which prompt prefixes each replica probably has cached, judged by the prompts sent to it.

The engine's own prefix cache is the truth, but it lives in another process; the prompts a gateway sent are a good
approximation. For each replica the index keeps as many block hashes as its cache has blocks, in eviction order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

UNKNOWN_CAPACITY = 16_384
"""Hashes kept for a replica that does not report the size of its cache."""


class PrefixIndex:
    """Block hashes by replica."""

    def __init__(self) -> None:
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    def matched(self, replica: str, blocks: Sequence[bytes]) -> int:
        """The number of leading blocks that the replica probably has cached."""
        held = self._held.get(replica)
        if not held or not blocks or blocks[0] not in held:
            return 0
        count = 0
        for name in blocks:
            if name not in held:
                break
            count += 1
        return count

    def holders(self, name: bytes) -> set[str]:
        """The replicas that probably have this block."""
        return {replica for replica, held in self._held.items() if name in held}

    def sent(self, replica: str, blocks: Sequence[bytes], capacity: int = 0) -> None:
        """Records that a prompt with these blocks was sent to the replica."""
        held = self._held.setdefault(replica, OrderedDict())
        for name in reversed(blocks):  # the first blocks last, because they are evicted last
            if name in held:
                held.move_to_end(name)
            else:
                held[name] = None
        excess = len(held) - (capacity or UNKNOWN_CAPACITY)
        for _ in range(excess):
            held.popitem(last=False)

    def forget(self, replica: str) -> None:
        self._held.pop(replica, None)
