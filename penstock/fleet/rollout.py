"""Changed settings reach running engines: which machine may replace its replicas next, as a pure function of the fleet.

Invariants: one machine at a time per model, and only while every other replica is ready; a machine replaces
one replica at a time, the new one before the old one where there is room. So a model never has fewer ready replicas
than it had, but for one where a machine is full. Where the new settings cannot start, the old replicas stay and no
further machine begins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from penstock.config import ModelConfig
from penstock.config.variants import revision, whole_revision
from penstock.fleet.records import VARIANTS, EngineRecord
from penstock.fleet.registry import Fleet


@dataclass(slots=True)
class Rollouts:
    """Where each model stands."""

    allowed: dict[str, dict[str, str]] = field(default_factory=dict)
    """Settings (`whole_revision`) that replicas may be replaced with, by machine and model."""
    progress: dict[str, str] = field(default_factory=dict)
    """By model, in words; none for those whose replicas all have the settings of now."""


def rollouts(fleet: Fleet, models: Mapping[str, ModelConfig]) -> Rollouts:
    found = Rollouts({name: {} for name in fleet.machines})
    for name, config in models.items():
        _roll(found, fleet, name, config)
    return found


def _roll(found: Rollouts, fleet: Fleet, name: str, config: ModelConfig) -> None:
    now = whole_revision(config)
    current = {pool: revision(config, pool) for pool in ("", *(pool.name for pool in config.pools))}
    engines = [engine for engine in fleet.engines.values() if engine.model == name and engine.machine in fleet.machines]
    managed = [engine for engine in engines if _managed(fleet, engine) and engine.state != "draining"]
    stale = [engine for engine in managed if engine.revision != current.get(engine.pool)]
    behind = sorted({engine.machine for engine in stale})
    for machine in fleet.machines:
        if machine not in behind:
            found.allowed[machine][name] = now
    if not behind:
        return
    begun = [machine for machine in behind if _was_allowed(fleet, machine, name) == now]
    failing = _failing(fleet, name, begun)
    if not begun and all(engine.state != "starting" for engine in engines):
        begun = behind[:1]
    for machine in begun:
        found.allowed[machine][name] = now
    done = len(managed) - len(stale)
    found.progress[name] = f"{max(done, 0)} of {len(managed)} replicas have the new settings" + (
        f"; it waits, because a machine cannot start them: {failing}" if failing else ""
    )


def _managed(fleet: Fleet, engine: EngineRecord) -> bool:
    """Whether the controller may have it replaced."""
    machine = fleet.machines[engine.machine]
    return bool(engine.revision) and not machine.pinned and machine.state == "ready" and VARIANTS in machine.understands


def _was_allowed(fleet: Fleet, machine: str, model: str) -> str:
    assignment = fleet.assignments.get(machine)
    return "" if assignment is None else assignment.revisions.get(model, "")


def _failing(fleet: Fleet, model: str, machines: Collection[str]) -> str:
    problems = [
        f"{name}: {why}"
        for name in machines
        for slot, why in fleet.machines[name].problems.items()
        if slot == model or slot.startswith(f"{model} (")
    ]
    return "; ".join(problems)
