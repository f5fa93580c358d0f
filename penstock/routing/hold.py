"""Requests held for a model that has no replica yet because it is scaled to zero: the first one starts it.

Invariant: at most `most` requests are held, none longer than `seconds`; one that cannot be answered in that time is
refused at once, with the time after which to try again. Every request that finds the model asleep is reported, also one
that is refused or has another model to go to.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from penstock.backends.base import Clock
from penstock.protocol.errors import EngineUnavailable

LOOK_S = 0.05
"""How often held requests check whether a replica is ready."""


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """How long requests wait for the first replica, and how many."""

    seconds: float = 60.0
    most: int = 256


class HoldQueue:
    """The held requests of one model in one gateway."""

    def __init__(self, model: str, limits: HoldLimits, clock: Clock) -> None:
        self.waiting = 0
        self.cold_start_s: float | None = None
        """How long a replica takes to start, as the supervisor measured; None: not known."""
        self.on_wanted: Callable[[], None] = lambda: None
        """Called when a request finds no replica ready."""
        self._model = model
        self.limits = limits
        self._clock = clock
        self._wanted_at: float | None = None

    def wanted(self) -> None:
        """A request found no replica ready."""
        if self._wanted_at is None:
            self._wanted_at = self._clock()
        self.on_wanted()

    def served(self) -> None:
        """A replica is ready."""
        self._wanted_at = None

    @property
    def ready_in_s(self) -> float | None:
        """How much longer the start takes; at least a second. None: not known."""
        if self.cold_start_s is None:
            return None
        begun = self._clock() if self._wanted_at is None else self._wanted_at
        return max(begun + self.cold_start_s - self._clock(), 1.0)

    def check(self, at_most: float = math.inf) -> None:
        """Raises `EngineUnavailable` when a request need not begin to wait: too many do, or it would take too long.
        `at_most`: the seconds that its client allows."""
        limits, expected = self.limits, self.ready_in_s
        seconds = min(limits.seconds, at_most)
        if self.waiting >= limits.most:
            raise EngineUnavailable(
                f"`{self._model}` is starting and {self.waiting} requests already wait for it; try again.",
                reason="queue_full",
                retry_after=expected or limits.seconds,
            )
        if expected is not None and expected > seconds:
            longer = "requests are held" if seconds == limits.seconds else "this request may wait"
            raise EngineUnavailable(
                f"`{self._model}` was asleep; it is started now, which takes about {expected:.0f} s, longer than "
                f"{longer} ({seconds:.3g} s); try again.",
                reason="queue_timeout",
                retry_after=expected,
            )

    async def wait(self, ready: Callable[[], bool], at_most: float = math.inf) -> None:
        """Waits until a replica is ready; `EngineUnavailable` when that takes too long or too many wait already."""
        self.check(at_most)
        seconds = min(self.limits.seconds, at_most)
        deadline = self._clock() + seconds
        self.waiting += 1
        try:
            while not ready():
                if self._clock() >= deadline:
                    raise EngineUnavailable(
                        f"`{self._model}` was asleep and is not ready after {seconds:.3g} s; try again.",
                        reason="queue_timeout",
                        retry_after=self.ready_in_s or 5.0,
                    )
                await asyncio.sleep(LOOK_S)
        finally:
            self.waiting -= 1
