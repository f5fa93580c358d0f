"""The controller's events: kept for drivers that fetch them, and shown by the reporter of whichever driver does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from penstock.engine.request import EngineInfo
from penstock.fleet.ray.messages import (
    Draining,
    EngineStarted,
    Event,
    Exited,
    Journal,
    Printed,
    Progressed,
    Ready,
    Scaled,
    Stopped,
)
from penstock.supervisor.reporter import Reporter

MOST = 5000
"""Events that are kept; a driver that comes later misses the oldest."""
WAIT_S = 1.0


class JournalReporter(Reporter):
    """Keeps the supervisor's events."""

    def __init__(self, urls: Callable[[], list[str]]) -> None:
        """`urls`: those of the gateways, asked when everything is ready."""
        self._urls = urls
        self._events: list[Event] = []
        self._first = 0
        """Number of the oldest that is kept."""
        self._added = asyncio.Event()

    async def after(self, number: int) -> Journal:
        """Events from `number` on; waits a moment if there is none."""
        if self._first + len(self._events) <= number:
            self._added.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    await self._added.wait()
        events = self._events[max(number - self._first, 0) :]
        return Journal(self._first + len(self._events), events)

    def add(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) > MOST:
            del self._events[: MOST // 10]
            self._first += MOST // 10
        self._added.set()

    def line(self, child: str, text: str) -> None:
        self.add(Printed(child, text))

    def progress(self, child: str, phase: str, fraction: float) -> None:
        self.add(Progressed(child, phase, fraction))

    def engine_started(self, child: str, info: EngineInfo) -> None:
        self.add(EngineStarted(child, info))

    def ready(self, engines: list[EngineInfo], seconds: float) -> None:
        self.add(Ready(engines, seconds, self._urls()))

    def exited(self, child: str, how: str, restart_in_s: float) -> None:
        self.add(Exited(child, how, restart_in_s))

    def scaled(self, model: str, before: int, after: int, why: str) -> None:
        self.add(Scaled(model, before, after, why))

    def draining(self, limit_s: float) -> None:
        self.add(Draining(limit_s))


def show(event: Event, reporter: Reporter) -> None:
    """Reports an event as if it had happened here."""
    match event:
        case Printed(child, text):
            reporter.line(child, text)
        case Progressed(child, phase, fraction):
            reporter.progress(child, phase, fraction)
        case EngineStarted(child, info):
            reporter.engine_started(child, info)
        case Ready(engines, seconds, urls):
            for number, url in enumerate(urls[1:], start=1):
                reporter.line(f"gateway {number}", f"listening on {url}")
            reporter.ready(engines, seconds)
        case Exited(child, how, restart_in_s):
            reporter.exited(child, how, restart_in_s)
        case Scaled(model, before, after, why):
            reporter.scaled(model, before, after, why)
        case Draining(limit_s):
            reporter.draining(limit_s)
        case Stopped():
            reporter.stopped()
