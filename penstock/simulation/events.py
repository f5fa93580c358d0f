"""The virtual clock: a heap of things to happen. Time passes only between events, and events of the same time happen in
the order in which they were planned, so a run depends on nothing but its inputs."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Events:
    """The clock and what is planned."""

    __slots__ = ("_heap", "_planned", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._planned = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, when: float, action: Callable[..., None], *args: Any) -> None:
        """Plans `action(*args)`. What is due already happens now, behind what was planned for now before."""
        self._planned += 1
        heapq.heappush(self._heap, (max(when, self.now), self._planned, action, args))

    def after(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, action, *args)

    @property
    def next(self) -> float | None:
        """When the next event happens; None: nothing is planned."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Lets the next event happen."""
        self.now, _, action, args = heapq.heappop(self._heap)
        action(*args)
