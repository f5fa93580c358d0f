"""The gateways of a simulated fleet: admission, replica choice and failover, with the code of the real ones.

`Triage` and `FairQueue` decide about admission, replica policies see what `ReplicaMeter` counted, both as in
`routing`; only sockets and futures are replaced by events. Each gateway has its own queue, meters and policy, as with
an admission queue in memory; clients take gateways in turn. Invariant: every job that arrives ends exactly once.

A view of a replica is taken anew when the replica's batch has changed, when something was sent there, or after
`view_age_s` of mere decoding, in which little changes; a real gateway's is as old as the replica's last step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.config.routing import AdmissionConfig
from penstock.protocol.errors import EngineUnavailable
from penstock.routing.admission.capacity import EngineTotals, capacity_of
from penstock.routing.admission.decision import fits
from penstock.routing.admission.fair_queue import Changes, FairQueue
from penstock.routing.admission.memory import LOOK_S
from penstock.routing.admission.prefix_sketch import LENGTHS, PrefixSketch
from penstock.routing.admission.queue import Capacity, QueueEntry, QueueState, cost_of, max_waiting
from penstock.routing.admission.triage import AdmissionRequest, Triage
from penstock.routing.dispatch import EXPECTED_OUTPUT, MOST_PARKED, Resilience
from penstock.routing.hold import HoldLimits, HoldQueue
from penstock.routing.meter import ReplicaMeter
from penstock.routing.placement import Placer
from penstock.routing.policies import make_policy
from penstock.routing.policy import MAX_BLOCKS, ReplicaRequest, ReplicaView
from penstock.simulation.events import Events
from penstock.simulation.job import Job
from penstock.simulation.record import Record, Status
from penstock.simulation.replica import Replica


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """How requests get to replicas."""

    policy: str = "predicted"
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    resilience: Resilience = field(default_factory=Resilience)
    """Of which `attempts`, `park_s` and `resume_s` count here."""
    gateways: int = 1
    share_prefixes: bool = False
    """Whether tenants share cached prefixes."""
    hold: HoldLimits | None = None
    """With scale to zero: how long requests wait for the first replica, and how many."""
    placer: Placer = field(default_factory=Placer)
    """The rules for pools, where the fleet has some."""
    tiers: Mapping[str, str] = field(default_factory=dict)
    """Tier of each tenant, for those rules."""
    hop_s: float = 0.001
    """From the gateway's decision to the engine's queue."""
    view_age_s: float = 1.0


class Fleet(Protocol):
    """What gateways know of the fleet."""

    ready: list[Replica]
    """Replicas that take requests."""
    totals: EngineTotals
    """Of those, as of their last steps."""

    @property
    def present(self) -> int:
        """Replicas that are ready or starting."""
        ...

    @property
    def cold_start_s(self) -> float: ...


class _Member:
    """A replica as one gateway sees it."""

    __slots__ = ("meter", "replica", "stale", "viewed")

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.meter = ReplicaMeter()
        self.stale = True
        self.viewed = 0.0

    def view(self, now: float) -> ReplicaView:
        self.replica.progress()
        self.stale, self.viewed = False, now
        return self.meter.view(self.replica.name, self.replica.load, self.replica.info, now)


class Gateway:
    """One gateway."""

    def __init__(
        self,
        name: str,
        spec: GatewaySpec,
        fleet: Fleet,
        events: Events,
        record: Record,
        rng: random.Random,
        ended: Callable[[Job, Status, str, float | None], None],
    ) -> None:
        """`ended` hears of every job that is over."""
        self.name = name
        self._spec = spec
        self._rules = spec.admission
        self._fleet = fleet
        self._events = events
        self._record = record
        self._ended = ended
        self._policy = make_policy(spec.policy, random.Random(rng.random()))
        self._triage = Triage(spec.admission, rng.random)
        self._sketch = PrefixSketch()
        self._queue = FairQueue(spec.admission.order, spec.admission.ageing_s)
        self._members: dict[Replica, _Member] = {}
        self._able: list[_Member] = []
        self._views: list[ReplicaView] = []
        self._waiting: dict[str, Job] = {}
        self._parked: dict[str, Job] = {}
        self._held: dict[str, Job] = {}
        self._hold = HoldQueue("it", spec.hold or HoldLimits(), lambda: events.now)
        self._hold.cold_start_s = fleet.cold_start_s
        self._wanted = False
        """Whether a request has found no replica since the last one left."""
        self._hold.on_wanted = self._want
        self._looking = False

    @property
    def queued(self) -> int:
        """Requests that wait for admission or for a replica; one that wanted a replica in vain counts once."""
        return max(len(self._waiting) + len(self._parked) + len(self._held), int(self._wanted))

    @property
    def predicted_wait_s(self) -> float:
        """How long the work that waits for admission takes at the measured rate."""
        state = self._queue.state("", 0, self._events.now) if self._waiting else QueueState()
        return sum(state.work) / state.rates[0] if state.rates is not None else 0.0

    def arrive(self, job: Job) -> None:
        """A client's request."""
        now, arrival, spec = self._events.now, job.arrival, self._spec
        if spec.hold is not None and not self._able:
            self._wait_for_replica(job, spec.hold)
            return
        if not self._rules.enabled:
            job.granted = now
            self._dispatch(job)
            return
        capacity = self._capacity()
        state = self._state(arrival.tenant, arrival.rank)
        request = AdmissionRequest(
            job.id, arrival.tenant, arrival.rank, arrival.weight, (), 1, arrival.limit, max_wait_s=arrival.max_wait_s
        )
        assessed = self._triage.assess(request, job.prompt_tokens, lambda: self._cached(job), state, capacity, now)
        entry = assessed.entry
        if assessed.refusal is not None:
            self._refuse(job, entry, assessed.refusal.reason or "", assessed.refusal.wait_s)
            return
        self._waiting[job.id] = job
        self._tell(self._queue.enter(entry, capacity, max_waiting(spec.admission, capacity), now))
        if job.id in self._waiting:
            self._events.after(assessed.patience, self._impatient, job, entry)
            if not self._looking:
                self._looking = True
                self._events.after(LOOK_S, self._look)

    def has_room(self, job: Job) -> bool:
        """Whether a job would run at once."""
        if not self._able or self._queue.waits:
            return False
        tokens = job.prompt_tokens + min(job.arrival.limit, EXPECTED_OUTPUT)
        return fits(QueueEntry(job.id, job.arrival.tenant, kv_tokens=tokens), *self._queue.held, self._capacity())

    def joined(self, replica: Replica) -> None:
        """A replica is ready: it takes requests from now on."""
        member = self._members.setdefault(replica, _Member(replica))
        self._able.append(member)
        self._views.append(member.view(self._events.now))
        self._hold.served()
        self._wanted = False
        held, self._held = self._held, {}
        parked = list(self._parked.values())
        for job in parked:
            if job.id in self._parked:
                del self._parked[job.id]
                job.parked += 1
                self._dispatch(job)
        if self._waiting:
            self._tell(self._queue.tick(self._capacity(), self._events.now))
        for job in held.values():
            self.arrive(job)

    def leaving(self, replica: Replica) -> None:
        """A replica takes no more requests."""
        for index, member in enumerate(self._able):
            if member.replica is replica:
                del self._able[index], self._views[index]
                return

    def gone(self, replica: Replica) -> None:
        """A replica is no more; its jobs are handed to `lost` by the fleet."""
        self.leaving(replica)
        member = self._members.pop(replica, None)
        if member is not None:
            member.meter.lost(self._events.now)
        self._policy.forget(replica.name)

    def stepped(self, replica: Replica) -> None:
        member = self._members.get(replica)
        if member is not None:
            member.stale = True

    def lost(self, job: Job) -> None:
        """A job's replica died under it: another one continues, if there is one in time."""
        job.losses += 1
        if job.losses >= self._spec.resilience.attempts:
            self._over(job, "lost", "replica_failed")
            return
        job.moves += 1
        self._record.totals.failovers += 1
        self._dispatch(job)

    def started(self, job: Job, cached_tokens: int) -> None:
        if job.first_token is None:
            job.cached_tokens = cached_tokens
        job.meter.started(job.id, cached_tokens, self._events.now)

    def ended(self, job: Job, timed_out: bool) -> None:
        """A job is over on its replica."""
        job.meter.ended(job.id, self._events.now)
        if timed_out:
            self._over(job, "lost", "timeout")
        else:
            self._triage.answered(job.delivered)
            self._over(job, "served", "")

    def _want(self) -> None:
        self._wanted = True

    def _wait_for_replica(self, job: Job, limits: HoldLimits) -> None:
        """Holds a job for the first replica of a model that is scaled to zero."""
        self._hold.wanted()
        self._hold.waiting = len(self._held)
        try:
            self._hold.check()
        except EngineUnavailable as refusal:
            self._ended(job, "refused", refusal.reason or "unavailable", refusal.retry_after)
            return
        self._held[job.id] = job
        self._events.after(limits.seconds, self._held_too_long, job)

    def _held_too_long(self, job: Job) -> None:
        if self._held.pop(job.id, None) is not None:
            self._ended(job, "refused", "queue_timeout", self._hold.ready_in_s)

    def _cached(self, job: Job) -> int:
        size = self._members[next(iter(self._members))].replica.spec.block_size if self._members else 16
        ends = [length // size - 1 for length in LENGTHS if length <= job.prompt_tokens]
        return self._sketch.known([job.names[end] for end in ends if 0 <= end < len(job.names)])

    def _capacity(self) -> Capacity:
        fleet = self._fleet
        if not fleet.ready:
            # With no replica up, requests wait for those to come as if they were there.
            return Capacity(replicas=max(fleet.present, 1))
        held = self._queue.held
        return capacity_of(fleet.totals, self._rules, held)

    def _state(self, tenant: str, rank: int) -> QueueState:
        if not self._queue.waits:
            return QueueState(*self._queue.held)
        return self._queue.state(tenant, rank, self._events.now)

    def _tell(self, changes: Changes) -> None:
        for id in changes.granted:
            job = self._waiting.pop(id)
            job.granted = self._events.now
            self._dispatch(job)
        for id in changes.dropped:
            self._dropped(self._waiting.pop(id))

    def _dropped(self, job: Job) -> None:
        arrival = job.arrival
        entry = QueueEntry(job.id, arrival.tenant, arrival.rank, arrival.weight)
        self._refuse(job, entry, "queue_full", None)

    def _refuse(self, job: Job, entry: QueueEntry, reason: str, wait_s: float | None) -> None:
        state = self._state(entry.tenant, entry.rank)
        self._ended(job, "refused", reason, float(self._triage.retry_after(entry, state, wait_s)))

    def _impatient(self, job: Job, entry: QueueEntry) -> None:
        """A job has waited as long as it may."""
        if self._waiting.get(job.id) is job:
            del self._waiting[job.id]
            self._tell(self._queue.leave(job.id, self._capacity(), self._events.now))
            self._refuse(job, entry, "queue_timeout", None)

    def _look(self) -> None:
        """Capacity can grow without a release, when other gateways' requests end or replicas join."""
        self._looking = bool(self._waiting)
        if self._waiting:
            self._tell(self._queue.tick(self._capacity(), self._events.now))
            self._events.after(LOOK_S, self._look)

    def _dispatch(self, job: Job) -> None:
        """Sends a job to a replica; without one it is parked."""
        if not self._able:
            self._park(job)
            return
        now = self._events.now
        views = self._views
        if len(views) > 1 or self._policy.wants_blocks:
            oldest = now - self._spec.view_age_s
            for index, member in enumerate(self._able):
                if member.stale or (member.viewed < oldest and member.replica.jobs):
                    views[index] = member.view(now)
        expected = min(job.arrival.limit - job.delivered, EXPECTED_OUTPUT)
        tokens = job.prompt_tokens + job.delivered
        size = self._able[0].replica.spec.block_size
        blocks = job.names[: min(job.prompt_tokens // size, MAX_BLOCKS)] if self._policy.wants_blocks else ()
        asked = ReplicaRequest(tokens, expected, blocks, size, job.arrival.session, job.arrival.tenant)
        member = self._able[self._policy.choose(asked, views)]
        member.meter.sent(job.id, tokens, expected, now)
        member.stale = True
        job.meter, job.replica = member.meter, member.replica
        if self._spec.hop_s:
            self._events.after(self._spec.hop_s, self._submit, job, member.replica)
        else:
            member.replica.submit(job)

    def _submit(self, job: Job, replica: Replica) -> None:
        if replica in self._members:
            replica.submit(job)
        else:  # it died in the meantime
            self._dispatch(job)

    def _park(self, job: Job) -> None:
        if job.first_token is None and len(self._parked) >= MOST_PARKED:
            self._over(job, "refused", "unavailable")
            return
        self._parked[job.id] = job
        job.parked += 1
        resilience = self._spec.resilience
        patience = resilience.park_s if job.first_token is None else resilience.resume_s
        self._events.after(patience, self._give_up, job, job.parked)

    def _give_up(self, job: Job, parked: int) -> None:
        if job.parked == parked and self._parked.pop(job.id, None) is not None:
            self._over(job, "refused" if job.first_token is None else "lost", "unavailable")

    def _over(self, job: Job, status: Status, reason: str) -> None:
        """A granted job is over: its part of the capacity is free."""
        self._ended(job, status, reason, 1.0 if status == "refused" else None)
        if self._rules.enabled:
            used = cost_of(job.prompt_tokens - job.cached_tokens, job.delivered) if status == "served" else 0.0
            capacity = self._capacity() if self._queue.waits else Capacity()
            self._tell(self._queue.release(job.id, used, capacity, self._events.now))
