"""The controller of a fleet: decides which machine runs what. Every machine has one, and one of them leads.

Invariants: only the leader of the newest term writes assignments (the registry refuses older ones). A machine that has
no assignment is taken as it is, so a registry that lost its data, or a machine that comes back, costs no running engine
more than are too many. A machine counts as lost only when this process has been in touch with the registry for a whole
lease: after an outage, machines need that long to be heard of again. Models that the registry does not know stay as
they are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.config import ModelConfig
from penstock.config.variants import Variant, slot
from penstock.errors import ConfigError, PenstockError
from penstock.fleet.controller_autoscaler import FleetScaling
from penstock.fleet.devices import NOTHING, claim
from penstock.fleet.membership import engine_model
from penstock.fleet.needs import asks, slot_needs
from penstock.fleet.placement import Host, Need, place
from penstock.fleet.rebalance import Rebalancer
from penstock.fleet.records import (
    VARIANTS,
    Assignment,
    DecisionRecord,
    MachineRecord,
    Record,
    plain_counts,
    varied_counts,
)
from penstock.fleet.registry import Fleet, OutOfTerm, Registry
from penstock.fleet.rollout import Rollouts, rollouts
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
        rebalance_s: float = 0.0,
        reachable: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name`: unique to this process. `rebalance_s`: how long the fleet must be uneven until a replica moves; 0:
        none does. `reachable`: whether the registry is."""
        self._rebalance_s = rebalance_s
        self._rebalancer = Rebalancer(rebalance_s)
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
            self._rebalancer = Rebalancer(self._rebalance_s)
        fleet = self._view.fleet
        lost = self._lost(fleet)
        if lost:
            log.warning("machines are lost; their replicas are started elsewhere", extra={"machines": sorted(lost)})
            await self._registry.withdraw(*(fleet.assignments[name] for name in lost))
        await self._publish(fleet, self._plan(fleet, lost), term)

    def _follow_another(self) -> None:
        self._term = None

    def _lost(self, fleet: Fleet) -> set[str]:
        gone = fleet.assignments.keys() - fleet.machines.keys()
        return gone if self._clock() - self._steady_since >= self._lease_s else set()

    def _plan(self, fleet: Fleet, lost: set[str]) -> _Decided:
        models = {name: found for name in fleet.models if (found := self._model(fleet, name)) is not None}
        present = {name: self._present(fleet, name) for name in (fleet.machines.keys() | fleet.assignments) - lost}
        wanted = [(models[name], ask) for name in models for ask in asks(fleet.models[name], models[name])]
        scaled = self._scaling.decide(fleet, [ask for _, ask in wanted], present)
        slots: dict[tuple[str, Variant], Need] = {}
        totals: Counter[str] = Counter()
        for config, ask in wanted:
            count = scaled.get(ask.name, ask.replicas)
            totals[ask.model] += count
            for one in slot_needs(fleet, config, ask, count, self._scaling.spot(ask.name, count)):
                slots[one.model, one.variant] = one.need
        hosts = [
            _host(fleet.machines.get(name) or MachineRecord(name=name, address="", pinned=True)) for name in present
        ]
        ready = _ready(fleet)
        extra = _replaced(fleet, models, slots, present, ready)
        there, up, now = _named(present), _named(ready), self._clock()
        needs = self._rebalancer.adjust([*slots.values(), *extra.values()], there, up, hosts, now)
        placement = place(hosts, needs, there, up)
        # Where old and new variants do not fit beside each other, one of the old makes room at a time.
        for model in {model for model, variant in slots if slot(model, variant) in placement.missing}:
            olds = [key for key in extra if key[0] == model and extra[key].replicas]
            if olds and not any(one.model == model and one.state != "ready" for one in fleet.engines.values()):
                extra[olds[0]] = dataclasses.replace(extra[olds[0]], replicas=extra[olds[0]].replicas - 1)
                placement = place(hosts, [*slots.values(), *extra.values()], there, up)
        keys = {slot(*key): key for key in {*slots, *(key for counts in present.values() for key in counts)}}
        counts = {
            machine: {keys[name]: count for name, count in counts.items()}
            for machine, counts in placement.counts.items()
        }
        missing: Counter[str] = Counter()
        for key in slots:
            missing[key[0]] += placement.missing.get(slot(*key), 0)
        rolling = rollouts(fleet, models)
        calm = (
            not lost
            and not placement.missing
            and not any(need.replicas for need in extra.values())
            and not rolling.progress
            and placement.counts == there
            and all(engine.state == "ready" for engine in fleet.engines.values())
            and all(machine.state == "ready" for machine in fleet.machines.values())
        )
        self._rebalancer.look(hosts, list(slots.values()), placement.counts, now, calm=calm)
        return _Decided(
            dict(totals),
            counts,
            {name: count for name, count in missing.items() if count},
            rolling,
            [] if self._rebalancer.move is None else [str(self._rebalancer.move)],
        )

    def _present(self, fleet: Fleet, name: str) -> dict[tuple[str, Variant], int]:
        """What a machine runs or was told to run."""
        machine, assignment = fleet.machines.get(name), fleet.assignments.get(name)
        if assignment is None or (machine is not None and machine.pinned):
            return {} if machine is None else machine.replicas
        if machine is None:
            return assignment.replicas
        # What it could not start is to be placed elsewhere.
        running = machine.replicas
        return {
            key: min(count, running.get(key, 0)) if machine.problems.keys() & {slot(*key), key[0]} else count
            for key, count in assignment.replicas.items()
        }

    def _model(self, fleet: Fleet, name: str) -> ModelConfig | None:
        description = fleet.models[name].description
        known = self._models.get(name)
        if known is None or known[0] != description:
            try:
                found: ModelConfig | None = engine_model(description)
            except ConfigError as error:
                log.error("a model's description cannot be used", extra={"model": name, "why": str(error)})
                found = None
            known = self._models[name] = (description, found)
        return known[1]

    async def _publish(self, fleet: Fleet, decided: _Decided, term: int) -> None:
        fresh: list[Record] = []
        for name, machine in fleet.machines.items():
            if machine.pinned:
                continue
            replicas = decided.counts[name]
            new = Assignment(
                machine=name,
                models=plain_counts(replicas),
                variants=varied_counts(replicas),
                revisions=decided.rollouts.allowed.get(name, {}),
                term=term,
            )
            old = fleet.assignments.get(name)
            if old is None or msgspec.structs.replace(old, term=term) != new:
                fresh.append(new)
                shown = {slot(*key): count for key, count in replicas.items()}
                if old is None or old.replicas != new.replicas:
                    log.info("assignment", extra={"machine": name, "replicas": shown})
        decision = DecisionRecord(
            controller=self._name,
            scaling=self._scaling.state(),
            wanted=decided.wanted,
            problems=_problems(fleet, decided.missing),
            rollouts=decided.rollouts.progress,
            moves=decided.moves,
        )
        if decision != self._decision:
            self._decision = decision
            fresh.append(decision)
        if fresh:
            await self._registry.publish(*fresh)


