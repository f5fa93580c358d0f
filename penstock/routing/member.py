"""One replica of a set: its backend, its breaker and the requests on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.backends.base import Backend, EngineClient
from penstock.engine.config import Role
from penstock.engine.request import Request
from penstock.protocol.messages import Placement
from penstock.routing.breaker import Breaker, BreakerPolicy
from penstock.routing.flights import Leg
from penstock.routing.meter import ReplicaMeter
from penstock.routing.place import NOWHERE, ReplicaPlace
from penstock.routing.policy import ReplicaRequest, ReplicaView


class Member:
    """A replica. It takes requests while it is up and awake, is not stuck, and its breaker is not open."""

    __slots__ = ("_lost", "_stall_s", "backend", "breaker", "legs", "meter", "place", "retiring", "stated_place")

    def __init__(self, backend: Backend, breaker: BreakerPolicy, stall_s: float, clock: Callable[[], float]) -> None:
        self.backend = backend
        self.stated_place: ReplicaPlace = NOWHERE
        """What its endpoint or its fleet says; `place` also has what the labels of pool and model say."""
        self.place: ReplicaPlace = NOWHERE
        self.breaker = Breaker(breaker, clock)
        self.meter = ReplicaMeter()
        self._stall_s = stall_s
        self._lost = ""
        self.legs: dict[str, Leg] = {}
        self.retiring = False
        """It is leaving the set and takes no new requests."""

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def role(self) -> Role:
        info = self.backend.info
        return "both" if info is None else info.role

    @property
    def round_trip_s(self) -> float | None:
        """Measured; None: not known, or on this machine."""
        return self.backend.round_trip.seconds if isinstance(self.backend, EngineClient) else None

    @property
    def tells_begun(self) -> bool:
        """Whether its engine says when it begins to compute a prompt (`Leg.computing`)."""
        return isinstance(self.backend, EngineClient) and self.backend.tells_begun

    def begun(self, request_ids: Iterable[str]) -> None:
        """Its engine has begun to compute the prompts of these requests."""
        for request_id in request_ids:
            if (leg := self.legs.get(request_id)) is not None:
                leg.computing = True

    @property
    def works(self) -> bool:
        """Whether it takes requests at all."""
        return not self.retiring and self.backend.ready and self.breaker.allows and not self.stuck

    def may_run(self, request: Request) -> bool:
        """Whether its pool and its region are among those that the request may run in."""
        place = self.place
        if request.pools and place.pool not in request.pools:
            return False
        return not request.regions or place.region in request.regions

    @property
    def stuck(self) -> bool:
        return self.backend.ready and self.backend.stalled_s > self._stall_s

    def takes(self, request: Request) -> bool:
        """Whether the request can be sent to it now."""
        return not self.retiring and not self.stuck and self.breaker.allows and self.can_run(request)

    def can_run(self, request: Request) -> bool:
        """Whether the engine is up, awake and has the adapter, where the request may run."""
        backend = self.backend
        if not backend.ready or backend.state != "awake" or not self.may_run(request):
            return False
        return not request.adapter or backend.adapters is None or request.adapter in backend.adapters

    def keeps_pace(self, request: Request, now: float) -> bool:
        """Whether its tokens come as fast as the request wants them, as far as that is known. One that has begun does
        not stop for it. Gaps that were longer only because of prompts are no obstacle: beside this request the engine
        computes prompts for as long as the target leaves, or as long as the step takes without them (`engine.pace`)."""
        target = request.target_gap_s
        if target is None or request.produced or not isinstance(self.backend, EngineClient):
            return True
        gap = self.backend.token_gap.seconds(now)
        return gap is None or gap <= target or 0.0 < 2.0 * self.backend.load.decode_s <= target

    def view(self, now: float) -> ReplicaView:
        """The snapshot for a replica policy."""
        away = self.round_trip_s or 0.0
        return self.meter.view(self.name, self.backend.load, self.backend.info, now, round_trip_s=away)

    def tell_placement(self, request: ReplicaRequest) -> None:
        """Tells other gateways, through the engine, that the request was sent to it."""
        if isinstance(self.backend, EngineClient) and (request.blocks or request.session):
            self.backend.tell_placement(Placement(b"".join(request.blocks), request.tenant, request.session))

    def lost(self) -> bool:
        """Reports that the replica died under a request. Counts as one failure per instance, however many requests it
        had; returns whether this is the first report."""
        instance = self.backend.info.instance if self.backend.info is not None else ""
        first = instance != self._lost or not instance
        if first:
            self._lost = instance
            self.breaker.failed()
        return first
