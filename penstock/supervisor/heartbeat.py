"""Whether a process that should give a sign of life every second still does.

An engine that is stuck in a step ends itself (`protocol.watchdog`); one that is frozen as a whole (stopped, or held in
the kernel) cannot. Only one that has begun to beat is judged, so a start may take as long as it takes. Time in which
the watcher did not run either (its machine was suspended, itself stopped) is nobody's silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HEARTBEAT_S = 1.0
"""How often a process beats, and its watcher looks."""


class Heartbeat:
    """Of one process. `look` every `HEARTBEAT_S`."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit_s`: silent for longer is frozen; 0: never."""
        self._limit_s = limit_s
        self._clock = clock
        self._begun = False
        self._looked_at = clock()
        self.silent_s = 0.0

    def beat(self) -> None:
        self._begun = True
        self.silent_s = 0.0

    def look(self) -> bool:
        """Whether it is frozen."""
        now = self._clock()
        self.silent_s += min(now - self._looked_at, 2 * HEARTBEAT_S)
        self._looked_at = now
        return self._begun and 0 < self._limit_s < self.silent_s
