"""Sends each request to a replica and moves it to another one when that replica fails.

Each request is a `Flight`. When its replica dies, drains, stalls or fails the request, another replica continues after
the tokens already delivered, and the client only sees a pause. Failing over from a replica that is gone, draining or
stuck costs no budget; retrying a request that a live replica refused or failed does (`RetryBudget`). A request under
which `attempts` replicas failed is given up, because it may be what kills them. When no replica can take a request, it
is parked for up to `park_s` (or what its client allows, if that is less), or `resume_s` once tokens were delivered.

A request whose client sets a limit (`Request.patience_s`) is refused in time unless an engine has begun to compute its
prompt. Engines check this between their steps; a timer here checks it where a step takes long, or an engine is stuck.

With a single replica, its requests wait until it has been restarted and then continue there. Replica choice, metering
and breakers have no purpose in that case and are skipped.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from penstock.backends.base import Clock
from penstock.backends.errors import waited_too_long
from penstock.backends.mailbox import DeltaSink
from penstock.engine.request import Delta, Request
from penstock.protocol.errors import (
    ApiError,
    Draining,
    EngineLost,
    EngineUnavailable,
    ModelAsleep,
    Overloaded,
    ServerError,
)
from penstock.routing.breaker import BreakerPolicy
from penstock.routing.flights import PROBE_PRIORITY, Flight, Leg
from penstock.routing.handover import HandoverPolicy, Handovers
from penstock.routing.member import Member
from penstock.routing.policy import ReplicaPolicy
from penstock.routing.regions import RegionChoice
from penstock.routing.replica_order import ReplicaOrder
from penstock.routing.retry_budget import RetryBudget

TICK_S = 0.05
"""How often parked requests are offered to the replicas again."""
LOOK_S = 0.5
"""How often replicas are checked for being stuck: work, but no progress."""
MOST_PARKED = 1024
"""New requests that may be parked; requests that lost their replica are parked in addition."""
NOTICE_S = 0.05
"""How long an engine has, beyond the round trip, to say that it begins with a request or refuses it. What it can begin
at once is not refused for a limit that has just passed."""
READ_S = 0.001
"""Enough for the event loop to read what has arrived."""
AT_ONCE = 128
"""Parked requests sent in a row before the event loop may run other work."""

EXPECTED_OUTPUT = 256
"""Tokens that a request is expected to generate, unless its own limit is lower."""

log = logging.getLogger("penstock.routing")


@dataclass(frozen=True, slots=True)
class Resilience:
    """How failures of replicas are handled."""

    attempts: int = 3
    """Replicas that may fail under a request before it is given up."""
    stall_s: float = 15.0
    """A replica that has work but completes no step for this long is stuck."""
    park_s: float = 10.0
    """How long a request waits when no replica can take it."""
    resume_s: float = 30.0
    """The same once tokens were delivered: the client cannot send such a request again, so it waits longer."""
    retry_share: float = 0.1
    """Maximum of retries and hedges, as a share of requests."""
    hedge_s: float | None = None
    """A request without a token after this long is also sent to a second replica; None: never."""
    breaker: BreakerPolicy = BreakerPolicy()  # noqa: RUF009


@dataclass(slots=True)
class DispatchCounts:
    """Outcomes of requests whose replica failed."""

    failovers: int = 0
    """Continued on another replica because theirs was gone, draining or stuck."""
    retries: int = 0
    """Sent again after a live replica refused or failed them."""
    hedges: int = 0
    given_up: int = 0


class Dispatcher:
    """Runs the requests of one model on the replicas in `members`, a list that its owner may change."""

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        resilience: Resilience,
        policy: ReplicaPolicy,
        clock: Clock,
        handover: HandoverPolicy | None = None,
        shared: bool = False,
        regions: RegionChoice | None = None,
    ) -> None:
        """`shared`: other gateways send requests to these replicas too, and are told what goes where."""
        self.counts = DispatchCounts()
        self.order = ReplicaOrder(policy, regions or RegionChoice())
        self.budget = RetryBudget(resilience.retry_share)
        self._name = name
        self._members = members
        self._resilience = resilience
        self._handovers = Handovers(handover or HandoverPolicy())
        self._clock = clock
        self._shared = shared
        self._flights: dict[str, Flight] = {}
        self._started = 0
        """Requests so far, without probes; one with several answers counts once."""
        self._pool_started: Counter[str] = Counter()
        """The same, by the pool in which each was let in."""
        self._parked: dict[str, Flight] = {}
        self._rescuer: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def parked(self) -> int:
        """Number of requests that wait for a replica."""
        return len(self._parked)

    def progress(self) -> tuple[int, int]:
        """Requests that have ended so far, and sequences that are in the engines now; probes do not count."""
        real = [flight for flight in self._flights.values() if flight.request.priority != PROBE_PRIORITY]
        return self._started - sum(not flight.index for flight in real), len(real) - len(self._parked)

    def pool_progress(self, pool: str) -> tuple[int, int, int, int]:
        """Requests that were let into a pool so far, those of them that have ended, sequences that are in the engines
        now, and requests that wait for a replica of the pool."""
        real = [
            flight
            for flight in self._flights.values()
            if flight.request.pools[:1] == (pool,) and flight.request.priority != PROBE_PRIORITY
        ]
        parked = sum(flight.id in self._parked for flight in real)
        started = self._pool_started[pool]
        return started, started - sum(not flight.index for flight in real), len(real) - parked, parked

    def change(self, handover: HandoverPolicy) -> None:
        """Another policy from now on."""
        self._handovers.policy = handover

    def watch(self) -> None:
        """Starts checking for stuck replicas."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._look(), name=f"replicas of {self._name}")

    async def close(self) -> None:
        tasks = [task for task in (self._watcher, self._rescuer) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for flight in list(self._flights.values()):
            self._fail(flight, EngineLost("The gateway is closing its connection to the engine."))

    def submit(self, request: Request, inbox: DeltaSink, index: int) -> str:
        """Starts a request. Returns the name of its replica, or "" when it is parked."""
        self.budget.began()
        flight = Flight(request, inbox, index, self._clock())
        self._flights[flight.id] = flight
        if not index and request.priority != PROBE_PRIORITY:
            self._started += 1
            if request.pools:
                self._pool_started[request.pools[0]] += 1
        try:
            name = self._launch(flight, first=True).name
        except EngineUnavailable:
            if not (request.patient or inbox.committed) or len(self._parked) >= MOST_PARKED:
                del self._flights[flight.id]
                raise
            self._park(flight)
            return ""
        except ApiError:
            del self._flights[flight.id]
            raise
        if self._resilience.hedge_s is not None:
            loop = asyncio.get_running_loop()
            flight.hedge = loop.call_later(self._resilience.hedge_s, self._hedge, flight)
        return name

    def abort(self, request_id: str, *, resumable: bool = False) -> bool:
        """Aborts a request; False if it is unknown. Deltas that its replica still sends, up to the final one, are
        delivered. `resumable`: see `Backend.abort`."""
        flight = self._flights.get(request_id)
        if flight is None or flight.stopping:
            return flight is not None
        flight.stop_timers()
        self._parked.pop(flight.id, None)
        for other in flight.legs[1:]:
            self._end(other, abort=True)
        del flight.legs[1:]
        if not flight.legs:
            del self._flights[flight.id]
            return True
        flight.stopping = True
        flight.legs[0].member.backend.abort(flight.id, resumable=resumable)
        return True

    def holds(self, request_id: str) -> bool:
        return request_id in self._flights

    def _launch(self, flight: Flight, besides: Sequence[Member] = (), *, first: bool = False) -> Member:
        """Sends a flight to the best replica that accepts it; raises the last refusal when none does."""
        now = self._clock()
        request = flight.rest(now)
        expected = min(request.params.max_tokens - len(request.produced), EXPECTED_OUTPUT)
        alone = len(self._members) == 1
        if alone and first:
            # With one replica the engine itself refuses what it cannot run. A resumed request waits until it can.
            able = [member for member in self._members if member.backend.ready and member.may_run(request)]
        elif alone:
            able = [member for member in self._members if member not in besides and member.can_run(request)]
        else:
            able = [member for member in self._members if member not in besides and member.takes(request)]
        if able and not (quick := [member for member in able if member.keeps_pace(request, now)]):
            raise Overloaded(
                "Every replica takes longer per token than `x-slo-tpot-ms` allows; try again later.",
                reason="slo_tpot",
                retry_after=1.0,
            )
        able = quick if able else able
        refusal: ApiError | None = None
        wanted = None if alone or not able else self.order.wanted(request, able[0], expected)
        for member in self.order.of(request, able, wanted, now):
            leg = Leg(flight, member, self._on_delta, self._on_failure, metered=not alone)
            sent = request if alone else self._handovers.arrange(request, leg, self._members, now)
            try:
                member.backend.submit(sent, leg, flight.index)
            except ApiError as error:
                leg.helped(now)
                refusal = error
                continue
            flight.legs.append(leg)
            flight.resumed = flight.begun
            member.legs[flight.id] = leg
            if not alone:
                member.breaker.began()
                member.meter.sent(flight.id, len(request.prompt) + len(request.produced), expected, now)
            if self._shared and wanted is not None:
                member.tell_placement(wanted)
            self._limit_wait(flight)
            return member
        raise refusal or _unavailable(request)

    def _drop(self, flight: Flight) -> None:
        """Removes a flight from every replica."""
        flight.stop_timers()
        self._parked.pop(flight.id, None)
        legs, flight.legs = flight.legs, []
        for leg in legs:
            self._end(leg, abort=True)

    def _end(self, leg: Leg, *, abort: bool) -> None:
        leg.helped(self._clock())
        leg.member.legs.pop(leg.flight.id, None)
        if leg.metered:
            leg.member.meter.ended(leg.flight.id, self._clock())
        if abort:
            leg.member.backend.abort(leg.flight.id)

    def _on_delta(self, leg: Leg, delta: Delta) -> None:
        flight = leg.flight
        if leg not in flight.legs:
            return
        if flight.begun and delta.finish_reason is None:  # the fast path: nearly every delta
            if leg.metered:
                leg.member.meter.received(delta, self._clock())
            flight.deliver(delta)
            return
        if delta.finish_reason == "abort" and not flight.stopping:
            self._on_failure(leg, EngineLost("The engine gave up this request; try again."))
            return
        if leg.metered:
            leg.member.meter.received(delta, self._clock())
        if not flight.begun:
            leg.helped(self._clock())
            flight.stop_timers()
            for other in flight.legs:
                if other is not leg:
                    self._end(other, abort=True)
            flight.legs = [leg]
            if delta.tokens:
                leg.member.breaker.succeeded()
        if delta.finish_reason is not None:
            self._end(leg, abort=False)
            flight.legs = []
            del self._flights[flight.id]
        flight.deliver(delta)

    def _on_failure(self, leg: Leg, error: Exception) -> None:
        """A replica failed a flight: continue on another one, if that can help."""
        flight, member = leg.flight, leg.member
        if leg not in flight.legs:
            return
        flight.legs.remove(leg)
        self._end(leg, abort=False)
        if isinstance(error, EngineLost):
            member.meter.forget_speed()
        if flight.legs:
            self._limit_wait(flight)
            return  # its hedge still runs
        if flight.stopping:
            del self._flights[flight.id]
            flight.deliver(Delta(flight.id, finish_reason="abort"))
            return
        if not self._can_continue(flight, member, error):
            self._fail(flight, error)
            return
        try:
            to = self._launch(flight, besides=(member,)).name
        except ApiError:
            if not (flight.begun or flight.request.patient or flight.inbox.committed):
                self._fail(flight, error)
                return
            self._park(flight)
            to = ""
        log.info(
            "request moved to another replica",
            extra={
                "model": self._name,
                "engine_request_id": flight.id,
                "from_replica": member.name,
                "to_replica": to or "none yet",
                "tokens": len(flight.produced),
                "why": str(error),
            },
        )

    def _can_continue(self, flight: Flight, member: Member, error: Exception) -> bool:
        """Whether the request can continue on another replica, or on this one after a restart. An invalid request is
        invalid everywhere, and a single replica is not asked twice for what it refused or failed."""
        others = len(self._members) > 1
        if isinstance(error, Draining):
            self.counts.failovers += 1
            return True
        if isinstance(error, Overloaded | ModelAsleep):
            return others and not flight.impatient(self._clock()) and self._retry()
        if isinstance(error, EngineUnavailable):
            flight.losses += 1
            if member.lost():
                self.order.forget(member.name)
            self.counts.failovers += flight.losses < self._resilience.attempts
            return flight.losses < self._resilience.attempts
        if isinstance(error, ServerError):
            flight.losses += 1
            member.breaker.failed()
            return others and flight.losses < self._resilience.attempts and self._retry()
        return False

    def _limit_wait(self, flight: Flight) -> None:
        """A replica has the flight: set the timer for the time that it may wait there."""
        left = flight.patience_left(self._clock())
        if left == math.inf or flight.begun or flight.alarm is not None:
            return
        away = max((leg.member.round_trip_s or 0.0 for leg in flight.legs), default=0.0)
        within = left + NOTICE_S + away
        flight.alarm = asyncio.get_running_loop().call_later(within, self._overdue, flight)

    def _overdue(self, flight: Flight, *, again: bool = False) -> None:
        """Refuses a flight that no engine has begun with in time. A parked one is given up by `_offer`."""
        flight.alarm = None
        if not flight.legs or flight.inbox.answered:
            return
        if not flight.impatient(self._clock()):
            self._limit_wait(flight)
        elif any(leg.computing or not leg.member.tells_begun for leg in flight.legs):
            return
        elif again:
            self._fail(flight, waited_too_long())
        else:  # a busy event loop runs timers before it reads what engines have told meanwhile
            flight.alarm = asyncio.get_running_loop().call_later(READ_S, partial(self._overdue, flight, again=True))

    def _retry(self) -> bool:
        allowed = self.budget.take()
        self.counts.retries += allowed
        return allowed

    def _fail(self, flight: Flight, error: Exception) -> None:
        self.counts.given_up += 1
        del self._flights[flight.id]
        self._drop(flight)
        flight.inbox.fail(error)

    def _park(self, flight: Flight) -> None:
        flight.parked_at = self._clock()
        self._parked[flight.id] = flight
        if self._rescuer is None or self._rescuer.done():
            self._rescuer = asyncio.create_task(self._rescue(), name=f"parked requests of {self._name}")

    async def _rescue(self) -> None:
        """Offers parked flights to the replicas until none is left."""
        while self._parked:
            await asyncio.sleep(TICK_S)
            for count, flight in enumerate(list(self._parked.values()), 1):
                if flight.id in self._parked:  # it may have been aborted in the meantime
                    self._offer(flight)
                if count % AT_ONCE == 0:
                    await asyncio.sleep(0)

    def _offer(self, flight: Flight) -> None:
        """Sends a parked flight to a replica if one accepts it; gives it up when it has waited too long."""
        refusal: ApiError = EngineUnavailable("No replica of this model is up; try again.")
        if any(member.backend.ready for member in self._members):
            try:
                self._launch(flight)
            except ApiError as error:
                refusal = error
            else:
                del self._parked[flight.id]
                return
        now = self._clock()
        patience = self._resilience.resume_s if flight.begun else self._resilience.park_s
        if flight.impatient(now):
            refusal = EngineUnavailable(
                "No replica of this model is up, and this request waits no longer; try again.", reason="queue_timeout"
            )
        elif now - flight.parked_at <= patience:
            return
        elif flight.losses:
            refusal = EngineLost(
                f"The engine stopped while running this request and did not restart within {patience:g} s; try again."
            )
        self._fail(flight, refusal)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.order.regions.seen({member.place.region for member in self._members if member.works}, self._clock())
            for member in self._members:
                if member.stuck and member.legs and self._has_alternative(member):
                    self._evacuate(member)

    def _has_alternative(self, member: Member) -> bool:
        """Whether another replica could take over; if not, a slow replica is better than none."""
        request = next(iter(member.legs.values())).flight.request
        return any(other is not member and other.takes(request) for other in self._members)

    def _evacuate(self, member: Member) -> None:
        """Moves the requests of a stuck replica to others and sends it no new ones."""
        legs = list(member.legs.values())
        log.warning(
            "replica is stuck: it has work but completes no step; its requests move to other replicas",
            extra={"model": self._name, "replica": member.name, "requests": len(legs)},
        )
        member.breaker.trip()
        for leg in legs:
            member.backend.abort(leg.flight.id)
            leg.fail(EngineLost("The engine made no progress on this request; try again."))

    def _hedge(self, flight: Flight) -> None:
        """No token yet: send the request to a second replica too, if the retry budget allows it."""
        flight.hedge = None
        running = [leg.member for leg in flight.legs]
        if not running or not any(m not in running and m.takes(flight.request) for m in self._members):
            return
        if self.budget.take():
            try:
                self._launch(flight, besides=running)
            except ApiError as error:
                log.debug("request not hedged", extra={"engine_request_id": flight.id, "why": error.message})
            else:
                self.counts.hedges += 1


def _unavailable(request: Request) -> EngineUnavailable:
    """The error of a request that no replica can take."""
    where = [f"pool {' or '.join(request.pools)}"] if request.pools else []
    where += [f"region {' or '.join(request.regions)}"] if request.regions else []
    limited = f" in {', '.join(where)}" if where else ""
    return EngineUnavailable(f"No replica of this model{limited} can take this request now; try again.")
