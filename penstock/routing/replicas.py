"""Several replicas of one model behind the `Backend` interface.

Owns the membership: replicas join and leave while the set runs. `Dispatcher` sends each request to one of them, and to
another when that one fails. Operations on the model (sleep, wake, adapters) run on every replica that is up.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from penstock.backends.base import Backend, Clock, EngineClient, deltas_of, monotonic
from penstock.backends.mailbox import DeltaSink
from penstock.engine.adapters.spec import AdapterSpec, AdapterStatus
from penstock.engine.request import Delta, EngineInfo, EngineLoad, EngineState, Request
from penstock.identity.labels import REGION, Demand, Requirement
from penstock.protocol.errors import ApiError, EngineUnavailable
from penstock.protocol.messages import Claimed, Erased, Placement, Produced
from penstock.routing.dispatch import TICK_S, Dispatcher, Resilience
from penstock.routing.handover import HandoverPolicy
from penstock.routing.hold import HoldLimits, HoldQueue
from penstock.routing.loads import total_load
from penstock.routing.member import Member
from penstock.routing.place import NOWHERE, ReplicaPlace
from penstock.routing.placement import Placer
from penstock.routing.policies import Predicted
from penstock.routing.policy import ReplicaPolicy
from penstock.routing.regions import RegionChoice

EQUIP_S = 1.0
"""How often replicas are checked for missing adapters."""

log = logging.getLogger("penstock.routing")
T = TypeVar("T")


class ReplicaSet:
    """A `Backend` made of replicas."""

    def __init__(
        self,
        name: str,
        replicas: Sequence[Backend],
        *,
        resilience: Resilience | None = None,
        policy: ReplicaPolicy | None = None,
        handover: HandoverPolicy | None = None,
        hold: HoldLimits | None = None,
        places: Mapping[str, ReplicaPlace] | None = None,
        placer: Placer | None = None,
        regions: RegionChoice | None = None,
        clock: Clock = monotonic,
        shared: bool = False,
    ) -> None:
        """`hold`: the set may be empty, and requests then wait for its first replica. `places`: where the replicas are,
        by name. `placer`: the rules for where requests may run. `shared`: other gateways use these replicas too."""
        self.name = name
        self.placer = placer or Placer()
        self._resilience = resilience or Resilience()
        self._clock = clock
        self._members: list[Member] = []
        self._places: set[tuple[str, str]] = set()
        """Pool and stated region of every replica so far: one that is away may come back."""
        policy = policy or Predicted()
        self.dispatcher = Dispatcher(name, self._members, self._resilience, policy, clock, handover, shared, regions)
        places = places or {}
        self._members += [self._member(backend, places.get(backend.name, NOWHERE)) for backend in replicas]
        self.hold = None if hold is None else HoldQueue(name, hold, clock)
        self.arrived = 0
        """Requests that asked for a replica so far."""
        self._last_info: EngineInfo | None = None
        self._started = False
        self._leaving: set[asyncio.Task[None]] = set()
        self._loaded: dict[str, AdapterSpec] = {}
        """Adapters loaded at run time: replicas that join or restart later get them too."""
        self._equipper: asyncio.Task[None] | None = None

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def members(self) -> Sequence[Member]:
        return self._members

    @property
    def replicas(self) -> Sequence[Backend]:
        return [member.backend for member in self._members]

    def place_of(self, replica: str) -> ReplicaPlace:
        """Where a replica is; `NOWHERE` when it is not known."""
        return next((member.place for member in self._members if member.name == replica), NOWHERE)

    def change(self, *, placer: Placer, handover: HandoverPolicy, hold: HoldLimits | None) -> None:
        """Other settings from now on."""
        self.placer = placer
        for member in self._members:
            self.move(member, member.stated_place)
        self.dispatcher.change(handover)
        if hold is None:
            self.hold = None
        elif self.hold is None:
            self.hold = HoldQueue(self.name, hold, self._clock)
        else:
            self.hold.limits = hold

    async def start(self) -> None:
        self._started = True
        for member in self._members:
            await member.backend.start()
        if len(self._members) > 1:
            self.dispatcher.watch()

    async def close(self) -> None:
        tasks = [*self._leaving, *([self._equipper] if self._equipper is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.dispatcher.close()
        for member in self._members:
            await member.backend.close()

    async def join(self, backend: Backend, place: ReplicaPlace = NOWHERE) -> None:
        """Adds a replica."""
        pools = self.placer.pools
        if pools and place.pool not in pools:
            log.warning(
                "replica gets no requests: its pool is not one of the model's pools",
                extra={"model": self.name, "replica": backend.name, "pool": place.pool, "pools": ", ".join(pools)},
            )
        self._members.append(self._member(backend, place))
        if self._started:
            await backend.start()
            self.dispatcher.watch()

    def retire(self, name: str) -> None:
        """Removes a replica: it gets no new requests and leaves when those on it have ended or moved."""
        for member in self._members:
            if member.name == name and not member.retiring:
                member.retiring = True
                task = asyncio.create_task(self._remove_when_idle(member), name=f"retire {self.name}/{name}")
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    async def _remove_when_idle(self, member: Member) -> None:
        while member.backend.in_flight:  # noqa: ASYNC110 (requests end in many ways, none of which is an event)
            await asyncio.sleep(TICK_S)
        self._last_info = member.backend.info or self._last_info
        self._members.remove(member)
        if all(other.name != member.name for other in self._members):
            self.dispatcher.order.forget(member.name)
        await member.backend.close()

    def unmet(self, demand: Demand) -> list[Requirement]:
        """What of a demand none of its replicas meets, those that are away included."""
        # As long as no replica has joined, nobody knows their regions.
        return self.placer.unmet(demand if self._places else demand.without(REGION), self._places)

    def move(self, member: Member, place: ReplicaPlace) -> None:
        """A replica is where this says. If it states no region, that of its pool's or its model's labels counts."""
        self._places.add((place.pool, place.region))
        region = place.region or self.placer.labels_of(place.pool).get(REGION, "")
        member.stated_place, member.place = place, replace(place, region=region)

    def _member(self, backend: Backend, place: ReplicaPlace) -> Member:
        member = Member(backend, self._resilience.breaker, self._resilience.stall_s, self._clock)
        self.move(member, place)
        if isinstance(backend, EngineClient):
            backend.on_placement = partial(self._heard, member)
            backend.on_begun = member.begun
        return member

    def _heard(self, member: Member, placement: Placement) -> None:
        """Another gateway sent something to this replica."""
        self.dispatcher.order.heard(member, placement, self._clock())

    @property
    def info(self) -> EngineInfo | None:
        """The info of the replica with the smallest context window: what fits there fits everywhere. With pools, of the
        pool where that window is largest. Of an empty set, that of the last replica that left."""
        if len(self._members) == 1:
            return self._members[0].backend.info or self._last_info
        if self.placer.pools:
            return max(self._smallest().values(), key=lambda info: info.max_model_len, default=self._last_info)
        infos = [info for member in self._members if (info := member.backend.info) is not None]
        return min(infos, key=lambda info: info.max_model_len, default=self._last_info)

    def _smallest(self) -> dict[str, EngineInfo]:
        """By pool, the info of the replica with the smallest window."""
        found: dict[str, EngineInfo] = {}
        for member in self._members:
            info, pool = member.backend.info, member.place.pool
            if info is not None and (pool not in found or info.max_model_len < found[pool].max_model_len):
                found[pool] = info
        return found

    @property
    def windows(self) -> dict[str, int]:
        """The context window of each pool, as far as known."""
        return {pool: info.max_model_len for pool, info in self._smallest().items()}

    @property
    def ready(self) -> bool:
        return any(member.backend.ready for member in self._members)

    @property
    def load(self) -> EngineLoad:
        return total_load([member.backend.load for member in self._members])

    @property
    def stalled_s(self) -> float:
        """The smallest value of all replicas: as long as one makes progress, the model does."""
        return min((member.backend.stalled_s for member in self._members if member.backend.ready), default=0.0)

    @property
    def idle_s(self) -> float:
        return min((member.backend.idle_s for member in self._members), default=float("inf"))

    @property
    def in_flight(self) -> int:
        return sum(member.backend.in_flight for member in self._members) + self.dispatcher.parked

    @property
    def state(self) -> EngineState:
        states = [member.backend.state for member in self._members if member.backend.ready]
        return "awake" if "awake" in states or not states else states[0]

    async def wait_ready(self, within: float, *, at_most: float = math.inf) -> EngineInfo:
        self.arrived += 1
        if self.hold is not None:
            if self._staying_ready:
                self.hold.served()
            else:
                self.hold.wanted()
                if within > 0:
                    await self.hold.wait(lambda: self._staying_ready, at_most)
        within = min(within, at_most)
        staying = [member for member in self._members if not member.retiring]
        if len(staying) == 1:
            return await staying[0].backend.wait_ready(within)
        if not any(member.backend.ready for member in staying):
            await _first([member.backend.wait_ready(within) for member in staying])
        up = [member for member in staying if member.backend.ready]
        if not any(member.breaker.allows for member in up):
            raise EngineUnavailable(
                "Every replica of this model has been failing; try again shortly.",
                retry_after=min((member.breaker.opens_in_s for member in up), default=1.0),
            )
        info = self.info
        assert info is not None, "a replica that is up has reported its info"
        return info

    @property
    def _staying_ready(self) -> bool:
        return any(member.backend.ready and not member.retiring for member in self._members)

    @property
    def asleep(self) -> bool:
        """Whether it has no replica, and a request will start one."""
        return self.hold is not None and all(member.retiring for member in self._members)

    def submit(self, request: Request, mailbox: DeltaSink, index: int = 0) -> str:
        return self.dispatcher.submit(request, mailbox, index)

    def abort(self, request_id: str, *, resumable: bool = False) -> None:
        self.dispatcher.abort(request_id, resumable=resumable)

    def holds(self, request_id: str) -> bool:
        return self.dispatcher.holds(request_id)

    async def produced(self, charges: Sequence[str]) -> list[Produced]:
        """From every replica; one that continued a request counts the tokens of its predecessor too."""
        found = await asyncio.gather(*(member.backend.produced(charges) for member in self._members))
        return [entry for entries in found for entry in entries]

    async def claim(self, charge: str, request: Request) -> Claimed:
        """From the replica that ran it last; any can go on with it."""
        answers = await asyncio.gather(
            *(member.backend.claim(charge, request) for member in self._members), return_exceptions=True
        )
        known = [answer for answer in answers if isinstance(answer, Claimed)]
        # While one stops it, another may have the tokens of an earlier part.
        found = [answer for answer in known if answer.running] or [answer for answer in known if answer.found]
        return max(found, key=lambda answer: len(answer.tokens), default=Claimed(""))

    async def erase(self, owner: str) -> dict[str, Erased]:
        """On every replica, also on those that are not up, which say so."""
        answers = await asyncio.gather(*(member.backend.erase(owner) for member in self._members))
        found = {replica: erased for answer in answers for replica, erased in answer.items()}
        return found or {"": Erased("", error="no engine of this model runs")}

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        return deltas_of(self, request)

    async def sleep(self) -> None:
        await self._everywhere(lambda backend: backend.sleep())

    async def wake(self) -> None:
        await self._everywhere(lambda backend: backend.wake())

    @property
    def adapters(self) -> Mapping[str, AdapterStatus] | None:
        told = [adapters for member in self._members if (adapters := member.backend.adapters) is not None]
        if not told:
            return None
        return {name: status for adapters in reversed(told) for name, status in adapters.items()}

    async def load_adapter(self, spec: AdapterSpec) -> AdapterStatus:
        status = await self._everywhere(lambda backend: backend.load_adapter(spec))
        self._loaded[spec.name] = spec
        if self._equipper is None:
            self._equipper = asyncio.create_task(self._equip(), name=f"adapters of {self.name}")
        return status

    async def unload_adapter(self, name: str) -> None:
        self._loaded.pop(name, None)
        await self._everywhere(lambda backend: backend.unload_adapter(name), having=name)

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterStatus:
        if name in self._loaded:
            self._loaded[name] = replace(self._loaded[name], pinned=pinned)
        return await self._everywhere(lambda backend: backend.pin_adapter(name, pinned), having=name)

    async def _equip(self) -> None:
        """Loads run-time adapters on replicas that do not have them; one attempt per replica instance."""
        tried: set[tuple[str, str]] = set()
        while True:
            await asyncio.sleep(EQUIP_S)
            for backend in self.replicas:
                info, known = backend.info, backend.adapters
                if not backend.ready or info is None or known is None:
                    continue
                for name in self._loaded.keys() - known.keys():
                    if (info.instance, name) not in tried:
                        tried.add((info.instance, name))
                        await self._equip_one(backend, self._loaded[name])

    async def _equip_one(self, backend: Backend, spec: AdapterSpec) -> None:
        try:
            await backend.load_adapter(spec)
        except ApiError as error:
            about = {"model": self.name, "replica": backend.name, "adapter": spec.name, "why": error.message}
            log.warning("adapter could not be loaded on a replica that joined or restarted", extra=about)

    async def _everywhere(self, act: Callable[[Backend], Awaitable[T]], *, having: str | None = None) -> T:
        """Runs an operation on every replica that is up (and has the adapter `having`); returns the first result."""
        backends = [member.backend for member in self._members if member.backend.ready]
        if having is not None:
            backends = [backend for backend in backends if having in (backend.adapters or ())] or backends[:1]
        if not backends:
            raise EngineUnavailable("No replica of this model is up; try again.")
        results = await asyncio.gather(*(act(backend) for backend in backends), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        first = results[0]
        assert not isinstance(first, BaseException)
        return first


async def _first(waits: list[Awaitable[EngineInfo]]) -> None:
    """Waits until one of them succeeds; raises the last error when none does."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        failure: ApiError | None = None
        for done in asyncio.as_completed(tasks):
            try:
                await done
                return
            except ApiError as error:
                failure = error
        raise failure or EngineUnavailable("This model has no replica.")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
