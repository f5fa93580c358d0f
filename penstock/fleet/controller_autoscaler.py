"""Automatic scaling over a fleet: the autoscaler of one machine, fed by the loads of all gateways, for the replicas of
all machines."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.config import ModelConfig
from penstock.config.autoscale import AutoscaleConfig
from penstock.errors import PenstockError
from penstock.fleet.records import ModelRecord
from penstock.fleet.registry import Fleet
from penstock.planning.autoscaling import Autoscaler
from penstock.protocol.control import ModelScaling
from penstock.supervisor.autoscaler import DECIDE_S, ReplicaAutoscaler
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
        self.on_start_failed: Callable[[str, str], None] | None = None
        self.wanted: dict[str, int] = {}
        self._serving: dict[str, list[FleetReplica]] = {}
        self._leaving: dict[str, int] = {}
        self._problems: set[tuple[str, str, str]] = set()

    def look(self, fleet: Fleet, present: Mapping[str, Mapping[str, int]]) -> None:
        """`present`: replicas that run or were told to, by machine and model."""
        self._serving, self._leaving = {}, {}
        for name, counts in present.items():
            machine = fleet.machines.get(name)
            for model, count in counts.items():
                if machine is not None and machine.state == "leaving":
                    self._leaving[model] = self._leaving.get(model, 0) + count
                    continue
                engines = [one for one in fleet.engines.values() if one.machine == name and one.model == model]
                ready = [one for one in engines if one.state == "ready"][:count]
                found = [FleetReplica(_Up(True), 0.0, one.startup_s) for one in ready]
                found += [FleetReplica(_Up(False))] * (count - len(ready))
                self._serving.setdefault(model, []).extend(found)
        for engine in fleet.engines.values():
            if engine.state == "draining":
                self._leaving[engine.model] = self._leaving.get(engine.model, 0) + 1
        problems = {
            (name, model, why) for name, machine in fleet.machines.items() for model, why in machine.problems.items()
        }
        for name, model, why in problems - self._problems:
            if self.on_start_failed is not None:
                self.on_start_failed(model, f"{name}: {why}")
        self._problems = problems

    def serving(self, model: str) -> Sequence[FleetReplica]:
        return self._serving.get(model, [])

    def leaving(self, model: str) -> int:
        return self._leaving.get(model, 0)

    def adjust(self, model: str, count: int) -> None:
        self.wanted[model] = count


class FleetScaling:
    """How many replicas each automatically scaled model should have."""

    def __init__(self, reporter: Reporter | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._replicas = FleetReplicas()
        self._configs: dict[str, AutoscaleConfig] = {}
        self._autoscaler = ReplicaAutoscaler(self._replicas, lambda: self._configs, clock, reporter)
        self._clock = clock
        self._gateways: set[str] = set()
        self._decided_at = -math.inf

    def decide(
        self, fleet: Fleet, models: Mapping[str, ModelConfig], present: Mapping[str, Mapping[str, int]]
    ) -> dict[str, int]:
        """Replicas by model, of those that are scaled automatically."""
        self._replicas.look(fleet, present)
        self._configs = {
            name: limited(config.autoscale, fleet.models[name])
            for name, config in models.items()
            if config.autoscale is not None and fleet.models[name].replicas
        }
        for name in self._replicas.wanted.keys() - self._configs.keys():
            del self._replicas.wanted[name]
        for name, config in self._configs.items():
            if name not in self._replicas.wanted:
                there = len(self._replicas.serving(name))
                self._replicas.wanted[name] = min(max(there or fleet.models[name].replicas, config.min), config.max)
            try:
                self._autoscaler.set_limits(name, config.min, config.max)
            except PenstockError as error:
                log.warning("limits of automatic scaling cannot be used", extra={"model": name, "why": str(error)})
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

    def spot(self, model: str, count: int) -> int:
        """How many of `count` replicas should be on spot machines."""
        config = self._configs.get(model)
        return 0 if config is None else Autoscaler(config).spot(count)

    def state(self) -> dict[str, ModelScaling]:
        return self._autoscaler.state().models


def limited(config: AutoscaleConfig, record: ModelRecord) -> AutoscaleConfig:
    """With the limits that were set since, if they are possible."""
    changed = dataclasses.replace(
        config,
        min=config.min if record.min is None else record.min,
        max=config.max if record.max is None else record.max,
    )
    return config if changed.problems() else changed
