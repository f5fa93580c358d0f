"""How long to wait before a dead process is started again.

Doubles from `first_s` to `most_s` while it keeps dying; one that stayed up for `healthy_s` starts over. A process that
dies at once must not burn the machine with restarts, and one accident a day must not cost half a minute.
"""

from __future__ import annotations


class Backoff:
    def __init__(self, first_s: float = 0.5, most_s: float = 30.0, healthy_s: float = 60.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._healthy_s = healthy_s
        self._next_s = first_s

    def delay(self, ready_s: float) -> float:
        """Seconds to wait, for a process that had been ready for `ready_s` when it died."""
        if ready_s >= self._healthy_s:
            self._next_s = self._first_s
        delay, self._next_s = self._next_s, min(self._next_s * 2, self._most_s)
        return delay
