"""Where the machines of a fleet meet. `RedisRegistry` implements the same protocol as `MemoryRegistry`.

Invariants: a follower sees every change, in an order that is the same for all; what a process published is gone one
lease after the process died; only the controller of the newest term can write assignments.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.errors import PenstockError
from penstock.fleet.records import (
    Assignment,
    CommandRecord,
    DecisionRecord,
    EngineRecord,
    GatewayRecord,
    LoadRecord,
    MachineRecord,
    ModelRecord,
    OutcomeRecord,
    Record,
    key,
)


class OutOfTerm(PenstockError):
    """Another controller has been elected since."""


class RegistryUnavailable(PenstockError):
    """The registry does not answer; what was last known still holds."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Everything that is registered, at one moment; by id."""

    engines: dict[str, EngineRecord] = field(default_factory=dict)
    gateways: dict[str, GatewayRecord] = field(default_factory=dict)
    loads: dict[str, LoadRecord] = field(default_factory=dict)
    machines: dict[str, MachineRecord] = field(default_factory=dict)
    models: dict[str, ModelRecord] = field(default_factory=dict)
    assignments: dict[str, Assignment] = field(default_factory=dict)
    commands: dict[str, CommandRecord] = field(default_factory=dict)
    outcomes: dict[str, OutcomeRecord] = field(default_factory=dict)
    decisions: dict[str, DecisionRecord] = field(default_factory=dict)
    controller: str = ""
    """Who decides what runs where; empty: nobody at the moment."""
    term: int = 0

    @classmethod
    def of(cls, records: Iterable[Record], controller: str = "", term: int = 0) -> Fleet:
        fleet = cls(controller=controller, term=term)
        for record in records:
            match record:
                case EngineRecord():
                    fleet.engines[record.id] = record
                case GatewayRecord():
                    fleet.gateways[record.id] = record
                case LoadRecord():
                    fleet.loads[record.id] = record
                case MachineRecord():
                    fleet.machines[record.id] = record
                case ModelRecord():
                    fleet.models[record.id] = record
                case Assignment():
                    fleet.assignments[record.id] = record
                case CommandRecord():
                    fleet.commands[record.id] = record
                case OutcomeRecord():
                    fleet.outcomes[record.id] = record
                case DecisionRecord():
                    fleet.decisions[record.id] = record
        return fleet


class Registry(Protocol):
    """One process's connection to the registry."""

    async def publish(self, *records: Record) -> None:
        """Adds or replaces records. Those that do not last are kept alive until they are withdrawn or this is
        closed; while the registry is unavailable they are kept here and published as soon as it is back. An
        `Assignment` of an older term than the newest raises `OutOfTerm`."""

    async def withdraw(self, *records: Record) -> None:
        """Removes records; those that are not there are ignored."""

    def follow(self) -> AsyncIterator[Fleet]:
        """The fleet now and after every change. Changes that come faster than the caller reads are seen as one.
        While the registry is unavailable nothing is yielded: what was last seen still holds."""

    async def lead(self, holder: str) -> int | None:
        """Become or stay the controller: the term if `holder` now leads, None if another does. To be called well
        within a lease, again and again."""

    async def close(self) -> None:
        """Withdraws what does not last, also leadership."""


class MemoryFleet:
    """The records of a fleet whose processes are all in this one: for tests and simulation."""

    def __init__(self) -> None:
        self.records: dict[str, tuple[Record, MemoryRegistry]] = {}
        self.leader: tuple[str, MemoryRegistry] | None = None
        self.term = 0
        self.followers: set[asyncio.Event] = set()

    def snapshot(self) -> Fleet:
        controller = "" if self.leader is None else self.leader[0]
        return Fleet.of((record for record, _ in self.records.values()), controller, self.term)

    def changed(self) -> None:
        for event in self.followers:
            event.set()

    def lose(self, registry: MemoryRegistry) -> None:
        """The process of `registry` died and its lease has run out."""
        for name, (record, owner) in tuple(self.records.items()):
            if owner is registry and not record.lasting:
                del self.records[name]
        if self.leader is not None and self.leader[1] is registry:
            self.leader = None
        self.changed()


class MemoryRegistry:
    """One of the processes of a `MemoryFleet`."""

    def __init__(self, fleet: MemoryFleet) -> None:
        self._fleet = fleet

    async def publish(self, *records: Record) -> None:
        if any(isinstance(record, Assignment) and record.term < self._fleet.term for record in records):
            raise OutOfTerm("another controller has been elected")
        self._fleet.records |= {key(record): (record, self) for record in records}
        self._fleet.changed()

    async def withdraw(self, *records: Record) -> None:
        for record in records:
            self._fleet.records.pop(key(record), None)
        self._fleet.changed()

    async def follow(self) -> AsyncIterator[Fleet]:
        changed = asyncio.Event()
        self._fleet.followers.add(changed)
        try:
            while True:
                changed.clear()
                yield self._fleet.snapshot()
                await changed.wait()
        finally:
            self._fleet.followers.discard(changed)

    async def lead(self, holder: str) -> int | None:
        fleet = self._fleet
        if fleet.leader is None:
            fleet.leader, fleet.term = (holder, self), fleet.term + 1
            fleet.changed()
        return fleet.term if fleet.leader == (holder, self) else None

    async def close(self) -> None:
        self._fleet.lose(self)
