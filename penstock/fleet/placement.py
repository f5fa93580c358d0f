"""Which machine runs how many replicas of what: a pure function of the fleet.

What is counted are slots: the replicas of one variant of a model (its pool, role, grid and device), which are the same
to each other.

Invariants: nothing that runs is moved; replicas are only added where some are missing and taken away where there are
too many. A machine never gets more than fits (engines, devices, cores, memory, labels). Replicas that are there
already and fit no longer, because a machine has shrunk, stay. The result placed again is itself.

A new replica goes where it fits, in this order: on spot machines up to the model's spot share and on others beyond it;
into the zone with the fewest replicas of its slot; onto the machine with the fewest of them; onto the emptiest one;
onto the one with the fewest devices. Surplus ones go in the opposite order, those that are not ready first. When room
is scarce, the slot that lacks the largest share of its replicas comes first, and of equals the one with the largest
grid. The models of a time-slice group go to one machine, which must have room for all of them.

The replicas of a machine that leaves do not count, so replacements are placed at once; they stay until those are ready.
What cannot be replaced stays until the machine is about to go, if it said when, and otherwise not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.fleet.devices import Claim, packed

SPOT = "spot"
"""The label of machines that may be taken away at short notice."""

Counts = Mapping[str, Mapping[str, int]]
"""Replicas by machine and slot."""


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
    """Slots, or all slots of models, that it could not start lately."""
    fixed: bool = False
    """What it runs was said on the machine itself."""
    leaving: bool = False
    holds_out: bool = False
    """It leaves, but not yet."""
    plain: bool = False
    """It is of a version that does not know variants."""
    busy: float = 0.0
    """How much of it is in use, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Need:
    """How many replicas of a slot there should be, and what each of them takes."""

    slot: str
    replicas: int
    devices: int = 0
    cpus: float = 0
    memory: int = 0
    """Bytes on the host. Of both 0: not known."""
    labels: frozenset[str] = frozenset()
    spot: int = 0
    """How many of them should be on spot machines."""
    certain: tuple[int, ...] = ()
    """Devices by number, if not any."""
    share: float = 1.0
    """Of each device."""
    group: str = ""
    """Time-slice group: its slots are on one machine and have devices in turn."""
    model: str = ""
    """Of which the slot is a variant; empty: its replicas do not differ."""

    @property
    def claim(self) -> Claim:
        return Claim(self.devices, self.certain, self.share, self.group)


@dataclass(frozen=True, slots=True)
class Placement:
    counts: dict[str, dict[str, int]]
    """Replicas by machine and slot; every machine is listed."""
    missing: dict[str, int] = field(default_factory=dict)
    """Replicas that fit nowhere, by slot."""


def place(hosts: Sequence[Host], needs: Sequence[Need], present: Counts, ready: Counts) -> Placement:
    """`present`: replicas that run or were told to; those of slots that are not in `needs` stay as they are. `ready`:
    those that take requests."""
    plan = Plan(hosts, needs, present)
    for need in needs:
        while plan.staying(need.slot) > need.replicas and plan.take_away(need, ready):
            pass
    lacking = [need for need in needs if plan.staying(need.slot) < need.replicas]
    while lacking:
        need = min(lacking, key=lambda need: (plan.staying(need.slot) / need.replicas, -need.devices, need.slot))
        if not plan.add(need) or plan.staying(need.slot) == need.replicas:
            lacking.remove(need)
    missing = {need.slot: need.replicas - plan.staying(need.slot) for need in needs}
    missing = {slot: count for slot, count in missing.items() if count > 0}
    plan.release(ready, missing)
    return Placement(plan.counts, missing)


