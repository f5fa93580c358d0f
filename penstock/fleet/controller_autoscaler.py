"""Automatic scaling over a fleet: the autoscaler of one machine, fed by the loads of all gateways, for the replicas of
all machines."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.config.variants import PLAIN, Variant, slot
from penstock.errors import PenstockError
from penstock.fleet.needs import Ask
from penstock.fleet.registry import Fleet
from penstock.planning.autoscaling import Autoscaler
from penstock.protocol.control import ModelScaling, scaled_name
from penstock.supervisor.autoscaler import DECIDE_S, ReplicaAutoscaler, Target
from penstock.supervisor.reporter import Reporter

log = logging.getLogger("penstock.fleet")


@dataclass(frozen=True, slots=True)
class _Up:
    value: bool

    def is_set(self) -> bool:
        return self.value


@dataclass(frozen=True, slots=True)
class FleetReplica:
    """A replica somewhere in the fleet, as the autoscaler sees it."""

    up: _Up
    spawned_at: float = 0.0
    ready_at: float | None = None


class FleetReplicas:
    """The replicas of a fleet; what the autoscaler asks for is in `wanted`."""

    def __init__(self) -> None:
        self.stopping = False
        self.on_start_failed: Callable[[str, Variant, str], None] | None = None
        self.wanted: dict[str, int] = {}
        """By the name of what is scaled (`Ask.name`)."""
        self._serving: dict[tuple[str, str], list[FleetReplica]] = {}
        """By model and pool."""
        self._leaving: Counter[tuple[str, str]] = Counter()
        self._problems: set[tuple[str, str, Variant, str]] = set()

    def look(self, fleet: Fleet, present: Mapping[str, Mapping[tuple[str, Variant], int]]) -> None:
        """`present`: replicas that run or were told to, by machine."""
        self._serving, self._leaving = {}, Counter()
        for name, counts in present.items():
            machine = fleet.machines.get(name)
            for (model, variant), count in counts.items():
                which = (model, variant.pool)
                if machine is not None and machine.state == "leaving":
                    self._leaving[which] += count
                    continue
                engines = [
                    one
                    for one in fleet.engines.values()
                    if (one.machine, one.model, one.variant) == (name, model, variant)
                ]
                ready = [one for one in engines if one.state == "ready"][:count]
                found = [FleetReplica(_Up(True), 0.0, one.startup_s) for one in ready]
                found += [FleetReplica(_Up(False))] * (count - len(ready))
                self._serving.setdefault(which, []).extend(found)
        for engine in fleet.engines.values():
            if engine.state == "draining":
                self._leaving[engine.model, engine.pool] += 1
        known = {slot(*key): key for counts in present.values() for key in counts}
        problems = {
            (name, *known.get(where, (where, PLAIN)), why)
            for name, machine in fleet.machines.items()
            for where, why in machine.problems.items()
        }
        for name, model, variant, why in problems - self._problems:
            if self.on_start_failed is not None:
                self.on_start_failed(model, variant, f"{name}: {why}")
        self._problems = problems

    def serving(self, model: str, pool: str = "") -> Sequence[FleetReplica]:
        return self._serving.get((model, pool), [])

    def leaving(self, model: str, pool: str = "") -> int:
        return self._leaving[model, pool]

    def adjust(self, model: str, count: int, pool: str = "") -> None:
        self.wanted[scaled_name(model, pool)] = count


class FleetScaling:
    """How many replicas everything that is scaled automatically should have."""

    def __init__(self, reporter: Reporter | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._replicas = FleetReplicas()
        self._targets: dict[str, Target] = {}
        self._autoscaler = ReplicaAutoscaler(self._replicas, lambda: self._targets, clock, reporter)
        self._clock = clock
        self._gateways: set[str] = set()
        self._decided_at = -math.inf

    def decide(
        self, fleet: Fleet, asks: Sequence[Ask], present: Mapping[str, Mapping[tuple[str, Variant], int]]
    ) -> dict[str, int]:
        """Replicas by name (`Ask.name`), of what is scaled automatically."""
        self._replicas.look(fleet, present)
        scaled = [ask for ask in asks if ask.autoscale is not None and ask.replicas]
        self._targets = {ask.name: Target(ask.model, ask.autoscale, ask.pool) for ask in scaled if ask.autoscale}
        for name in self._replicas.wanted.keys() - self._targets.keys():
            del self._replicas.wanted[name]
        for ask in scaled:
            config = self._targets[ask.name].config
            if ask.name not in self._replicas.wanted:
                there = len(self._replicas.serving(ask.model, ask.pool))
                self._replicas.wanted[ask.name] = min(max(there or ask.replicas, config.min), config.max)
            try:
                self._autoscaler.set_limits(ask.model, config.min, config.max, ask.pool)
            except PenstockError as error:
                log.warning("limits of automatic scaling cannot be used", extra={"model": ask.name, "why": str(error)})
        for gateway, record in fleet.loads.items():
            self._autoscaler.heard(gateway, record.loads)
        for gateway in self._gateways - fleet.loads.keys():
            self._autoscaler.lost(gateway)
        self._gateways = set(fleet.loads)
        now = self._clock()
        # Rates need some time between two decisions; a model without replicas is woken at once.
        if self._gateways and (now - self._decided_at >= DECIDE_S or self._asked_for(fleet)):
            self._decided_at = now
            self._autoscaler.decide()
        return dict(self._replicas.wanted)

    def _asked_for(self, fleet: Fleet) -> bool:
        """Whether requests wait for a model that has no replicas."""
        asleep = [name for name, count in self._replicas.wanted.items() if not count]
        reports = [record.loads.models for record in fleet.loads.values()]
        loads = [report[name] for report in reports for name in asleep if name in report]
        return any(load.queued or load.shared_queue for load in loads)

    def spot(self, name: str, count: int) -> int:
        """How many of `count` replicas should be on spot machines."""
        target = self._targets.get(name)
        return 0 if target is None else Autoscaler(target.config).spot(count)

    def state(self) -> dict[str, ModelScaling]:
        return self._autoscaler.state().models
