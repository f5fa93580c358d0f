"""The replicas of a simulated fleet over time: starts, drains, failures, spot interruptions, scaling, and their cost.

A replica is paid from its start, before it is ready, until it is gone. It stops by draining: no new requests, and gone
when those on it have ended. A failure takes its requests away at once, and so does the end of a spot notice, which a
replica spends draining. Invariant: a request on a replica that disappears is handed back to its gateway.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from penstock.errors import ConfigError
from penstock.planning.autoscaling import Decision, FleetLoad
from penstock.routing.admission.capacity import EngineTotals
from penstock.simulation.events import Events
from penstock.simulation.job import Job
from penstock.simulation.record import Record
from penstock.simulation.replica import Replica, ReplicaEvents, ReplicaSpec

State = Literal["starting", "ready", "draining", "gone"]


class Scaler(Protocol):
    """Decides how many replicas there are: `planning.autoscaling.Autoscaler`, or a rival to compare it with."""

    def decide(self, load: FleetLoad) -> Decision: ...

    def spot(self, count: int) -> int:
        """How many of `count` replicas are on spot capacity."""
        ...


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """The replicas and what they cost."""

    replica: ReplicaSpec
    replicas: int = 1
    """Ready at the beginning."""
    cold_start_s: float = 60.0
    replicas_per_node: int = 1
    devices: int = 1
    """Of one replica."""
    price: float = 0.0
    """Dollars per hour and device, on demand."""
    spot_price: float = 0.0
    spot: float = 0.0
    """Part of the replicas on spot capacity, where no autoscaler decides it."""
    interruptions_per_hour: float = 0.0
    """Of one spot replica; drawn at random. A replacement is started with the notice."""
    notice_s: float = 120.0
    autoscaler: Scaler | None = None
    autoscale_every_s: float = 5.0
    epoch: float = 0.0
    """Unix time of the beginning, for an autoscaler with schedules."""

    def __post_init__(self) -> None:
        if self.replicas < 0 or self.replicas_per_node < 1 or self.devices < 1:
            raise ConfigError("a fleet has 0 replicas or more, at least 1 per node, with at least 1 device each")
        if not 0 <= self.spot <= 1:
            raise ConfigError("the spot share of a fleet lies between 0 and 1")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something bad that happens to the fleet."""

    at: float
    kind: Literal["replica", "node", "spot"] = "replica"
    """`replica`: its process dies. `node`: all replicas of a node die. `spot`: a notice, then it is taken away."""
    target: int | None = None
    """Number of the replica or node, from 0; None: one at random of those that are there."""
    back_after_s: float | None = 0.0
    """Seconds until a replacement begins to start, from the failure or the notice; None: never. With an autoscaler,
    that decides about replacements."""


class Unit:
    """A replica with its life."""

    __slots__ = ("interrupted", "node", "number", "paid_from", "replica", "seen", "spot", "state")

    def __init__(self, number: int, node: int, replica: Replica, spot: bool, now: float) -> None:
        self.number = number
        self.node = node
        self.replica = replica
        self.spot = spot
        self.paid_from = now
        self.state: State = "starting"
        self.interrupted = False
        self.seen = (0, 0)
        """Its requests and used tokens, as counted in the fleet's totals."""


class FleetGateway(ReplicaEvents, Protocol):
    """What the fleet tells the gateways, besides what replicas tell them."""

    def joined(self, replica: Replica) -> None: ...

    def leaving(self, replica: Replica) -> None: ...

    def gone(self, replica: Replica) -> None: ...

    def lost(self, job: Job) -> None: ...

    @property
    def queued(self) -> int: ...

    @property
    def predicted_wait_s(self) -> float: ...


