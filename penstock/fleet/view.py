"""The newest snapshot of the fleet, for everything in one process that needs it. While the registry is away, the last
one holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from penstock.fleet.registry import Fleet, Registry


class FleetView:
    """Follows a registry while `run` runs."""

    def __init__(self, registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self.fleet = Fleet()
        self.seen = asyncio.Event()
        """Set when there is a first snapshot."""
        self._changed = asyncio.Event()

    async def run(self) -> None:
        async for fleet in self._registry.follow():
            self.take(fleet)

    def take(self, fleet: Fleet) -> None:
        """A new snapshot; for a process that follows the registry itself."""
        self.fleet = fleet
        self.seen.set()
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, within_s: float) -> None:
        """Waits for the next snapshot, and not longer than `within_s`."""
        event = self._changed
        try:
            async with asyncio.timeout(within_s):
                await event.wait()
        except TimeoutError:
            return

    async def wait_for(self, condition: Callable[[Fleet], bool], within_s: float) -> bool:
        """Whether the fleet comes to fulfil a condition in time."""
        deadline = self._clock() + within_s
        while not condition(self.fleet):
            left = deadline - self._clock()
            if left <= 0:
                return False
            await self.changed(min(left, 1.0))
        return True
