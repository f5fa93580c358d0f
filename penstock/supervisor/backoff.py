"""Restart backoff: how long to wait before a dead process is started again.

The delay doubles from `first_s` to `most_s` while the process keeps dying, and resets after it was ready for
`healthy_s`. A process that dies at once must not burn the CPU with restarts, and one crash a day must not cost half a
minute.
"""

from __future__ import annotations


class Backoff:
    def __init__(self, first_s: float = 0.5, most_s: float = 30.0, healthy_s: float = 60.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._healthy_s = healthy_s
        self._next_s = first_s

    def delay(self, ready_s: float) -> float:
        """Seconds to wait before restarting a process that died after being ready for `ready_s`."""
        if ready_s >= self._healthy_s:
            self._next_s = self._first_s
        delay, self._next_s = self._next_s, min(self._next_s * 2, self._most_s)
        return delay
