"""Moves replicas when they are spread unevenly or some machines are much busier than others: pure, one move at a time.

A move must help: afterwards the slot is spread more evenly over zones, then over machines; or the machines have more
equal shares of all engines; or the load is more equal. So moves come to an end, and none is undone by the next.
Replicas on machines that are pinned or leave are not moved, nor are time-slice groups, and none moves to or from spot
machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.fleet.placement import SPOT, Counts, Host, Need, Plan

GIVE_UP_S = 900.0
"""How long the new replica may take to start."""
BUSIER = 0.3
"""How much busier one machine must be than another, for its load alone to move a replica."""


@dataclass(frozen=True, slots=True)
class Move:
    """One replica to another machine."""

    slot: str
    source: str
    target: str
    why: str

    def __str__(self) -> str:
        return f"{self.slot} from {self.source} to {self.target}: {self.why}"


def next_move(hosts: Sequence[Host], needs: Sequence[Need], counts: Counts) -> Move | None:
    """The move that helps most; None when all is even enough. `counts`: what runs."""
    plan = Plan(hosts, needs, counts)
    found = list(_moves(plan, needs))
    return max(found, key=lambda found: found[0])[1] if found else None


def _moves(plan: Plan, needs: Sequence[Need]) -> Iterator[tuple[tuple[int, float, str], Move]]:
    for need in needs:
        for source in plan.hosts:
            if need.group or not plan.counts[source.name].get(need.slot) or source.fixed or source.leaving:
                continue
            for target in plan.hosts:
                if target is source or (SPOT in target.labels) != (SPOT in source.labels):
                    continue
                if plan.fits(target, need) and (helps := _helps(plan, need, source, target)) is not None:
                    rank, by, why = helps
                    yield (rank, by, need.slot), Move(need.slot, source.name, target.name, why)


def _helps(plan: Plan, need: Need, source: Host, target: Host) -> tuple[int, float, str] | None:
    """How much a move would help: what it evens out, and by how much."""
    here, there = plan.crowd(source, need.slot), plan.crowd(target, need.slot)
    if source.zone != target.zone and here[0] - there[0] != 1:
        # Over zones; with a difference of one it would only be the other zone's turn.
        return (3, here[0] - there[0], "its zone has more of them") if here[0] - there[0] >= 2 else None
    if source.zone != target.zone:
        return None
    if here[1] - there[1] >= 2:
        return 2, here[1] - there[1], "more of them are there than elsewhere"
    if here[1] - there[1] < 1:
        return None  # it would be the other way round then
    engines = {host.name: sum(plan.counts[host.name].values()) for host in (source, target)}
    sizes = {host.name: host.devices or host.cpus or host.room or 1 for host in (source, target)}
    left, right = (engines[source.name] - 1) / sizes[source.name], (engines[target.name] + 1) / sizes[target.name]
    if left > right:
        return 1, left - right, "the machine has more engines for its size"
    part = source.busy / max(engines[source.name], 1)
    if source.busy - target.busy >= BUSIER and engines[source.name] > 1 and target.busy + part < source.busy - part:
        return 0, source.busy - target.busy, "the machine is busier"
    return None


class Rebalancer:
    """Decides when to move: not before the fleet was uneven for `after_s`, and one replica at a time."""

    def __init__(self, after_s: float) -> None:
        """`after_s`: 0 for never."""
        self._after_s = after_s
        self._uneven_since: float | None = None
        self.move: Move | None = None
        """The one under way: both replicas are wanted until the new one is ready."""
        self._count = 0
        self._begun = 0.0

    def adjust(
        self, needs: list[Need], counts: Mapping[str, dict[str, int]], ready: Counts, hosts: Sequence[Host], now: float
    ) -> list[Need]:
        """The needs while a replica moves. `counts`, what runs or was told to, is changed: the new replica is added,
        and the old one taken away when the new one is ready."""
        move = self.move
        if move is None:
            return needs
        target = next((host for host in hosts if host.name == move.target and not host.leaving), None)
        lost = move.source not in counts or not counts[move.source].get(move.slot)
        if target is None or lost or move.slot in target.unable or not any(need.slot == move.slot for need in needs):
            self.move = None
            return needs
        there = counts[move.target]
        if ready.get(move.target, {}).get(move.slot, 0) >= self._count:
            counts[move.source][move.slot] -= 1
            there[move.slot] = max(there.get(move.slot, 0), self._count)
            self.move = None
            return needs
        if now - self._begun > GIVE_UP_S:
            there[move.slot] = min(there.get(move.slot, 0), self._count - 1)
            self.move = None
            return needs
        there[move.slot] = max(there.get(move.slot, 0), self._count)
        return [_more(need) if need.slot == move.slot else need for need in needs]

    def look(self, hosts: Sequence[Host], needs: Sequence[Need], counts: Counts, now: float, *, calm: bool) -> None:
        """After a decision. `calm`: everything that should run does, and nothing else changes."""
        if not self._after_s or self.move is not None:
            return
        found = next_move(hosts, needs, counts) if calm else None
        if found is None:
            self._uneven_since = None
        elif self._uneven_since is None:
            self._uneven_since = now
        elif now - self._uneven_since >= self._after_s:
            self._uneven_since = None
            self.move, self._begun = found, now
            self._count = counts.get(found.target, {}).get(found.slot, 0) + 1


def _more(need: Need) -> Need:
    return dataclasses.replace(need, replicas=need.replicas + 1)
