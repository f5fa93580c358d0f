"""The controller of a fleet: decides which machine runs what. Every machine has one, and one of them leads.

Invariants: only the leader of the newest term writes assignments (the registry refuses older ones). A machine that has
no assignment is taken as it is, so a registry that lost its data, or a machine that comes back, costs no running engine
more than are too many. A machine counts as lost only when this process has been in touch with the registry for a whole
lease: after an outage, machines need that long to be heard of again. Models that the registry does not know stay as
they are.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from penstock.config import ModelConfig
from penstock.config.load import check_model
from penstock.config.resources import ResourcesConfig
from penstock.errors import ConfigError, PenstockError
from penstock.fleet.controller_autoscaler import FleetScaling
from penstock.fleet.machine_site import gpus
from penstock.fleet.membership import understood
from penstock.fleet.placement import Host, Need, Placement, place
from penstock.fleet.records import Assignment, DecisionRecord, MachineRecord, Record
from penstock.fleet.registry import Fleet, OutOfTerm, Registry
from penstock.fleet.view import FleetView
from penstock.supervisor.reporter import Reporter

TICK_S = 1.0
"""Seconds between two decisions when nothing changes."""
PAUSE_S = 0.2
"""At least, however often the fleet changes."""

log = logging.getLogger("penstock.fleet")


class Controller:
    """Leads the fleet whenever nobody else does."""

    def __init__(
        self,
        registry: Registry,
        view: FleetView,
        name: str,
        *,
        lease_s: float,
        reporter: Reporter | None = None,
        reachable: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: unique to this process. `reachable`: whether the registry is."""
        self._reachable = reachable
        self._registry = registry
        self._view = view
        self._name = name
        self._lease_s = lease_s
        self._reporter = reporter
        self._clock = clock
        self._heard_at: float | None = None
        self._steady_since = clock()
        self._term: int | None = None
        self._scaling = FleetScaling(reporter, clock)
        self._decision: DecisionRecord | None = None
        self._models: dict[str, tuple[dict[str, Any], ModelConfig | None]] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        await self._view.seen.wait()
        while True:
            try:
                await self.step()
            except OutOfTerm:
                self._follow_another()
            except PenstockError as error:
                log.warning("the controller cannot reach the registry", extra={"why": str(error)})
            except Exception:
                log.exception("the controller failed; it tries again")
            await asyncio.sleep(PAUSE_S)
            await self._view.changed(min(TICK_S, self._lease_s / 4))

    async def step(self) -> None:
        """Becomes or stays the leader if possible, and decides."""
        term = await self._registry.lead(self._name)
        if not self._reachable():
            return
        now = self._clock()
        if self._heard_at is None or now - self._heard_at > self._lease_s:
            self._steady_since = now
        self._heard_at = now
        if term is None:
            self._follow_another()
            return
        if term != self._term:
            log.info("this process is the controller of the fleet", extra={"controller": self._name, "term": term})
            self._term, self._scaling = term, FleetScaling(self._reporter, self._clock)
        fleet = self._view.fleet
        lost = self._lost(fleet)
        if lost:
            log.warning("machines are lost; their replicas are started elsewhere", extra={"machines": sorted(lost)})
            await self._registry.withdraw(*(fleet.assignments[name] for name in lost))
        await self._publish(fleet, *self._plan(fleet, lost), term)

    def _follow_another(self) -> None:
        self._term = None

    def _lost(self, fleet: Fleet) -> set[str]:
        gone = fleet.assignments.keys() - fleet.machines.keys()
        return gone if self._clock() - self._steady_since >= self._lease_s else set()

    def _plan(self, fleet: Fleet, lost: set[str]) -> tuple[list[Need], Placement]:
        models = {name: found for name in fleet.models if (found := self._model(fleet, name)) is not None}
        present = {name: self._present(fleet, name) for name in (fleet.machines.keys() | fleet.assignments) - lost}
        scaled = self._scaling.decide(fleet, models, present)
        hosts = [
            _host(fleet.machines.get(name) or MachineRecord(name=name, address="", pinned=True)) for name in present
        ]
        needs = [
            self._need(fleet, name, config, scaled.get(name, fleet.models[name].replicas))
            for name, config in models.items()
        ]
        ready: dict[str, dict[str, int]] = {}
        for engine in fleet.engines.values():
            if engine.state == "ready":
                counts = ready.setdefault(engine.machine, {})
                counts[engine.model] = counts.get(engine.model, 0) + 1
        return needs, place(hosts, needs, present, ready)

    def _present(self, fleet: Fleet, name: str) -> dict[str, int]:
        """What a machine runs or was told to run."""
        machine, assignment = fleet.machines.get(name), fleet.assignments.get(name)
        if assignment is None or (machine is not None and machine.pinned):
            return {} if machine is None else dict(machine.running)
        if machine is None:
            return dict(assignment.models)
        # What it could not start is to be placed elsewhere.
        return {
            model: min(count, machine.running.get(model, 0)) if model in machine.problems else count
            for model, count in assignment.models.items()
        }

    def _model(self, fleet: Fleet, name: str) -> ModelConfig | None:
        description = fleet.models[name].description
        known = self._models.get(name)
        if known is None or known[0] != description:
            try:
                found: ModelConfig | None = check_model(understood(description))
            except ConfigError as error:
                log.error("a model's description cannot be used", extra={"model": name, "why": str(error)})
                found = None
            known = self._models[name] = (description, found)
        return known[1]

    def _need(self, fleet: Fleet, name: str, config: ModelConfig, replicas: int) -> Need:
        most = max((len(machine.devices) for machine in fleet.machines.values()), default=0)
        reserved = config.resources or ResourcesConfig()
        devices = gpus(config, 0, most) if reserved.gpus is None else math.ceil(reserved.gpus)
        used = [engine.memory for engine in fleet.engines.values() if engine.model == name and engine.state == "ready"]
        measured = 0 if devices else max(used, default=0)
        return Need(
            name,
            replicas,
            devices=devices,
            cpus=reserved.cpus or 0,
            memory=reserved.memory or measured,
            labels=frozenset((*config.machine_labels, *reserved.custom)),
            spot=self._scaling.spot(name, replicas),
        )

    async def _publish(self, fleet: Fleet, needs: list[Need], placement: Placement, term: int) -> None:
        fresh: list[Record] = []
        for name, machine in fleet.machines.items():
            old, counts = fleet.assignments.get(name), placement.counts[name]
            if not machine.pinned and (old is None or old.models != counts):
                fresh.append(Assignment(machine=name, models=counts, term=term))
                log.info("assignment", extra={"machine": name, "models": counts})
        decision = DecisionRecord(
            controller=self._name,
            scaling=self._scaling.state(),
            wanted={need.model: need.replicas for need in needs},
            problems=_problems(fleet, placement.missing),
        )
        if decision != self._decision:
            self._decision = decision
            fresh.append(decision)
        if fresh:
            await self._registry.publish(*fresh)


def _host(machine: MachineRecord) -> Host:
    return Host(
        machine.name,
        machine.room,
        devices=len(machine.devices),
        cpus=machine.cpus,
        memory=machine.memory,
        zone=machine.zone or machine.region,
        labels=frozenset(machine.labels),
        unable=frozenset(machine.problems),
        fixed=machine.pinned,
        leaving=machine.state == "leaving",
        holds_out=machine.leaves_at is not None,
    )


def _problems(fleet: Fleet, missing: Mapping[str, int]) -> dict[str, str]:
    """Why models have fewer replicas than they should."""
    found = {}
    for model, count in missing.items():
        why = [
            f"{name}: {machine.problems[model]}"
            for name, machine in fleet.machines.items()
            if model in machine.problems
        ]
        room = "no machine has room for" if not why else "no other machine has room for"
        found[model] = "; ".join([f"{room} {count} more {'replica' if count == 1 else 'replicas'}", *why])
    return found