@dataclass(frozen=True, slots=True)
class _Decided:
    wanted: dict[str, int]
    """Replicas by model."""
    counts: dict[str, dict[tuple[str, Variant], int]]
    """Replicas by machine."""
    missing: dict[str, int]
    """Replicas that fit nowhere, by model."""
    rollouts: Rollouts
    moves: list[str]


def _named(counts: Mapping[str, Mapping[tuple[str, Variant], int]]) -> dict[str, dict[str, int]]:
    return {machine: {slot(*key): count for key, count in found.items()} for machine, found in counts.items()}


def _ready(fleet: Fleet) -> dict[str, dict[tuple[str, Variant], int]]:
    found: dict[str, dict[tuple[str, Variant], int]] = {}
    for engine in fleet.engines.values():
        if engine.state == "ready":
            counts = found.setdefault(engine.machine, {})
            counts[engine.model, engine.variant] = counts.get((engine.model, engine.variant), 0) + 1
    return found


def _replaced(
    fleet: Fleet,
    models: Mapping[str, ModelConfig],
    slots: Mapping[tuple[str, Variant], Need],
    present: Mapping[str, Mapping[tuple[str, Variant], int]],
    ready: Mapping[str, Mapping[tuple[str, Variant], int]],
) -> dict[tuple[str, Variant], Need]:
    """Replicas of variants that a model no longer has: as many stay as those that take their place are not ready."""
    there: Counter[tuple[str, Variant]] = Counter()
    up: Counter[str] = Counter()
    for counts in present.values():
        there.update({key: count for key, count in counts.items() if key not in slots and key[0] in models})
    for counts in ready.values():
        for key, count in counts.items():
            up[key[0]] += count if key in slots else 0
    wanted: Counter[str] = Counter()
    for key, need in slots.items():
        wanted[key[0]] += need.replicas
    found = {}
    most = max((len(machine.devices) for machine in fleet.machines.values()), default=0)
    for key, count in sorted(there.items()):
        model, variant = key
        kept = min(count, max(wanted[model] - up[model], 0))
        up[model] += kept
        try:
            taken = claim(variant.of(models[model]), most)
        except ValueError:
            taken = NOTHING
        found[key] = Need(
            slot(*key), kept, devices=taken.devices, certain=taken.certain, share=taken.share, group=taken.group
        )
    return found


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
        plain=VARIANTS not in machine.understands,
        busy=machine.busy,
    )


def _problems(fleet: Fleet, missing: Mapping[str, int]) -> dict[str, str]:
    """Why models have fewer replicas than they should."""
    found = {}
    for model, count in missing.items():
        why = [
            f"{name}: {problem}"
            for name, machine in fleet.machines.items()
            for where, problem in machine.problems.items()
            if where == model or where.startswith(f"{model} (")
        ]
        room = "no machine has room for" if not why else "no other machine has room for"
        found[model] = "; ".join([f"{room} {count} more {'replica' if count == 1 else 'replicas'}", *why])
    return found
