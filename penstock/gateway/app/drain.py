"""The drain at shutdown: no new requests for tokens, time for those that run, then an error for the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from penstock.protocol.errors import Draining, EngineLost

ABORT_S = 1.0
"""How long requests that were aborted after the drain may take to tell their clients."""


class InFlight(Protocol):
    """Something that runs for a request and can be aborted."""

    def fail(self, error: Exception) -> None: ...


class Drain:
    """Counts the requests for tokens of one gateway process and knows what runs for them."""

    def __init__(self) -> None:
        self.active = False
        """Whether the gateway is draining."""
        self.leaving = False
        """Whether the gateway is draining or about to: it is no longer ready."""
        self.requests = 0
        self._callbacks: list[Callable[[], object]] = []
        self._in_flight: set[InFlight] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def on_begin(self, callback: Callable[[], object]) -> None:
        """Have `callback` called when the drain begins."""
        self._callbacks.append(callback)

    def enter(self) -> None:
        """A request for tokens begins; refused while draining."""
        if self.active:
            raise Draining
        self.requests += 1
        self._idle.clear()

    def leave(self) -> None:
        self.requests -= 1
        if not self.requests:
            self._idle.set()

    def track(self, work: InFlight) -> None:
        self._in_flight.add(work)

    def untrack(self, work: InFlight) -> None:
        self._in_flight.discard(work)

    async def run(self, seconds: float, delay_s: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for `seconds`, then abort them. For the first `delay_s` new
        requests are still taken: balancers see that this gateway is not ready before one is refused."""
        self.leaving = True
        if delay_s:
            await asyncio.sleep(delay_s)
        self.active = True
        for callback in self._callbacks:
            callback()
        for wait in (seconds, ABORT_S):
            try:
                async with asyncio.timeout(wait):
                    await self._idle.wait()
                return
            except TimeoutError:
                for work in list(self._in_flight):
                    work.fail(EngineLost("The server is shutting down and could not finish this request in time."))
