"""The rate of one busy replica in requests per second, learned while the fleet is busy.

Idle time says nothing about capacity, and neither does the time after replicas became busy or their number changed:
what they run has not had time to finish. Both are left out.
"""

from __future__ import annotations

import math

FADE_S = 120.0
"""Busy seconds after which the weight of an observation has fallen to 1/e."""
SETTLED_S = 10.0
"""Busy time below which the rate counts as unknown, and least time after a change of the replicas."""


class ReplicaRate:
    """Requests per second and replica; the caller passes the time and whether the replicas are busy."""

    def __init__(self) -> None:
        self._finished = 0.0
        self._seconds = 0.0
        self._at: float | None = None
        self._ready = 0
        self._steady_at = 0.0
        """Since when the same number of replicas has been busy."""

    def observe(self, now: float, ready: int, running: int, finished_per_s: float, busy: bool) -> None:
        """Takes the requests that finished since the last call."""
        elapsed = 0.0 if self._at is None else now - self._at
        self._at = now
        if ready != self._ready or not busy:
            self._ready, self._steady_at = ready, now
        if not busy or not ready or elapsed <= 0 or finished_per_s <= 0:
            return
        # By Little's law the usual time of a request; after that, as many finish as begin.
        if now - elapsed - self._steady_at < max(SETTLED_S, running / finished_per_s):
            return
        kept = math.exp(-elapsed / FADE_S)
        self._seconds = self._seconds * kept + elapsed
        self._finished = self._finished * kept + finished_per_s / ready * elapsed

    @property
    def per_s(self) -> float | None:
        """None while too little was measured."""
        if self._seconds < SETTLED_S or self._finished <= 0:
            return None
        return self._finished / self._seconds
