"""Whether the steps of an engine get anywhere. The watchdog is told, and steps that do not are spaced out."""

from __future__ import annotations

from typing import Any

from penstock.engine.request import EngineLoad
from penstock.engine_host.watchdog import Watchdog


class Progress:
    """Of one engine process. A step makes progress when it has results, or when the engine's counters move."""

    def __init__(self, watchdog: Watchdog | None) -> None:
        self._watchdog = watchdog
        self._fruitless = 0
        """Steps without progress in a row."""
        self._counters = (0, 0)
        """Steps of the engine so far, and blocks that have come back from the host."""

    @property
    def starved(self) -> bool:
        """Whether the last two steps made no progress. (The first step on an asynchronous device never has results
        yet.)"""
        return self._fruitless > 1

    def start(self) -> None:
        if self._watchdog is not None:
            self._watchdog.start()

    def stop(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()

    def pause(self) -> None:
        """Something legitimately slow begins."""
        if self._watchdog is not None:
            self._watchdog.pause()

    def step_begins(self) -> None:
        if self._watchdog is not None:
            self._watchdog.busy()

    def step_ended(self, engine: Any, load: EngineLoad, *, has_results: bool) -> None:
        # A step without results may still have advanced a long prefill, or copied blocks that a request waits for: the
        # counters show it. Nothing runs while adapters are read or a rank is started again, which may take minutes:
        # that is not being stuck.
        reading = load.adapters is not None and load.adapters.loading > 0 and not load.running
        counters = (load.steps, load.restored_blocks)
        if has_results or counters != self._counters or reading or getattr(engine, "reviving", False):
            self._counters = counters
            self._fruitless = 0
            self.idle()
        else:
            self._fruitless += 1

    def idle(self) -> None:
        """A step made progress, or there is nothing to do."""
        if self._watchdog is not None:
            self._watchdog.idle()