class Plan:
    """Counts of replicas that change."""

    def __init__(self, hosts: Sequence[Host], needs: Sequence[Need], present: Counts) -> None:
        self.hosts = sorted(hosts, key=lambda host: host.name)
        self._needs = {need.slot: need for need in needs}
        self.counts = {
            host.name: {slot: count for slot, count in present.get(host.name, {}).items() if count > 0}
            for host in self.hosts
        }

    def staying(self, slot: str) -> int:
        return sum(self.counts[host.name].get(slot, 0) for host in self.hosts if not host.leaving)

    def add(self, need: Need) -> bool:
        fitting = [host for host in self.hosts if self.fits(host, need)]
        if not fitting:
            return False
        wants_spot = self._on_spot(need.slot) < need.spot
        best = min(
            fitting, key=lambda host: ((SPOT in host.labels) != wants_spot, *self.crowd(host, need.slot), host.name)
        )
        self.change(best.name, need.slot, 1)
        return True

    def take_away(self, need: Need, ready: Counts) -> bool:
        having = [
            host for host in self.hosts if self.counts[host.name].get(need.slot) and not host.fixed and not host.leaving
        ]
        if not having:
            return False
        too_much_spot = self._on_spot(need.slot) > need.spot
        # Between equals the last by name, so that taking away undoes adding.
        worst = max(
            having,
            key=lambda host: (
                (SPOT in host.labels) == too_much_spot,
                self.counts[host.name][need.slot] > ready.get(host.name, {}).get(need.slot, 0),
                *self.crowd(host, need.slot),
                host.name,
            ),
        )
        self.change(worst.name, need.slot, -1)
        return True

    def change(self, host: str, slot: str, by: int) -> None:
        self.counts[host][slot] = self.counts[host].get(slot, 0) + by
        if not self.counts[host][slot]:
            del self.counts[host][slot]

    def release(self, ready: Counts, missing: Mapping[str, int]) -> None:
        """Takes from leaving machines what is replaced or cannot be."""
        for slot, need in self._needs.items():
            taking = sum(
                min(ready.get(host.name, {}).get(slot, 0), self.counts[host.name].get(slot, 0))
                for host in self.hosts
                if not host.leaving
            )
            unreplaced = need.replicas - taking
            for host in self.hosts:
                if host.leaving and slot in self.counts[host.name]:
                    wanted = unreplaced if host.holds_out else unreplaced - missing.get(slot, 0)
                    kept = min(max(wanted, 0), self.counts[host.name][slot])
                    unreplaced -= kept
                    self.change(host.name, slot, kept - self.counts[host.name][slot])

    def fits(self, host: Host, need: Need) -> bool:
        if host.leaving or host.fixed or host.unable & {need.slot, need.model} or not need.labels <= host.labels:
            return False
        if need.model and host.plain:
            return False
        more = [need]
        if need.group:
            others = [one for one in self._needs.values() if one.group == need.group and one.slot != need.slot]
            homes = {one.name for one in self.hosts for other in others if self.counts[one.name].get(other.slot)}
            homes -= {one.name for one in self.hosts if one.leaving}
            if homes and host.name not in homes:
                return False
            more += [one for one in others if one.replicas and not self.counts[host.name].get(one.slot)]
        if self._engines(host) + len(more) > host.room:
            return False
        needed = sum(one.cpus for one in more)
        if needed and host.cpus and self._used(host, "cpus") + needed > host.cpus:
            return False
        if host.memory and self._used(host, "memory") + sum(one.memory for one in more) > host.memory:
            return False
        if not any(one.devices for one in more):
            return True
        there = [(self._needs[slot], count) for slot, count in self.counts[host.name].items() if slot in self._needs]
        claims = [one.claim for one, count in there for _ in range(count)]
        return packed([*claims, *(one.claim for one in more)], host.devices)

    def crowd(self, host: Host, slot: str) -> tuple[int, int, float, int]:
        """How crowded its zone, the machine itself and all of its room are; then how many devices it has, so that those
        with many are left to large grids."""
        in_zone = sum(
            self.counts[other.name].get(slot, 0)
            for other in self.hosts
            if other.zone == host.zone and not other.leaving
        )
        fullness = self._engines(host) / max(host.room, 1)
        return in_zone, self.counts[host.name].get(slot, 0), fullness, host.devices

    def _on_spot(self, slot: str) -> int:
        return sum(
            self.counts[host.name].get(slot, 0) for host in self.hosts if SPOT in host.labels and not host.leaving
        )

    def _engines(self, host: Host) -> int:
        return sum(self.counts[host.name].values())

    def _used(self, host: Host, what: Literal["cpus", "memory"]) -> float:
        found = self.counts[host.name].items()
        return sum(count * float(getattr(self._needs[slot], what)) for slot, count in found if slot in self._needs)
