"""Throughput measured over busy time only: work per busy second, exponentially weighted.

Idle time does not count, so the figure is a capacity and not a demand. Work and busy seconds decay with the same time
constant (of busy time), so their quotient is a weighted mean that follows a change of speed within a few time
constants.
"""

from __future__ import annotations

import math

FADE_S = 10.0
"""Busy seconds after which the weight of an observation has fallen to 1/e."""
SETTLED_S = 0.5
"""Busy time below which the rate counts as unknown."""


class BusyRate:
    """Work per busy second. The caller passes the time and reports when work begins and ends."""

    __slots__ = ("_busy_since", "_fade_s", "_seconds", "_work")

    def __init__(self, fade_s: float = FADE_S, kinds: int = 1) -> None:
        """`kinds`: number of kinds of work, counted separately by index."""
        self._fade_s = fade_s
        self._work = [0.0] * kinds
        self._seconds = 0.0
        self._busy_since: float | None = None

    def busy(self, now: float, busy: bool) -> None:
        """Reports that there is work from now on, or that there is none."""
        self._pass(now)
        self._busy_since = now if busy else None

    def add(self, now: float, work: float, kind: int = 0) -> None:
        """Counts work that was just done."""
        self._pass(now)
        self._work[kind] += work

    def add_evenly(self, now: float, work: float, since: float) -> None:
        """Counts work that was done evenly from `since` until now, all of it busy time."""
        passed = (now - since) / self._fade_s
        self.add(now, work * -math.expm1(-passed) / passed if passed > 1e-9 else work)

    def per_s(self, now: float, first: int = 0) -> float | None:
        """The rate of all kinds from `first` on; None while too little was measured."""
        self._pass(now)
        if self._seconds < SETTLED_S or not any(self._work):
            return None
        return sum(self._work[first:]) / self._seconds

    def _pass(self, now: float) -> None:
        if self._busy_since is None or now <= self._busy_since:
            return
        elapsed = now - self._busy_since
        kept = math.exp(-elapsed / self._fade_s)
        self._work = [work * kept for work in self._work]
        self._seconds = self._seconds * kept + self._fade_s * (1.0 - kept)
        self._busy_since = now
