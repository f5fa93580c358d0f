"""Admission to a model with pools: a queue per pool, and one per reservation of a pool.

A request runs in the first of its pools that has room for it at once. When none has, it waits in the first one that
does not refuse it, in the lane of its reservation and in that of everybody, whichever is free first; and while it
waits, it moves to another of its pools as soon as that has room, or when its own is down. So a full pool delays only
requests that may run nowhere else. With `admission.url` gateways share every lane, and reserved slots hold for all of
them together; otherwise each gateway counts for itself.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.config.routing import AdmissionConfig
from penstock.protocol.errors import Overloaded
from penstock.routing.admission.capacity import EngineCapacity
from penstock.routing.admission.controller import AdmissionController
from penstock.routing.admission.lanes import COMMON, LaneLoad, lanes_of
from penstock.routing.admission.memory import MemoryQueue
from penstock.routing.admission.queue import (
    CLASSES,
    AdmissionQueue,
    Capacity,
    Outcome,
    QueueEntry,
    ReadCapacity,
    cost_of,
)
from penstock.routing.admission.triage import AdmissionRequest
from penstock.routing.placement import PlacementFacts
from penstock.routing.registry import ServedModel
from penstock.routing.replicas import ReplicaSet
from penstock.telemetry.admission_metrics import AdmissionMetrics

LOOK_S = 0.25
"""How often a waiting request looks for room in its other pools."""


@dataclass(slots=True)
class _Place:
    """An entry in one lane."""

    pool: str
    lane: AdmissionController
    entry: QueueEntry
    outcome: asyncio.Future[Outcome]


class PoolLanes:
    """The lanes of one pool."""

    def __init__(
        self,
        model: ServedModel,
        backend: ReplicaSet,
        pool: str,
        config: AdmissionConfig,
        metrics: AdmissionMetrics,
        roll: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.reserves = backend.placer.reserves.get(pool, ())
        self.capacity = EngineCapacity(backend, config, None if config.url else self._held, pool)
        self.lanes: dict[str, AdmissionController] = {}
        for name in (COMMON, *(reserve.name for reserve in self.reserves)):
            queue = self._open(f"{model.name}/{pool}" + (f"/{name}" if name else ""), name, config)
            self.lanes[name] = AdmissionController(model, config, metrics, roll, queue)

    @property
    def common(self) -> AdmissionController:
        return self.lanes[COMMON]

    def loads(self) -> dict[str, LaneLoad]:
        """What each lane has, as far as known here."""
        found = {}
        for name, lane in self.lanes.items():
            state = lane.queue.state("", 0)
            found[name] = LaneLoad(state.in_flight, state.depth)
        return found

    def capacities(self) -> dict[str, Capacity]:
        """The capacity of each lane."""
        return lanes_of(self.capacity(), self.reserves, self.loads() if self.reserves else {})

    def _open(self, key: str, name: str, config: AdmissionConfig) -> tuple[AdmissionQueue, ReadCapacity]:
        def capacity() -> Capacity:
            return self.capacities()[name]

        if config.url:
            from penstock.routing.admission.redis import RedisQueue

            return RedisQueue(config.url, key, config, capacity), capacity
        return MemoryQueue(config, capacity), capacity

    def _held(self) -> tuple[int, int]:
        held = [lane.queue.held for lane in self.lanes.values() if isinstance(lane.queue, MemoryQueue)]
        return sum(slots for slots, _ in held), sum(tokens for _, tokens in held)


class PooledAdmission:
    """Admission to one model with pools."""

    def __init__(
        self,
        model: ServedModel,
        backend: ReplicaSet,
        config: AdmissionConfig,
        metrics: AdmissionMetrics,
        roll: Callable[[], float] = random.random,
    ) -> None:
        self.model = model.name
        self.config = config
        self._backend = backend
        self.pools = {pool: PoolLanes(model, backend, pool, config, metrics, roll) for pool in backend.placer.pools}
        self.spills: Counter[tuple[str, str]] = Counter()
        """Requests that were granted in another pool than that of their rule."""

    async def start(self) -> None:
        for lane in self._lanes():
            await lane.start()

    async def close(self) -> None:
        for lane in self._lanes():
            await lane.close()

    def _lanes(self) -> Iterator[AdmissionController]:
        for pool in self.pools.values():
            yield from pool.lanes.values()

    async def enter(self, request: AdmissionRequest) -> PoolTicket:
        """A ticket for the request; raises `Overloaded` when it can neither run nor wait."""
        ticket = PoolTicket(self, request)
        try:
            if not await ticket.seize():
                await ticket.queue_up()
        except BaseException:
            ticket.close()
            raise
        return ticket

    def works(self, pool: str, regions: tuple[str, ...]) -> bool:
        """Whether a replica of the pool can take such requests."""
        return any(
            member.place.pool == pool and member.works and (not regions or member.place.region in regions)
            for member in self._backend.members
        )

    def lanes(self, pool: str, facts: PlacementFacts) -> list[tuple[AdmissionController, Capacity]]:
        """The lanes of a pool that a request may use, its own first."""
        lanes, capacities = self.pools[pool], self.pools[pool].capacities()
        names = [COMMON]
        if lanes.reserves and (own := self._backend.placer.reserve_of(pool, facts)) is not None:
            names.insert(0, own)
        return [(lanes.lanes[name], capacities[name]) for name in names]

    def depths(self) -> tuple[int, int, int]:
        """Requests that wait, by class. Those that wait in two lanes are counted in that of everybody."""
        each = [pool.common.depths() for pool in self.pools.values()]
        return sum(d[0] for d in each), sum(d[1] for d in each), sum(d[2] for d in each)

    def rate(self) -> float:
        return sum(pool.common.rate() for pool in self.pools.values())

    def load(self) -> tuple[int, float, bool]:
        """Requests that wait, the longest predicted wait of a pool, and whether all gateways share the queues."""
        loads = [pool.common.load() for pool in self.pools.values()]
        return sum(load[0] for load in loads), max((load[1] for load in loads), default=0.0), bool(self.config.url)

    def most_waiting(self) -> int:
        return sum(pool.common.most_waiting() for pool in self.pools.values())

    def saturated(self) -> bool:
        """Whether best-effort callers should be sent to a smaller model: the pool of most requests, the first one,
        has too many."""
        return next(iter(self.pools.values())).common.saturated()


class PoolTicket:
    """A request's places in the queues of its pools and, once granted, its share of one pool's capacity."""

    def __init__(self, admission: PooledAdmission, request: AdmissionRequest) -> None:
        self._admission = admission
        self._request = request
        placement = request.placement
        self._facts = PlacementFacts(request.tenant, request.tier, CLASSES[request.rank])
        self._pools = placement.pools or tuple(admission.pools)
        self._regions = placement.regions
        self._arrived = time.monotonic()
        self._patience = 0.0
        self._places: list[_Place] = []
        self._granted_place: _Place | None = None
        self._error: Exception | None = None
        self._closed = False

    @property
    def granted(self) -> bool:
        return self._granted_place is not None

    @property
    def pool(self) -> str:
        """Where it may run, once granted."""
        return "" if self._granted_place is None else self._granted_place.pool

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools that it may run in: that of its grant first."""
        return tuple(dict.fromkeys((self.pool, *self._pools))) if self.granted else self._pools

    def _usable(self) -> tuple[str, ...]:
        """The pools that are up; the first one when none is."""
        up = tuple(pool for pool in self._pools if self._admission.works(pool, self._regions))
        return up or self._pools[:1]

    async def seize(self, *, besides: str = "") -> bool:
        """Takes room in the first pool that has some; False when none has."""
        for pool in self._usable():
            if pool == besides:
                continue
            for lane, capacity in self._admission.lanes(pool, self._facts):
                entry = replace(lane.assess(self._request, capacity).entry, arrived=self._arrived)
                if lane.free(entry, capacity):
                    await self._enter(pool, lane, entry, capacity)
                    if self._look():
                        return True
        return False

    async def queue_up(self) -> None:
        """Waits in the first pool that does not refuse it; raises `Overloaded` when all do."""
        refusals: list[Overloaded] = []
        for pool in self._usable():
            for lane, capacity in self._admission.lanes(pool, self._facts):
                assessed = lane.assess(self._request, capacity)
                self._patience = max(self._patience, assessed.patience)
                if any(place.lane is lane for place in self._places):
                    continue
                if capacity.strict and capacity.slots is not None and assessed.entry.slots > capacity.slots:
                    # It would block those behind it for slots that belong to others.
                    if lane is self._admission.pools[pool].common:
                        refusals.append(lane.refusal(assessed.entry, "load_shed"))
                elif assessed.refusal is None:
                    await self._enter(pool, lane, replace(assessed.entry, arrived=self._arrived), capacity)
                elif lane is self._admission.pools[pool].common:
                    assert assessed.refusal.reason is not None
                    refusals.append(lane.refusal(assessed.entry, assessed.refusal.reason, assessed.refusal.wait_s))
            if self._look() or self._places:
                return
        raise refusals[0]

    async def _enter(self, pool: str, lane: AdmissionController, entry: QueueEntry, capacity: Capacity) -> None:
        entry = replace(entry, id=f"{entry.id}@{pool}")
        self._places.append(_Place(pool, lane, entry, await lane.queue.enter(entry, capacity)))

    async def wait(self, within: float | None = None) -> bool:
        """See `Ticket.wait`."""
        until = None if within is None else time.monotonic() + within
        while True:
            if self._error is not None:
                raise self._error
            if self._look():
                return True
            now = time.monotonic()
            left = self._arrived + self._patience - now
            if left <= 0:
                place = self._places[0]
                self.close()
                raise place.lane.refusal(place.entry, "queue_timeout")
            if until is not None and now >= until:
                return False
            timeout = min(LOOK_S, left, left if until is None else until - now)
            await asyncio.wait(
                [place.outcome for place in self._places], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if self._error is None and not self._look():
                await self._elsewhere()

    async def _elsewhere(self) -> None:
        """Moves to another pool that has room; leaves one that is down for the queue of one that is not."""
        waits_in = self._places[0].pool
        if await self.seize(besides=waits_in):
            return
        if waits_in not in self._usable():
            left, self._places = self._places, []
            try:
                await self.queue_up()
            except Overloaded:  # nowhere better
                self._places = left
            else:
                _leave(left)

    def fail(self, error: Exception) -> None:
        """See `Ticket.fail`."""
        if not self.granted:
            self._error = error
            places = self._places
            self.close()
            for place in places:
                place.outcome.cancel()

    def close(self, fresh_tokens: int = 0, output_tokens: int = 0, sequences: int = 0) -> None:
        """See `Ticket.close`."""
        if self._closed:
            return
        self._closed = True
        place = self._granted_place
        if place is None:
            _leave(self._places)
            return
        place.lane.queue.release(place.entry.id, cost_of(fresh_tokens, output_tokens) if sequences else 0.0)
        if sequences:
            place.lane.answered(output_tokens / sequences)

    def _look(self) -> bool:
        """Whether it is granted; takes the first grant and gives up the other places."""
        if self.granted or self._closed:
            return self.granted
        dropped = [place for place in self._places if _settled(place) == "dropped"]
        for place in dropped:
            self._places.remove(place)
        granted = next((place for place in self._places if _settled(place) == "granted"), None)
        if granted is None:
            if dropped and not self._places:
                self._closed = True
                raise dropped[0].lane.refusal(dropped[0].entry, "queue_full")
            return False
        self._granted_place = granted
        _leave([place for place in self._places if place is not granted])
        granted.lane.waits[granted.entry.rank].observe(time.monotonic() - self._arrived)
        if granted.pool != self._pools[0]:
            self._admission.spills[self._pools[0], granted.pool] += 1
        return True


def _settled(place: _Place) -> Outcome | None:
    outcome = place.outcome
    return outcome.result() if outcome.done() and not outcome.cancelled() else None


def _leave(places: list[_Place]) -> None:
    for place in places:
        place.lane.queue.leave(place.entry.id)
