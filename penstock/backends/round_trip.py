"""The network's part of the time that a server takes to answer.

What is measured contains the server's own delays (an engine answers between two steps), which only ever add to it. So
the smallest of the last measurements is used: it follows a shorter way at once and a longer one after `WINDOW`
measurements.
"""

from __future__ import annotations

from collections import deque

WINDOW = 16


class RoundTrip:
    """Measured round trips to one server."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)

    def measured(self, seconds: float) -> None:
        self._last.append(max(seconds, 0.0))

    @property
    def seconds(self) -> float | None:
        """None: not measured yet."""
        return min(self._last, default=None)
