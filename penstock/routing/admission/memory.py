"""The admission queue of a single gateway, in its own memory. All work happens inside the calls; there is no task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from penstock.config.routing import AdmissionConfig
from penstock.routing.admission.decision import fits
from penstock.routing.admission.fair_queue import Changes, FairQueue
from penstock.routing.admission.queue import (
    AdmissionQueue,
    Capacity,
    Outcome,
    QueueEntry,
    QueueState,
    ReadCapacity,
    max_waiting,
)

LOOK_S = 0.25
"""How often the capacity is read while entries wait: it can grow without a release, when other gateways finish."""


class MemoryQueue(AdmissionQueue):
    """See `AdmissionQueue`."""

    def __init__(
        self, rules: AdmissionConfig, capacity: ReadCapacity, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rules = rules
        self._capacity = capacity
        self._clock = clock
        self._queue = FairQueue(rules.order, rules.ageing_s)
        self._waiters: dict[str, asyncio.Future[Outcome]] = {}
        self._look: asyncio.TimerHandle | None = None
        self._at_once: asyncio.Future[Outcome] | None = None

    async def start(self) -> None:
        return

    async def close(self) -> None:
        for waiter in self.give_up().values():
            waiter.cancel()

    def give_up(self) -> dict[str, asyncio.Future[Outcome]]:
        """Stops the queue and returns the futures of entries that still wait."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        waiters, self._waiters = self._waiters, {}
        return waiters

    async def enter(self, entry: QueueEntry, capacity: Capacity) -> asyncio.Future[Outcome]:
        if not self._queue.waits and fits(entry, *self._queue.held, capacity):
            self._queue.enter(entry, capacity, 0, self._clock())
            return self._granted()
        waiter: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.push(entry, capacity, waiter)
        return waiter

    def _granted(self) -> asyncio.Future[Outcome]:
        """One future shared by all entries that are granted at once."""
        if self._at_once is None:
            self._at_once = asyncio.get_running_loop().create_future()
            self._at_once.set_result("granted")
        return self._at_once

    def push(self, entry: QueueEntry, capacity: Capacity, waiter: asyncio.Future[Outcome]) -> None:
        self._waiters[entry.id] = waiter
        self._tell(self._queue.enter(entry, capacity, max_waiting(self._rules, capacity), self._clock()))
        if not waiter.done() and self._look is None:
            self._look_later()

    def adopt(self, entry: QueueEntry) -> None:
        """Takes over an entry that another queue has granted."""
        self._queue.adopt(entry, self._clock())

    def leave(self, id: str) -> None:
        self._waiters.pop(id, None)
        self._tell(self._queue.leave(id, self._capacity_if_needed(), self._clock()))

    def release(self, id: str, used: float) -> None:
        self._tell(self._queue.release(id, used, self._capacity_if_needed(), self._clock()))

    def state(self, tenant: str, rank: int) -> QueueState:
        if not self._queue.waits:  # the fast path: this runs for every request
            return QueueState(*self._queue.held)
        return self._queue.state(tenant, rank, self._clock())

    @property
    def held(self) -> tuple[int, int]:
        """Slots and KV tokens of the granted entries."""
        return self._queue.held

    def rate(self) -> float:
        rates = self._queue.state("", 0, self._clock()).rates
        return rates[0] if rates is not None else 0.0

    def _capacity_if_needed(self) -> Capacity:
        return self._capacity() if self._queue.waits else Capacity()

    def _tell(self, changes: Changes) -> None:
        for id in changes.granted:
            self._settle(id, "granted")
        for id in changes.dropped:
            self._settle(id, "dropped")

    def _settle(self, id: str, outcome: Outcome) -> None:
        waiter = self._waiters.pop(id, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(outcome)

    def _look_later(self) -> None:
        self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._tell(self._queue.tick(self._capacity(), self._clock()))
        if self._waiters:
            self._look_later()
