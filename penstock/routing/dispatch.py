"""Which replica runs a request, and what becomes of the request when that replica fails it.

Each request is a `Flight`: when its replica dies, drains, stalls or fails it, another one goes on behind the tokens
that were delivered, and the reader sees nothing but a pause. Moving on from a replica that is gone, leaves or is stuck
costs no budget; trying again what a live replica refused or failed does (`RetryBudget`). A request under which
`attempts` replicas failed is given up: it may be what kills them. When no replica can take a request, it is parked for
up to `park_s`, or `resume_s` once it has begun.

A single replica is its own refuge: what it had when it died waits for it to be restarted. Choosing, measuring and
breakers mean nothing there and are left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.backends.base import Clock
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
from penstock.routing.flights import Flight, Leg
from penstock.routing.handover import HandoverPolicy, Handovers, generating
from penstock.routing.member import Member
from penstock.routing.policy import ReplicaPolicy, ReplicaRequest
from penstock.routing.retry_budget import RetryBudget

TICK_S = 0.05
"""How often parked requests are offered again."""
LOOK_S = 0.5
"""How often to look for replicas that have work and make no progress."""
MOST_PARKED = 1024
"""New requests that may wait for a replica; those that had one when it died wait besides."""
AT_ONCE = 128
"""Parked requests that are sent to a replica before anybody else has a turn."""

EXPECTED_OUTPUT = 256
"""Tokens that a request is expected to generate, if it may."""

log = logging.getLogger("penstock.routing")


@dataclass(frozen=True, slots=True)
class Resilience:
    """How hard to try."""

    attempts: int = 3
    """Replicas that may fail under a request before it is given up."""
    stall_s: float = 15.0
    """A replica with work that completes no step for this long is left."""
    park_s: float = 10.0
    """How long a request waits for a replica when there is none at the moment."""
    resume_s: float = 30.0
    """The same for one of which the reader has got something: it cannot be sent again, so it is worth more patience."""
    retry_share: float = 0.1
    """Retries and hedges, at most, as a share of requests."""
    hedge_s: float | None = None
    """A request without a token after this long is tried on a second replica too; None: never."""
    breaker: BreakerPolicy = BreakerPolicy()  # noqa: RUF009


@dataclass(slots=True)
class DispatchCounts:
    """What became of requests whose replica failed them."""

    failovers: int = 0
    """Went on elsewhere because their replica was gone, leaving or stuck."""
    retries: int = 0
    """Tried again after a live replica refused or failed them."""
    hedges: int = 0
    given_up: int = 0


class Dispatcher:
    """The requests of one model, on the replicas in `members` (which its owner may change)."""

    def __init__(
        self,
        name: str,
        members: Sequence[Member],
        resilience: Resilience,
        policy: ReplicaPolicy,
        clock: Clock,
        handover: HandoverPolicy | None = None,
    ) -> None:
        self.counts = DispatchCounts()
        self.budget = RetryBudget(resilience.retry_share)
        self._name = name
        self._members = members
        self._resilience = resilience
        self._policy = policy
        self._handovers = Handovers(handover or HandoverPolicy())
        self._clock = clock
        self._flights: dict[str, Flight] = {}
        self._parked: dict[str, Flight] = {}
        self._rescuer: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def parked(self) -> int:
        """Requests that wait for a replica."""
        return len(self._parked)

    def watch(self) -> None:
        """Look after the replicas, from now on."""
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
        """Begin a request; the name of its replica, or nothing when it waits for one."""
        self.budget.began()
        flight = Flight(request, inbox, index, self._clock())
        self._flights[flight.id] = flight
        try:
            name = self._launch(flight, first=True).name
        except EngineUnavailable:
            if not request.patient or len(self._parked) >= MOST_PARKED:
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

    def abort(self, request_id: str) -> bool:
        """Stop a request; whether there was one. What its replica still says of it, to the last delta, is delivered."""
        flight = self._flights.get(request_id)
        if flight is None or flight.stopping:
            return flight is not None
        flight.stop_hedging()
        self._parked.pop(flight.id, None)
        for other in flight.legs[1:]:
            self._end(other, abort=True)
        del flight.legs[1:]
        if not flight.legs:
            del self._flights[flight.id]
            return True
        flight.stopping = True
        flight.legs[0].member.backend.abort(flight.id)
        return True

    def holds(self, request_id: str) -> bool:
        return request_id in self._flights

    def _launch(self, flight: Flight, besides: Sequence[Member] = (), *, first: bool = False) -> Member:
        """Send a flight to the best replica that takes it; raises what the last one said when none does."""
        now = self._clock()
        request = flight.rest(now)
        expected = min(request.params.max_tokens - len(request.produced), EXPECTED_OUTPUT)
        alone = len(self._members) == 1
        if alone and first:
            # Without a choice the engine itself says what stands against it. What goes on waits until it is as it was.
            able = [member for member in self._members if member.backend.ready]
        elif alone:
            able = [member for member in self._members if member not in besides and member.can_run(request)]
        else:
            able = [member for member in self._members if member not in besides and member.takes(request)]
            able = list(generating(able))
        refusal: ApiError | None = None
        while able:
            member = able.pop(0 if alone else self._choose(request, able, expected, now))
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
            return member
        raise refusal or EngineUnavailable("No replica of this model can take this request now; try again.")

    def _choose(self, request: Request, able: Sequence[Member], expected: int, now: float) -> int:
        """Also where there is no choice: the policy remembers which prefixes are where."""
        info = able[0].backend.info
        wanted = ReplicaRequest.of(
            request,
            info.block_size if info is not None else 16,
            expected_output=expected,
            wants_blocks=self._policy.wants_blocks,
            session=request.affinity,
            tenant=request.cache_salt,
        )
        return self._policy.choose(wanted, [member.view(now) for member in able])

    def _drop(self, flight: Flight) -> None:
        """Take a flight off every replica."""
        flight.stop_hedging()
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
        if flight.begun and delta.finish_reason is None:  # as nearly all of them
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
            flight.stop_hedging()
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
        """A replica failed a flight: go on elsewhere, if that can help."""
        flight, member = leg.flight, leg.member
        if leg not in flight.legs:
            return
        flight.legs.remove(leg)
        self._end(leg, abort=False)
        if flight.legs:
            return  # its hedge still runs
        if flight.stopping:
            del self._flights[flight.id]
            flight.deliver(Delta(flight.id, finish_reason="abort"))
            return
        if not self._may_go_on(flight, member, error):
            self._fail(flight, error)
            return
        try:
            to = self._launch(flight, besides=(member,)).name
        except ApiError:
            if not (flight.begun or flight.request.patient):
                self._fail(flight, error)
                return
            self._park(flight)
            to = ""
        log.info(
            "request goes on elsewhere",
            extra={
                "model": self._name,
                "engine_request_id": flight.id,
                "from_replica": member.name,
                "to_replica": to or "none yet",
                "tokens": len(flight.produced),
                "why": str(error),
            },
        )

    def _may_go_on(self, flight: Flight, member: Member, error: Exception) -> bool:
        """Whether another replica may do better, or this one when it is back. What is wrong with the request is wrong
        everywhere, and what a single replica refuses or fails is not tried on it again."""
        others = len(self._members) > 1
        if isinstance(error, Draining):
            self.counts.failovers += 1
            return True
        if isinstance(error, Overloaded | ModelAsleep):
            return others and self._retry()
        if isinstance(error, EngineUnavailable):
            flight.losses += 1
            if member.lost():
                self._policy.forget(member.name)
            self.counts.failovers += flight.losses < self._resilience.attempts
            return flight.losses < self._resilience.attempts
        if isinstance(error, ServerError):
            flight.losses += 1
            member.breaker.failed()
            return others and flight.losses < self._resilience.attempts and self._retry()
        return False

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
        """Offer parked flights to whatever replica comes up."""
        while self._parked:
            await asyncio.sleep(TICK_S)
            for count, flight in enumerate(list(self._parked.values()), 1):
                if flight.id in self._parked:  # it may have been aborted while others had their turn
                    self._offer(flight)
                if count % AT_ONCE == 0:
                    await asyncio.sleep(0)

    def _offer(self, flight: Flight) -> None:
        """Send a parked flight to a replica, if one takes it now; give it up when it has waited too long."""
        refusal: ApiError = EngineUnavailable("No replica of this model is up; try again.")
        if any(member.backend.ready for member in self._members):
            try:
                self._launch(flight)
            except ApiError as error:
                refusal = error
            else:
                del self._parked[flight.id]
                return
        patience = self._resilience.resume_s if flight.begun else self._resilience.park_s
        if self._clock() - flight.parked_at <= patience:
            return
        if flight.losses:
            refusal = EngineLost(
                f"The engine stopped while running this request and did not come back within {patience:g} s; try again."
            )
        self._fail(flight, refusal)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for member in self._members:
                if member.stuck and member.legs and self._refuge(member):
                    self._leave(member)

    def _refuge(self, member: Member) -> bool:
        """Whether another replica could take over; without one, a slow replica is better than none."""
        request = next(iter(member.legs.values())).flight.request
        return any(other is not member and other.takes(request) for other in self._members)

    def _leave(self, member: Member) -> None:
        """A replica has work and makes no progress: its requests go on elsewhere, and it gets no new ones."""
        legs = list(member.legs.values())
        log.warning("replica is stuck", extra={"model": self._name, "replica": member.name, "requests": len(legs)})
        member.breaker.trip()
        for leg in legs:
            member.backend.abort(leg.flight.id)
            leg.fail(EngineLost("The engine made no progress on this request; try again."))

    def _hedge(self, flight: Flight) -> None:
        """No token yet: ask a second replica for the same, if the budget allows it."""
        flight.hedge = None
        running = [leg.member for leg in flight.legs]
        if not running or not any(m not in running and m.takes(flight.request) for m in self._members):
            return
        if self.budget.take():
            try:
                self._launch(flight, besides=running)
            except ApiError as error:
                log.debug("not hedged", extra={"engine_request_id": flight.id, "why": error.message})
            else:
                self.counts.hedges += 1
