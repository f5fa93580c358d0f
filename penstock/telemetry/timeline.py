"""The timeline of a request: its phases in the gateway, and in the engine by the engine's own clock.

While a request runs, only timestamps are recorded. The phases are computed on demand, for the log of slow requests, the
trace exporter and `penstock trace`. The engine reports how long a request waited, prefilled and decoded; these
durations are placed relative to the moment its first token reached the gateway, so the clocks need not agree.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import msgspec

from penstock.telemetry.context import TraceContext
from penstock.telemetry.logging import RequestRecord

MOST_PHASES = 256
"""Maximum per request: many tool calls or choices must not make a timeline grow without bound."""


Detail = dict[str, str | int | float]
Shown = dict[str, Any]
"""A timeline as JSON values."""


class Phase(msgspec.Struct, frozen=True):
    """A phase of a request, in seconds from the request's start."""

    name: str
    start: float
    end: float
    detail: Detail = {}

    @property
    def seconds(self) -> float:
        return self.end - self.start


class EngineRun(msgspec.Struct, frozen=True):
    """One choice in an engine. Timestamps are from the gateway's clock, durations from the engine's."""

    engine: str
    model: str
    choice: int
    asked_at: float | None
    """When it entered admission; None without admission."""
    submitted_at: float | None
    """When it was sent to an engine; None if it never was."""
    ended_at: float
    """When the gateway was done with it, whatever the outcome."""
    first_at: float | None
    last_at: float | None
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    outcome: str
    purpose: str = ""
    """Its purpose, if it was not the answer itself (for example a summary)."""
    place: dict[str, str] = {}
    """The pool and region that it ran in, and why it might."""

    def phases(self) -> Iterator[tuple[str, float, float, Detail]]:
        if self.asked_at is not None:
            yield "admission", self.asked_at, self.ended_at if self.submitted_at is None else self.submitted_at, {}
        if self.submitted_at is None:
            return
        about: Detail = {"engine": self.engine, "model": self.model, "choice": self.choice, **self.place}
        if self.purpose:
            about["for"] = self.purpose
        if self.first_at is None:
            yield "engine", self.submitted_at, self.ended_at, {**about, "outcome": self.outcome}
            return
        tokens: Detail = {"prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens}
        if self.prefill_s is None:  # a remote server does not report queue and prefill times
            yield "engine", self.submitted_at, self.first_at, {**about, **tokens}
        else:
            prefill_at = self.first_at - self.prefill_s
            queue_at = max(prefill_at - (self.queue_s or 0.0), self.submitted_at)
            yield "queue", queue_at, max(prefill_at, queue_at), about
            yield "prefill", max(prefill_at, queue_at), self.first_at, {**about, **tokens}
        last_at = self.last_at if self.last_at is not None else self.first_at
        if self.decode_s is not None:
            last_at = min(self.first_at + self.decode_s, self.ended_at)
        end: Detail = {"completion_tokens": self.completion_tokens, "outcome": self.outcome}
        yield "decode", self.first_at, max(last_at, self.first_at), {**about, **end}


class Timeline:
    """The recorded timestamps of one request; `record` describes the request."""

    __slots__ = (
        "_phases",
        "asked_model",
        "ended_at",
        "record",
        "response_id",
        "runs",
        "selection",
        "session",
        "started_at",
        "texts",
        "trace",
    )

    def __init__(self, record: RequestRecord, started_at: float, trace: TraceContext | None = None) -> None:
        self.record = record
        self.started_at = started_at
        self.ended_at: float | None = None
        self.trace = trace
        self.asked_model = ""
        self.response_id = ""
        self.selection = ""
        """Why this model answers (`x-penstock-route`)."""
        self.session = ""
        self.runs: list[EngineRun] = []
        self.texts: list[tuple[str, str]] | None = None
        """Prompts and answers, only if the configuration enables recording them."""
        self._phases: list[tuple[str, float, float]] = []

    def note(self, name: str, start: float, end: float | None = None) -> None:
        """Records a phase from `start` to `end` (by default now)."""
        if len(self._phases) < MOST_PHASES:
            self._phases.append((name, start, monotonic() if end is None else end))

    def follow(self, name: str) -> None:
        """Records a phase from the end of the previous one until now."""
        before = self._phases[-1][2] if self._phases else self.started_at
        self.note(name, max(before, self.runs[-1].ended_at) if self.runs else before)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = monotonic()
        try:
            yield
        finally:
            self.note(name, start)

    def ran(self, runs: list[EngineRun]) -> None:
        if len(self.runs) < MOST_PHASES:
            self.runs += runs

    @property
    def total_s(self) -> float:
        return (monotonic() if self.ended_at is None else self.ended_at) - self.started_at

    def phases(self) -> list[Phase]:
        """All phases in chronological order."""
        zero = self.started_at
        found = [Phase(name, start - zero, end - zero) for name, start, end in self._phases]
        for run in self.runs:
            found += (Phase(name, start - zero, end - zero, detail) for name, start, end, detail in run.phases())
        return sorted(found, key=lambda phase: (phase.start, phase.end))

    def shown(self) -> Shown:
        """The timeline as the API returns it."""
        return {
            "object": "trace",
            **msgspec.structs.asdict(self.record),
            "response_id": self.response_id or None,
            "asked_model": self.asked_model or None,
            "selection": self.selection or None,
            "session": self.session or None,
            "trace_id": None if self.trace is None else self.trace.trace_id,
            "phases": [
                {
                    "name": phase.name,
                    "start_ms": round(phase.start * 1000, 3),
                    "duration_ms": round(phase.seconds * 1000, 3),
                    "detail": phase.detail,
                }
                for phase in self.phases()
            ],
        }

    def breakdown(self) -> dict[str, float]:
        """Milliseconds per phase name."""
        sums: dict[str, float] = {}
        for phase in self.phases():
            sums[phase.name] = sums.get(phase.name, 0.0) + phase.seconds * 1000
        return {name: round(value, 3) for name, value in sums.items()}


class TraceQuery(msgspec.Struct, frozen=True):
    """Selects timelines: the newest `limit` of a tenant (None: of all tenants) and of one of its users (None: of all
    users), or those of one request id."""

    limit: int = 1
    tenant: str | None = None
    request_id: str | None = None
    user: str | None = None


class RecentTimelines:
    """The newest timelines of this process, at most `most`."""

    def __init__(self, most: int) -> None:
        self._kept: deque[Timeline] = deque(maxlen=most)

    def add(self, timeline: Timeline) -> None:
        self._kept.append(timeline)

    def find(self, query: TraceQuery) -> list[Shown]:
        """Matching timelines, newest first."""
        matching = (
            item
            for item in reversed(self._kept)
            if (query.tenant is None or item.record.tenant == query.tenant)
            and (query.user is None or item.record.user_id == query.user)
            and (query.request_id is None or item.record.request_id == query.request_id)
        )
        return [item.shown() for item in itertools.islice(matching, query.limit)]


def newest(found: list[Shown], limit: int) -> list[Shown]:
    """The newest timelines among those found by several processes."""
    return sorted(found, key=lambda entry: float(entry["timestamp"]), reverse=True)[:limit]
