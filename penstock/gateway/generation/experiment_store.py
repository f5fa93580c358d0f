"""What all gateways know of an experiment: who is in which arm, what was counted of each, and what was changed when.

In a database, so that gateways share it and it outlives them; without one, in this process. A state is replaced only by
one whose version follows it, so of two gateways that decide at the same time one is heard. Counts are only ever added.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
from msgspec import Struct

from penstock.routing.experiments.allocation import Allocation
from penstock.routing.experiments.confidence import Moments
from penstock.storage import Database, Statement

MOST_EVENTS = 50
"""Changes that are shown."""
_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS experiments (name TEXT PRIMARY KEY, version BIGINT NOT NULL, state TEXT NOT NULL)",
        "CREATE TABLE IF NOT EXISTS experiment_counts (name TEXT NOT NULL, stage BIGINT NOT NULL, "
        "span BIGINT NOT NULL, arm TEXT NOT NULL, measure TEXT NOT NULL, n DOUBLE PRECISION NOT NULL, "
        "total DOUBLE PRECISION NOT NULL, squares DOUBLE PRECISION NOT NULL, "
        "PRIMARY KEY (name, stage, span, arm, measure))",
        "CREATE TABLE IF NOT EXISTS experiment_events (id TEXT PRIMARY KEY, name TEXT NOT NULL, "
        "at DOUBLE PRECISION NOT NULL, who TEXT NOT NULL, what TEXT NOT NULL, why TEXT NOT NULL)",
        "CREATE INDEX IF NOT EXISTS experiment_events_at ON experiment_events (name, at)",
    ),
)
_ADD = (
    "INSERT INTO experiment_counts (name, stage, span, arm, measure, n, total, squares) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name, stage, span, arm, measure) DO UPDATE SET "
    "n = experiment_counts.n + excluded.n, "
    "total = experiment_counts.total + excluded.total, squares = experiment_counts.squares + excluded.squares"
)


class ExperimentState(Struct, frozen=True):
    """Everything that decides who is in which arm."""

    version: int
    configured: dict[str, float]
    """The shares of the configuration when this was made; others in the configuration start a new stage."""
    intervals: dict[str, list[tuple[int, int]]]
    """Buckets of each canary."""
    begun_at: float
    stage: int = 1
    """Counts every change of shares; what is compared begins anew with each."""
    stage_at: float = 0.0
    reasons: dict[str, str] = {}
    """Of canaries that were rolled back: why."""

    def allocation(self) -> Allocation:
        return Allocation(self.intervals)


class CountKey(NamedTuple):
    """`span` 0: the whole stage; others: one time window."""

    name: str
    stage: int
    span: int
    arm: str
    measure: str


class Event(Struct, frozen=True):
    """A change, with who made it and why."""

    name: str
    at: float
    who: str
    what: str
    why: str = ""


SpanCounts = dict[str, dict[str, Moments]]
"""By arm and measure."""


class ExperimentStore(ABC):
    @abstractmethod
    async def states(self) -> dict[str, ExperimentState]: ...

    @abstractmethod
    async def save(self, name: str, state: ExperimentState, event: Event) -> bool:
        """Whether it is stored: not if another one has taken its version."""

    @abstractmethod
    async def add(self, counts: Mapping[CountKey, Moments]) -> None: ...

    @abstractmethod
    async def counts(self, name: str, stage: int, span: int) -> tuple[SpanCounts, SpanCounts]:
        """Of the whole stage, and of a time window; older windows are forgotten."""

    @abstractmethod
    async def events(self, name: str) -> list[Event]:
        """The newest first."""


class MemoryExperiments(ExperimentStore):
    """In this process only."""

    def __init__(self) -> None:
        self._states: dict[str, ExperimentState] = {}
        self._counts: defaultdict[CountKey, Moments] = defaultdict(Moments)
        self._events: list[Event] = []

    async def states(self) -> dict[str, ExperimentState]:
        return dict(self._states)

    async def save(self, name: str, state: ExperimentState, event: Event) -> bool:
        known = self._states.get(name)
        if (0 if known is None else known.version) + 1 != state.version:
            return False
        self._states[name] = state
        self._events = [*self._events[-MOST_EVENTS * len(self._states) :], event]
        return True

    async def add(self, counts: Mapping[CountKey, Moments]) -> None:
        for key, added in counts.items():
            self._counts[key] = self._counts[key].plus(added)

    async def counts(self, name: str, stage: int, span: int) -> tuple[SpanCounts, SpanCounts]:
        for key in [key for key in self._counts if key.name == name and 0 < key.span < span]:
            del self._counts[key]
        return _spans((key.span, key.arm, key.measure, found) for key, found in self._counts.items()
                      if (key.name, key.stage) == (name, stage) and key.span in (0, span))  # fmt: skip

    async def events(self, name: str) -> list[Event]:
        return [event for event in reversed(self._events) if event.name == name][:MOST_EVENTS]


class DatabaseExperiments(ExperimentStore):
    """In the store, for all gateways."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def prepare(self) -> None:
        await self._database.migrate("experiments", _VERSIONS)

    async def states(self) -> dict[str, ExperimentState]:
        rows = await self._database.fetch("SELECT name, state FROM experiments")
        return {name: msgspec.json.decode(state, type=ExperimentState) for name, state in rows}

    async def save(self, name: str, state: ExperimentState, event: Event) -> bool:
        encoded = msgspec.json.encode(state).decode()
        change: Statement
        if state.version == 1:
            change = (
                "INSERT INTO experiments (name, version, state) VALUES (?, ?, ?) ON CONFLICT (name) DO NOTHING",
                (name, 1, encoded),
            )
        else:
            change = (
                "UPDATE experiments SET version = ?, state = ? WHERE name = ? AND version = ?",
                (state.version, encoded, name, state.version - 1),
            )
        told = (
            "INSERT INTO experiment_events (id, name, at, who, what, why) VALUES (?, ?, ?, ?, ?, ?)",
            (uuid.uuid4().hex, event.name, event.at, event.who, event.what, event.why),
        )
        return (await self._database.transact([change, told], guarded=True))[0] == 1

    async def add(self, counts: Mapping[CountKey, Moments]) -> None:
        rows = [(_ADD, (*key, added.n, added.total, added.squares)) for key, added in counts.items()]
        await self._database.transact(rows, durable=False)

    async def counts(self, name: str, stage: int, span: int) -> tuple[SpanCounts, SpanCounts]:
        rows = await self._database.fetch(
            "SELECT span, arm, measure, n, total, squares FROM experiment_counts WHERE name = ? AND stage = ?",
            name,
            stage,
        )
        if any(0 < row[0] < span for row in rows):
            await self._database.execute(
                "DELETE FROM experiment_counts WHERE name = ? AND span > 0 AND span < ?", name, span
            )
        return _spans(
            (at, arm, measure, Moments(n, total, squares))
            for at, arm, measure, n, total, squares in rows
            if at in (0, span)
        )

    async def events(self, name: str) -> list[Event]:
        rows = await self._database.fetch(
            "SELECT name, at, who, what, why FROM experiment_events WHERE name = ? "
            f"ORDER BY at DESC LIMIT {MOST_EVENTS}",
            name,
        )
        return [Event(*row) for row in rows]


def _spans(rows: Iterable[tuple[int, str, str, Moments]]) -> tuple[SpanCounts, SpanCounts]:
    found: tuple[SpanCounts, SpanCounts] = ({}, {})
    for span, arm, measure, seen in rows:
        found[span > 0].setdefault(arm, {})[measure] = seen
    return found
