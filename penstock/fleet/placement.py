"""Which machine runs how many replicas of which model: a pure function of the fleet.

Invariants: nothing that runs is moved; replicas are only added where some are missing and taken away where there are
too many. A machine never gets more than fits (engines, devices, cores, memory, labels). Replicas that are there
already and fit no longer, because a machine has shrunk, stay. The result placed again is itself.

A new replica goes where it fits, in this order: on spot machines up to the model's spot share and on others beyond it;
into the zone with the fewest replicas of the model; onto the machine with the fewest of them; onto the emptiest one.
Surplus ones go in the opposite order. When room is scarce, the model that lacks the largest share of its replicas comes
first.

The replicas of a machine that leaves do not count, so replacements are placed at once; they stay until those are ready.
What cannot be replaced stays until the machine is about to go, if it said when, and otherwise not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

SPOT = "spot"
"""The label of machines that may be taken away at short notice."""

Counts = Mapping[str, Mapping[str, int]]
"""Replicas by machine and model."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, as far as placement is concerned."""

    name: str
    room: int
    """Engines that it can hold."""
    devices: int = 0
    cpus: float = 0
    memory: int = 0
    """Bytes for engines. Of both 0: not known."""
    zone: str = ""
    labels: frozenset[str] = frozenset()
    unable: frozenset[str] = frozenset()
    """Models that it could not start lately."""
    fixed: bool = False
    """What it runs was said on the machine itself."""
    leaving: bool = False
    holds_out: bool = False
    """It leaves, but not yet."""


@dataclass(frozen=True, slots=True)
class Need:
    """How many replicas of a model there should be, and what each of them takes."""

    model: str
    replicas: int
    devices: int = 0
    cpus: float = 0
    memory: int = 0
    """Bytes on the host. Of both 0: not known."""
    labels: frozenset[str] = frozenset()
    spot: int = 0
    """How many of them should be on spot machines."""


@dataclass(frozen=True, slots=True)
class Placement:
    counts: dict[str, dict[str, int]]
    """Replicas by machine and model; every machine is listed."""
    missing: dict[str, int] = field(default_factory=dict)
    """Replicas that fit nowhere, by model."""


def place(hosts: Sequence[Host], needs: Sequence[Need], present: Counts, ready: Counts) -> Placement:
    """`present`: replicas that run or were told to; those of models that are not in `needs` stay as they are. `ready`:
    those that take requests."""
    plan = _Plan(hosts, needs, present)
    for need in needs:
        while plan.staying(need.model) > need.replicas and plan.take_away(need):
            pass
    lacking = [need for need in needs if plan.staying(need.model) < need.replicas]
    while lacking:
        need = min(lacking, key=lambda need: (plan.staying(need.model) / need.replicas, need.model))
        if not plan.add(need) or plan.staying(need.model) == need.replicas:
            lacking.remove(need)
    missing = {need.model: need.replicas - plan.staying(need.model) for need in needs}
    missing = {model: count for model, count in missing.items() if count > 0}
    plan.release(ready, missing)
    return Placement(plan.counts, missing)


class _Plan:
    def __init__(self, hosts: Sequence[Host], needs: Sequence[Need], present: Counts) -> None:
        self._hosts = sorted(hosts, key=lambda host: host.name)
        self._needs = {need.model: need for need in needs}
        self.counts = {
            host.name: {model: count for model, count in present.get(host.name, {}).items() if count > 0}
            for host in self._hosts
        }

    def staying(self, model: str) -> int:
        return sum(self.counts[host.name].get(model, 0) for host in self._hosts if not host.leaving)

    def add(self, need: Need) -> bool:
        fitting = [host for host in self._hosts if self._fits(host, need)]
        if not fitting:
            return False
        wants_spot = self._on_spot(need.model) < need.spot
        best = min(
            fitting, key=lambda host: ((SPOT in host.labels) != wants_spot, *self._crowd(host, need.model), host.name)
        )
        self.counts[best.name][need.model] = self.counts[best.name].get(need.model, 0) + 1
        return True

    def take_away(self, need: Need) -> bool:
        having = [
            host
            for host in self._hosts
            if self.counts[host.name].get(need.model) and not host.fixed and not host.leaving
        ]
        if not having:
            return False
        too_much_spot = self._on_spot(need.model) > need.spot
        # Between equals the last by name, so that taking away undoes adding.
        worst = max(
            having, key=lambda host: ((SPOT in host.labels) == too_much_spot, *self._crowd(host, need.model), host.name)
        )
        self.counts[worst.name][need.model] -= 1
        if not self.counts[worst.name][need.model]:
            del self.counts[worst.name][need.model]
        return True

    def release(self, ready: Counts, missing: Mapping[str, int]) -> None:
        """Takes from leaving machines what is replaced or cannot be."""
        for model, need in self._needs.items():
            taking = sum(
                min(ready.get(host.name, {}).get(model, 0), self.counts[host.name].get(model, 0))
                for host in self._hosts
                if not host.leaving
            )
            unreplaced = need.replicas - taking
            for host in self._hosts:
                if host.leaving and model in self.counts[host.name]:
                    wanted = unreplaced if host.holds_out else unreplaced - missing.get(model, 0)
                    kept = min(max(wanted, 0), self.counts[host.name][model])
                    unreplaced -= kept
                    if kept:
                        self.counts[host.name][model] = kept
                    else:
                        del self.counts[host.name][model]

    def _fits(self, host: Host, need: Need) -> bool:
        if host.leaving or host.fixed or need.model in host.unable or not need.labels <= host.labels:
            return False
        if self._engines(host) >= host.room:
            return False
        if need.devices and self._used(host, "devices") + need.devices > host.devices:
            return False
        if need.cpus and host.cpus and self._used(host, "cpus") + need.cpus > host.cpus:
            return False
        return not host.memory or self._used(host, "memory") + need.memory <= host.memory

    def _crowd(self, host: Host, model: str) -> tuple[int, int, float]:
        """How crowded its zone, the machine itself and all of its room are."""
        in_zone = sum(
            self.counts[other.name].get(model, 0)
            for other in self._hosts
            if other.zone == host.zone and not other.leaving
        )
        return in_zone, self.counts[host.name].get(model, 0), self._engines(host) / max(host.room, 1)

    def _on_spot(self, model: str) -> int:
        return sum(
            self.counts[host.name].get(model, 0) for host in self._hosts if SPOT in host.labels and not host.leaving
        )

    def _engines(self, host: Host) -> int:
        return sum(self.counts[host.name].values())

    def _used(self, host: Host, what: Literal["devices", "cpus", "memory"]) -> float:
        found = self.counts[host.name].items()
        return sum(count * float(getattr(self._needs[model], what)) for model, count in found if model in self._needs)
