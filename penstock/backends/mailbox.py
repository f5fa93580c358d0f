"""Holds an engine's deltas for the coroutine that answers the client.

One mailbox serves one HTTP request with all its choices. Invariant: memory is bounded by what the request may
produce, because unread deltas of the same choice are merged; a slow reader costs a few integers, and never blocks
the engine's reader.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from penstock.engine.request import Delta


@dataclass(slots=True)
class Arrival:
    """A delta, the choice it belongs to, and when its newest token reached the gateway."""

    index: int
    delta: Delta
    at: float


class DeltaSink(Protocol):
    """Receives the deltas of a request."""

    @property
    def committed(self) -> bool:
        """Whether the client was told that its answer is on its way: nobody else can give it any more, so the request
        waits for an engine that is away even if it was impatient."""

    @property
    def answered(self) -> bool:
        """Whether any of its requests has got tokens."""

    def put(self, index: int, delta: Delta) -> None: ...

    def fail(self, error: Exception) -> None:
        """Ends the deltas with an error."""


class Mailbox:
    """Deltas of one HTTP request, in order of arrival, for a single reader."""

    __slots__ = ("_arrivals", "_error", "_loop", "_timer", "_until", "_waiter", "cached", "committed", "produced")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrivals: dict[int, Arrival] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._until = 0.0
        self.committed = False
        self.produced: dict[int, int] = {}
        """Tokens that have arrived for each choice, read or unread."""
        self.cached: dict[int, int] = {}
        """Cached prompt tokens of each choice."""

    def put(self, index: int, delta: Delta) -> None:
        now = time.monotonic()
        self.produced[index] = self.produced.get(index, 0) + len(delta.tokens)
        if delta.cached_tokens is not None:
            self.cached.setdefault(index, delta.cached_tokens)
        if self._error is not None:
            self._wake()  # after an error, further deltas are only counted
            return
        arrival = self._arrivals.get(index)
        if arrival is None:
            self._arrivals[index] = Arrival(index, delta, now)
        else:
            arrival.delta.extend(delta)
            arrival.at = now
        self._wake()

    @property
    def answered(self) -> bool:
        return any(self.produced.values())

    @property
    def error(self) -> Exception | None:
        """What ended it."""
        return self._error

    def fail(self, error: Exception) -> None:
        """Ends the stream; the reader first gets what has arrived, then `error`. The first error wins."""
        if self._error is None:
            self._error = error
        self._wake()

    async def take(self, within: float | None = None) -> list[Arrival]:
        """Returns everything that has arrived, waiting for the first arrival; empty after `within` seconds."""
        if not self._arrivals and self._error is None:
            self._waiter = self._loop.create_future()
            if within is not None:
                self._wake_by(self._loop.time() + max(within, 0.0))
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._arrivals:
            arrivals, self._arrivals = self._arrivals, {}
            return list(arrivals.values())
        if self._error is not None:
            raise self._error
        return []

    async def stirred(self, within: float) -> None:
        """Returns when something has arrived, or after `within` seconds, without taking it."""
        self._waiter = self._loop.create_future()
        self._wake_by(self._loop.time() + max(within, 0.0))
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Cancels the timer; there is no reader any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake_by(self, until: float) -> None:
        """Reuses one timer for many waits: most waits end long before their timeout, and a timer for each would cost
        more than the tokens."""
        self._until = until
        if self._timer is not None and self._timer.when() <= until:
            return
        self.close()
        self._timer = self._loop.call_at(until, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        if self._loop.time() < self._until:
            self._wake_by(self._until)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)
