"""Detects a frozen process by its missing heartbeats.

An engine that is stuck in a step ends itself (`engine_host.watchdog`); a process that is frozen as a whole (stopped, or
blocked in the kernel) cannot. A process counts as frozen only after its first heartbeat, so startup may take any time.
Time in which the supervisor itself did not run (machine suspended, process stopped) does not count as silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HEARTBEAT_S = 1.0
"""How often a process sends a heartbeat, and how often the supervisor checks."""


class Heartbeat:
    """The heartbeats of one process. Call `look` every `HEARTBEAT_S`."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit_s`: silence after which the process counts as frozen; 0: never."""
        self._limit_s = limit_s
        self._clock = clock
        self._begun = False
        self._looked_at = clock()
        self.silent_s = 0.0

    def beat(self) -> None:
        self._begun = True
        self.silent_s = 0.0

    def look(self) -> bool:
        """Whether the process is frozen."""
        now = self._clock()
        self.silent_s += min(now - self._looked_at, 2 * HEARTBEAT_S)
        self._looked_at = now
        return self._begun and 0 < self._limit_s < self.silent_s
