"""What was sent to this engine lately, for gateways that register: a gateway that starts, or takes over from one that
died, then knows which prefixes and sessions are here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from penstock.engine.kv.block_hash import DIGEST_SIZE
from penstock.protocol.messages import Placed, Placement

MOST = 4096
"""Placements remembered."""
MOST_BLOCKS = 512
"""Blocks of a placement that stands for what was found on disk."""
AT_ONCE = 64
"""Placements per message."""


class Placements:
    """The newest placements, in order; as many as the blocks of the prefix cache can still hold."""

    def __init__(self) -> None:
        self._kept: deque[Placement] = deque()
        self._blocks = 0

    def add(self, placements: Iterable[Placement], capacity: int) -> None:
        """`capacity`: blocks of the engine's cache."""
        for placement in placements:
            self._kept.append(placement)
            self._blocks += _blocks(placement)
        while len(self._kept) > MOST or (self._blocks > capacity > 0 and len(self._kept) > 1):
            self._blocks -= _blocks(self._kept.popleft())

    def add_found(self, names: Sequence[bytes], capacity: int) -> None:
        """Blocks that an engine found when it started, the least recently used first. They are no prompts, but their
        names are all that decides."""
        newest = names[-capacity:] if capacity > 0 else []
        parts = [newest[at : at + MOST_BLOCKS] for at in range(0, len(newest), MOST_BLOCKS)]
        self.add([Placement(b"".join(reversed(part))) for part in parts], capacity)

    def clear(self) -> None:
        self._kept.clear()
        self._blocks = 0

    def messages(self) -> Iterator[Placed]:
        kept = list(self._kept)
        for start in range(0, len(kept), AT_ONCE):
            yield Placed(kept[start : start + AT_ONCE])


def _blocks(placement: Placement) -> int:
    return len(placement.names) // DIGEST_SIZE
