"""The entry point of admission: a request gets a ticket, granted now or later, or is refused with a retry time.

Each model has a controller with a queue, an estimate of the usual answer length, and a capacity. A request holds its
`Ticket` from admission to its end; closing the ticket, however the request ended, releases its capacity.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from functools import partial

from penstock.config.routing import AdmissionConfig
from penstock.protocol.errors import Overloaded, Reason
from penstock.routing.admission.capacity import EngineCapacity
from penstock.routing.admission.decision import fits, saturated
from penstock.routing.admission.memory import MemoryQueue
from penstock.routing.admission.prefix_sketch import PrefixSketch
from penstock.routing.admission.queue import (
    CLASSES,
    AdmissionQueue,
    Capacity,
    Outcome,
    QueueEntry,
    ReadCapacity,
    cost_of,
    max_waiting,
)
from penstock.routing.admission.triage import AdmissionRequest, Assessment, Triage
from penstock.routing.registry import ServedModel
from penstock.telemetry.admission_metrics import AdmissionMetrics


class AdmissionController:
    """Admission to one model, or to one lane of one of its pools."""

    def __init__(
        self,
        model: ServedModel,
        config: AdmissionConfig,
        metrics: AdmissionMetrics,
        roll: Callable[[], float] = random.random,
        queue: tuple[AdmissionQueue, ReadCapacity] | None = None,
    ) -> None:
        self.model = model.name
        self.config = config
        self.metrics = metrics
        self.queue, self.capacity = queue or _open_queue(model, config)
        self._triage = Triage(config, roll)
        self._sketch = PrefixSketch()
        self.waits = [metrics.waits(model.name, name) for name in CLASSES]

    async def enter(self, request: AdmissionRequest) -> Ticket:
        """A ticket for the request; raises `Overloaded` when it can neither run nor wait."""
        capacity = self.capacity()
        assessed = self.assess(request, capacity)
        entry = assessed.entry
        if assessed.refusal is not None:
            assert assessed.refusal.reason is not None
            raise self.refusal(entry, assessed.refusal.reason, assessed.refusal.wait_s)
        return Ticket(self, entry, await self.queue.enter(entry, capacity), assessed.patience)

    def assess(self, request: AdmissionRequest, capacity: Capacity) -> Assessment:
        """What the queue makes of a request, without letting it in."""
        state = self.queue.state(request.tenant, request.rank)
        prompt = sum(map(len, request.prompts))
        return self._triage.assess(request, prompt, partial(self._cached, request), state, capacity, time.monotonic())

    def free(self, entry: QueueEntry, capacity: Capacity) -> bool:
        """Whether an entry would be granted at once, as far as known here."""
        state = self.queue.state(entry.tenant, entry.rank)
        return not state.depth and fits(entry, state.in_flight, state.kv_tokens, capacity)

    async def start(self) -> None:
        await self.queue.start()

    async def close(self) -> None:
        await self.queue.close()

    def depths(self) -> tuple[int, int, int]:
        """Requests that wait, by class."""
        return self.queue.state("", 0).queued

    def rate(self) -> float:
        """See `AdmissionQueue.rate`."""
        return self.queue.rate()

    def _cached(self, request: AdmissionRequest) -> int:
        return sum(self._sketch.cached(tokens, request.salt) for tokens in request.prompts)

    def load(self) -> tuple[int, float, bool]:
        """Requests that wait, how long a new one would wait behind them, and whether all gateways share the queue."""
        state = self.queue.state("", 0)
        wait = sum(state.work) / state.rates[0] if state.rates is not None and state.rates[0] > 0 else 0.0
        return state.depth, wait, bool(self.config.url)

    def most_waiting(self) -> int:
        """How many requests may wait."""
        return max_waiting(self.config, self.capacity())

    def saturated(self) -> bool:
        """Whether best-effort callers should be sent to a smaller model."""
        return saturated(self.queue.state("", 0), self.capacity(), self.config)

    def refusal(self, entry: QueueEntry, reason: Reason, wait_s: float | None = None) -> Overloaded:
        """The error for a request that is not admitted; counts it."""
        self.metrics.shed(self.model, CLASSES[entry.rank], reason)
        retry_after = self._triage.retry_after(entry, self.queue.state(entry.tenant, entry.rank), wait_s)
        return Overloaded(_MESSAGES[reason].format(model=self.model), reason=reason, retry_after=retry_after)

    def answered(self, tokens: float) -> None:
        """Takes the length of a finished answer into the mean."""
        self._triage.answered(tokens)


class Ticket:
    """A request's place in the queue and, once granted, its share of the capacity."""

    __slots__ = ("_closed", "_controller", "_entry", "_error", "_outcome", "_patience", "granted")

    def __init__(
        self, controller: AdmissionController, entry: QueueEntry, outcome: asyncio.Future[Outcome], patience: float
    ) -> None:
        self._controller = controller
        self._entry = entry
        self._outcome = outcome
        self._patience = patience
        self._error: Exception | None = None
        self._closed = False
        self.granted = False
        self._look()

    async def wait(self, within: float | None = None) -> bool:
        """Waits until the request may run; False after `within` seconds. Raises when it will never run."""
        until = self._entry.arrived + self._patience
        asked = until if within is None else time.monotonic() + within
        # The timers of uvloop may fire a millisecond too early.
        while not self._outcome.done() and self._error is None and (left := min(until, asked) - time.monotonic()) > 0:
            await asyncio.wait((self._outcome,), timeout=left)
        if self._error is not None:
            raise self._error
        if self._look():
            return True
        if asked < until:
            return False
        self.close()
        raise self._controller.refusal(self._entry, "queue_timeout")

    def fail(self, error: Exception) -> None:
        """Gives up the place in the queue: `wait` raises `error`, now or later. Has no effect once granted."""
        if not self.granted:
            self._error = error
            self.close()
            self._outcome.cancel()

    def close(self, fresh_tokens: int = 0, output_tokens: int = 0, sequences: int = 0) -> None:
        """Ends the request and reports what it really used. Only the first call counts."""
        if self._closed:
            return
        self._closed = True
        if not self.granted:
            self._controller.queue.leave(self._entry.id)
            return
        used = cost_of(fresh_tokens, output_tokens) if sequences else 0.0
        self._controller.queue.release(self._entry.id, used)
        if sequences:
            self._controller.answered(output_tokens / sequences)

    def _look(self) -> bool:
        if not self.granted and self._outcome.done() and not self._outcome.cancelled():
            if self._outcome.result() == "dropped":
                self._closed = True
                raise self._controller.refusal(self._entry, "queue_full")
            self.granted = True
            self._controller.waits[self._entry.rank].observe(time.monotonic() - self._entry.arrived)
        return self.granted


def _open_queue(model: ServedModel, config: AdmissionConfig) -> tuple[AdmissionQueue, ReadCapacity]:
    if config.url:
        from penstock.routing.admission.redis import RedisQueue

        capacity = EngineCapacity(model.backend, config)
        return RedisQueue(config.url, model.name, config, capacity), capacity
    queue: MemoryQueue | None = None

    def held() -> tuple[int, int]:
        return queue.held if queue is not None else (0, 0)

    capacity = EngineCapacity(model.backend, config, held)
    queue = MemoryQueue(config, capacity)
    return queue, capacity


_MESSAGES: dict[Reason, str] = {
    "queue_full": "The queue of `{model}` is full; try again later.",
    "queue_timeout": "This request reached its maximum wait in the queue of `{model}`; try again later.",
    "load_shed": "`{model}` has more requests than it can answer in time; try again later.",
    "memory_pressure": "`{model}` does not have enough free KV cache memory for this request; try again later.",
}
