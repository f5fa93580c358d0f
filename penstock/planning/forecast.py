"""A short forecast of a rate of arrivals: Holt's level and trend for uneven intervals.

Random arrivals look like small trends, so the trend and sudden jumps count only as far as they exceed what chance
explains (two standard deviations of a Poisson count over the same time).
"""

from __future__ import annotations

import math

LEVEL_S = 40.0
TREND_S = 90.0
"""Time constants of the level and of its trend."""
JUMP_S = 10.0
"""Time constant of the quick mean that notices a spike."""
SIGMAS = 2.0
GROWTH = 1.5
"""The trend is followed up to this multiple of the present rate."""


class Forecast:
    """The rate now and the rate to expect; the caller passes the time."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._level = 0.0
        self._trend = 0.0
        self._quick = 0.0

    def observe(self, now: float, per_s: float) -> None:
        """Takes the mean rate since the last call."""
        if self._at is None:
            self._at, self._level, self._quick = now, per_s, per_s
            return
        elapsed = now - self._at
        if elapsed <= 0:
            return
        self._at = now
        self._quick += (per_s - self._quick) * -math.expm1(-elapsed / JUMP_S)
        before = self._level
        expected = max(self._level + self._trend * elapsed, 0.0)
        self._level = expected + (per_s - expected) * -math.expm1(-elapsed / LEVEL_S)
        slope = (self._level - before) / elapsed
        self._trend += (slope - self._trend) * -math.expm1(-elapsed / TREND_S)

    @property
    def rate(self) -> float:
        """The present rate. A jump beyond chance counts at once, a fall only slowly."""
        return max(self._level, self._quick - _chance(self._quick, JUMP_S))

    def ahead(self, seconds: float) -> float:
        """The rate to expect after `seconds`, never less than the present one."""
        rate = self.rate
        rise = self._trend * seconds - _chance(self._level, LEVEL_S)
        return min(rate + max(rise, 0.0), rate * GROWTH)


def _chance(per_s: float, over_s: float) -> float:
    """How far a mean rate over this time may be off by chance alone."""
    return SIGMAS * math.sqrt(max(per_s, 0.0) / (2.0 * over_s))