class SimulatedFleet:
    """All replicas."""

    def __init__(
        self,
        spec: FleetSpec,
        events: Events,
        record: Record,
        rng: random.Random,
        faults: Sequence[Fault] = (),
        fast_forward: bool = True,
    ) -> None:
        self.spec = spec
        self.units: list[Unit] = []
        """All that are not gone."""
        self.ready: list[Replica] = []
        self.totals = EngineTotals()
        self.desired = spec.replicas
        self.gateway: FleetGateway
        """Set before `open`."""
        self.arrived: Callable[[], int] = lambda: 0
        """How many requests have arrived, were answered and were refused, for the autoscaler."""
        self.served: Callable[[], int] = lambda: 0
        self.refused: Callable[[], int] = lambda: 0
        self._events = events
        self._record = record
        self._rng = rng
        self._faults = faults
        self._fast = fast_forward
        self._unit_of: dict[Replica, Unit] = {}
        self._numbers = 0
        self._paid = [0.0, 0.0]
        """Device seconds of replicas that are gone, on demand and spot."""
        self._looked = (0.0, 0, 0, 0)
        self.tokens_gone = 0
        """Generated by replicas that are gone."""

    def open(self) -> None:
        """Makes the first replicas and plans what happens to them."""
        spot = self._spot_of(self.spec.replicas)
        for number in range(self.spec.replicas):
            self._ready(self._make(number >= self.spec.replicas - spot))
        for fault in self._faults:
            self._events.at(fault.at, self._strike, fault)
        if self.spec.autoscaler is not None:
            self._events.at(0.0, self._scale)

    @property
    def present(self) -> int:
        return sum(unit.state in ("starting", "ready") and not unit.interrupted for unit in self.units)

    @property
    def cold_start_s(self) -> float:
        return self.spec.cold_start_s

    def count(self, state: State) -> int:
        return sum(unit.state == state for unit in self.units)

    @property
    def spot_ready(self) -> int:
        return sum(unit.spot and unit.state == "ready" for unit in self.units)

    def device_seconds(self) -> tuple[float, float]:
        """Paid so far, on demand and spot."""
        paid = self._paid.copy()
        for unit in self.units:
            paid[unit.spot] += (self._events.now - unit.paid_from) * self.spec.devices
        return paid[0], paid[1]

    def cost(self) -> float:
        on_demand, spot = self.device_seconds()
        return (on_demand * self.spec.price + spot * self.spec.spot_price) / 3600

    def stepped(self, replica: Replica) -> None:
        """A replica's load has changed."""
        unit = self._unit_of.get(replica)
        if unit is None:
            return
        if unit.state == "ready":
            self._count(unit)
        elif unit.state == "draining" and replica.idle:
            self._remove(unit)

    def _count(self, unit: Unit) -> None:
        load, totals, seen = unit.replica.load, self.totals, unit.seen
        unit.seen = (load.running + load.waiting, load.used_blocks * self.spec.replica.block_size)
        totals.present += unit.seen[0] - seen[0]
        totals.used_tokens += unit.seen[1] - seen[1]

    def _spot_of(self, count: int) -> int:
        if self.spec.autoscaler is not None:
            return self.spec.autoscaler.spot(count)
        return int(count * self.spec.spot + 1e-9)

    def _make(self, spot: bool, number: int | None = None) -> Unit:
        if number is None:
            number = self._numbers
            self._numbers += 1
        replica = Replica(str(number), self.spec.replica, self._events, self.gateway, self._fast)
        unit = Unit(number, number // self.spec.replicas_per_node, replica, spot, self._events.now)
        self.units.append(unit)
        self._unit_of[replica] = unit
        self._record.totals.starts += 1
        if spot and self.spec.interruptions_per_hour > 0:
            wait = self._rng.expovariate(self.spec.interruptions_per_hour / 3600)
            self._events.after(wait, self._interrupt, unit, 0.0)
        return unit

    def start(self, spot: bool, number: int | None = None) -> None:
        """Starts a replica, which is ready after the cold start; `number`: the one that it replaces."""
        unit = self._make(spot, number)
        self._note(f"replica {unit.number} starts{' on spot capacity' if spot else ''}")
        self._events.after(self.spec.cold_start_s, self._ready, unit)

    def _ready(self, unit: Unit) -> None:
        if unit.state != "starting" or unit.interrupted:
            return
        unit.state = "ready"
        self.ready.append(unit.replica)
        totals, spec = self.totals, self.spec.replica
        totals.replicas += 1
        totals.slots += spec.max_running
        totals.kv_tokens += spec.num_blocks * spec.block_size
        self._count(unit)
        self.gateway.joined(unit.replica)

    def drain(self, unit: Unit) -> None:
        """Stops a replica: it takes no more requests and is gone when it has none."""
        if unit.state == "starting":
            self._remove(unit)
        elif unit.state == "ready":
            self._withdraw(unit)
            unit.state = "draining"
            if unit.replica.idle:
                self._remove(unit)

    def _withdraw(self, unit: Unit) -> None:
        """A replica takes no more requests."""
        self.ready.remove(unit.replica)
        totals, spec = self.totals, self.spec.replica
        totals.replicas -= 1
        totals.slots -= spec.max_running
        totals.kv_tokens -= spec.num_blocks * spec.block_size
        totals.present -= unit.seen[0]
        totals.used_tokens -= unit.seen[1]
        unit.seen = (0, 0)
        self.gateway.leaving(unit.replica)

    def _remove(self, unit: Unit) -> None:
        """A replica is gone; what is on it moves to others."""
        if unit.state == "gone":
            return
        if unit.state == "ready":
            self._withdraw(unit)
        unit.state = "gone"
        self.units.remove(unit)
        del self._unit_of[unit.replica]
        self._paid[unit.spot] += (self._events.now - unit.paid_from) * self.spec.devices
        self.tally(unit.replica)
        jobs = unit.replica.evict()
        self.tokens_gone += unit.replica.tokens
        self.gateway.gone(unit.replica)
        for job in jobs:
            self.gateway.lost(job)

    def tally(self, replica: Replica) -> None:
        """Adds a replica's counters to the totals, once, at its end or that of the simulation."""
        totals, scheduler = self._record.totals, replica.scheduler
        replica.progress()
        totals.steps += replica.steps
        totals.preemptions += scheduler.preemptions
        totals.engine_prompt_tokens += scheduler.prefix_query_tokens
        totals.engine_cached_tokens += scheduler.prefix_hit_tokens
        totals.host_cached_tokens += scheduler.host_hit_tokens

    def _strike(self, fault: Fault) -> None:
        struck = self._struck(fault)
        for unit in struck:
            if fault.kind == "spot":
                self._interrupt(unit, fault.back_after_s)
                continue
            self._record.totals.failures += 1
            self._note(f"replica {unit.number} dies")
            self._remove(unit)
            if fault.back_after_s is not None and self.spec.autoscaler is None:
                self._events.after(fault.back_after_s, self.start, unit.spot, unit.number)

    def _struck(self, fault: Fault) -> list[Unit]:
        there = [unit for unit in self.units if not unit.interrupted]
        if fault.kind == "spot":
            there = [unit for unit in there if unit.spot] or there
        if not there:
            return []
        if fault.kind == "node":
            nodes = sorted({unit.node for unit in there})
            node = self._rng.choice(nodes) if fault.target is None else fault.target
            return [unit for unit in there if unit.node == node]
        if fault.target is None:
            return [self._rng.choice(there)]
        return [unit for unit in there if unit.number == fault.target]

    def _interrupt(self, unit: Unit, back_after_s: float | None) -> None:
        """The provider gives notice of a spot replica."""
        if unit.state == "gone" or unit.interrupted:
            return
        unit.interrupted = True
        self._record.totals.interruptions += 1
        self._note(f"replica {unit.number} has {self.spec.notice_s:.0f} s of notice")
        self._events.after(self.spec.notice_s, self._remove, unit)
        self.drain(unit)
        if back_after_s is not None and self.spec.autoscaler is None:
            self._events.after(back_after_s, self.start, unit.spot, unit.number)

    def _scale(self) -> None:
        """Lets the autoscaler decide, and does it."""
        autoscaler = self.spec.autoscaler
        assert autoscaler is not None
        decision = autoscaler.decide(self._load())
        if decision.desired != self.desired:
            self._note(f"from {self.desired} to {decision.desired} replicas: {decision.detail}")
        self.desired = decision.desired
        staying = [unit for unit in self.units if unit.state in ("starting", "ready") and not unit.interrupted]
        if len(staying) < decision.desired:
            spot = decision.spot - sum(unit.spot for unit in staying)
            for number in range(decision.desired - len(staying)):
                self.start(number < spot)
        elif len(staying) > decision.desired:
            # Those that are not ready yet first, then those with the least to finish.
            staying.sort(key=lambda unit: (unit.state == "ready", len(unit.replica.jobs), -unit.number))
            for unit in staying[: len(staying) - decision.desired]:
                self.drain(unit)
        self._events.after(self.spec.autoscale_every_s, self._scale)

    def _load(self) -> FleetLoad:
        now, arrived, served, refused = self._events.now, self.arrived(), self.served(), self.refused()
        then, arrived_then, served_then, refused_then = self._looked
        self._looked = (now, arrived, served, refused)
        passed = now - then
        running = waiting = used = 0
        for replica in self.ready:
            replica.progress()
            running += replica.load.running
            waiting += replica.load.waiting
            used += replica.load.used_blocks
        total = self.spec.replica.num_blocks * len(self.ready)
        return FleetLoad(
            now=self.spec.epoch + now,
            ready=len(self.ready),
            starting=sum(unit.state == "starting" and not unit.interrupted for unit in self.units),
            queued=self.gateway.queued + waiting,
            predicted_wait_s=self.gateway.predicted_wait_s,
            running=running,
            slots=self.totals.slots,
            kv_use=used / total if total else 0.0,
            arrivals_per_s=(arrived - arrived_then) / passed if passed else 0.0,
            finished_per_s=(served - served_then) / passed if passed else 0.0,
            refused_per_s=(refused - refused_then) / passed if passed else 0.0,
            cold_start_s=self.spec.cold_start_s,
        )

    def _note(self, text: str) -> None:
        self._record.notes.append((self._events.now, text))
