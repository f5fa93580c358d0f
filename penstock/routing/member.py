"""One replica of a set: its backend, its breaker and the requests on it."""

from __future__ import annotations

from collections.abc import Callable

from penstock.backends.base import Backend, EngineClient
from penstock.engine.config import Role
from penstock.engine.request import Request
from penstock.protocol.messages import Placement
from penstock.routing.breaker import Breaker, BreakerPolicy
from penstock.routing.flights import Leg
from penstock.routing.meter import ReplicaMeter
from penstock.routing.policy import ReplicaRequest, ReplicaView


class Member:
    """A replica. It takes requests while it is up and awake, is not stuck, and its breaker is not open."""

    __slots__ = ("_lost", "_stall_s", "backend", "breaker", "legs", "meter", "retiring")

    def __init__(self, backend: Backend, breaker: BreakerPolicy, stall_s: float, clock: Callable[[], float]) -> None:
        self.backend = backend
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
    def stuck(self) -> bool:
        return self.backend.ready and self.backend.stalled_s > self._stall_s

    def takes(self, request: Request) -> bool:
        """Whether the request can be sent to it now."""
        return not self.retiring and not self.stuck and self.breaker.allows and self.can_run(request)

    def can_run(self, request: Request) -> bool:
        """Whether the engine is up, awake and has the adapter."""
        backend = self.backend
        if not backend.ready or backend.state != "awake":
            return False
        return not request.adapter or backend.adapters is None or request.adapter in backend.adapters

    def view(self, now: float) -> ReplicaView:
        """The snapshot for a replica policy."""
        return self.meter.view(self.name, self.backend.load, self.backend.info, now)

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
