"""What happened in a simulation: one row per request, samples over time, totals.

Rows are columns of numbers, about 120 bytes per request, so that millions fit; names (tenants, labels, reasons) are
stored once. Gaps between tokens are counted in buckets per tenant (`gaps`). Times are seconds since the beginning.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Literal

from penstock.simulation.gaps import GapCounts
from penstock.simulation.job import Job

Status = Literal["served", "refused", "lost", "unfinished"]
"""`refused`: never began, with a time to retry (see `RequestRow.reason`). `lost`: admitted, but not finished: its
replicas died, none was there in time, or its deadline passed. `unfinished`: under way when the simulation ended."""
STATUSES: tuple[Status, ...] = ("served", "refused", "lost", "unfinished")


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request, or one attempt of a client that tries again."""

    at: float
    first_at: float
    """When its client sent it first; differs from `at` in a retry."""
    tenant: str
    label: str
    session: str
    rank: int
    attempt: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    """Delivered."""
    queued_s: float | None
    """From arrival to admission; None: not admitted."""
    first_token: float | None
    end: float
    longest_gap: float
    status: Status
    reason: str
    """Why it was refused or lost; empty otherwise."""
    retry_after_s: float | None
    replica: str
    """The last one that it was on."""
    preemptions: int
    moves: int
    """How often another replica continued it."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.at

    @property
    def e2e_s(self) -> float:
        return self.end - self.at

    @property
    def mean_gap_s(self) -> float | None:
        """Mean time per output token after the first; None: there was only one."""
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.end - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at one moment; counts of requests are since the sample before it."""

    at: float
    arrived: int
    served: int
    refused: int
    lost: int
    tokens: int
    """Generated."""
    queued: int
    """Waiting for admission, and parked for want of a replica."""
    running: int
    waiting: int
    """In the engines."""
    kv_use: float
    """Used part of all KV caches, and of the fullest."""
    kv_use_most: float
    ready: int
    starting: int
    draining: int
    desired: int
    spot: int
    """Of the ready ones."""
    gpu_seconds: float
    """So far, on demand and spot."""
    spot_gpu_seconds: float


@dataclass(slots=True)
class Totals:
    """Over the whole run."""

    seconds: float = 0.0
    """Simulated."""
    cpu_s: float = 0.0
    """That one core needed to simulate them, other programs not counted."""
    arrived: int = 0
    served: int = 0
    refused: int = 0
    lost: int = 0
    unfinished: int = 0
    prompt_tokens: int = 0
    """Of served requests; so are the cached ones."""
    cached_tokens: int = 0
    output_tokens: int = 0
    """Delivered, to anybody."""
    engine_prompt_tokens: int = 0
    """Prompts as engines first saw them, and how much of them was in a prefix cache."""
    engine_cached_tokens: int = 0
    host_cached_tokens: int = 0
    """Of those, what came back from host memory."""
    steps: int = 0
    preemptions: int = 0
    failovers: int = 0
    starts: int = 0
    """Replicas started, the first ones included."""
    failures: int = 0
    interruptions: int = 0
    gpu_seconds: float = 0.0
    """On demand."""
    spot_gpu_seconds: float = 0.0
    cost: float = 0.0
    """In dollars."""

    @property
    def speed(self) -> float:
        """Simulated seconds per second of one core."""
        return self.seconds / self.cpu_s if self.cpu_s else 0.0


class _Names:
    """Words as numbers."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self.words: list[str] = []

    def __call__(self, word: str) -> int:
        index = self._index.get(word)
        if index is None:
            index = self._index[word] = len(self.words)
            self.words.append(word)
        return index


_TIMES = ("at", "first_at", "queued_s", "first_token", "end", "longest_gap", "retry_after_s")
_COUNTS = ("tenant", "label", "session", "reason", "replica", "prompt_tokens", "cached_tokens", "output_tokens")
_SMALL = ("rank", "attempt", "status", "preemptions", "moves")
_WORDS = ("tenant", "label", "session", "reason", "replica")


class Requests:
    """Rows of all requests, in the order in which they ended."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float] | array[int]] = {name: array("d") for name in _TIMES}
        self._columns.update({name: array("i") for name in _COUNTS})
        self._columns.update({name: array("h") for name in _SMALL})
        self._names = {name: _Names() for name in _WORDS}
        self._order = (*_TIMES, *_COUNTS, *_SMALL)
        self._appends = [self._columns[name].append for name in self._order]

    def __len__(self) -> int:
        return len(self._columns["at"])

    def column(self, name: str) -> array[float] | array[int]:
        """One figure of all rows, as `RequestRow` has it; times that do not exist are NaN and words are indices into
        `words(name)`, statuses into `STATUSES`."""
        return self._columns[name]

    def words(self, name: str) -> list[str]:
        return self._names[name].words

    def add(self, job: Job, status: Status, end: float, reason: str, retry_after_s: float | None) -> None:
        arrival, names = job.arrival, self._names
        row: tuple[float, ...] = (
            arrival.at,
            arrival.at if arrival.first_at is None else arrival.first_at,
            nan if job.granted is None else job.granted - job.arrived,
            nan if job.first_token is None else job.first_token,
            end,
            job.longest_gap,
            nan if retry_after_s is None else retry_after_s,
            names["tenant"](arrival.tenant),
            names["label"](arrival.label),
            names["session"](arrival.session),
            names["reason"](reason),
            names["replica"]("" if job.replica is None else job.replica.name),
            job.prompt_tokens,
            job.cached_tokens,
            job.delivered,
            arrival.rank,
            min(arrival.attempt, 32_767),
            STATUSES.index(status),
            min(job.preemptions, 32_767),
            job.moves,
        )
        for append, value in zip(self._appends, row, strict=True):
            append(value)  # type: ignore[arg-type]

    def row(self, index: int) -> RequestRow:
        values = {name: self._columns[name][index] for name in self._order}
        words = {name: self._names[name].words[int(values[name])] for name in _WORDS}
        times = {name: None if isnan(values[name]) else values[name] for name in _TIMES}
        rest = {name: int(values[name]) for name in (*_COUNTS, *_SMALL)}
        return RequestRow(**{**rest, **times, **words, "status": STATUSES[rest["status"]]})  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[RequestRow]:
        return (self.row(index) for index in range(len(self)))


@dataclass(slots=True)
class Record:
    """Everything that is known of a run."""

    requests: Requests = field(default_factory=Requests)
    samples: list[Sample] = field(default_factory=list)
    gaps: dict[str, GapCounts] = field(default_factory=dict)
    """By tenant."""
    totals: Totals = field(default_factory=Totals)
    notes: list[tuple[float, str]] = field(default_factory=list)
    """What happened to the fleet: starts, failures, notices, scaling; when and in words."""

    def gaps_of(self, tenant: str) -> GapCounts:
        found = self.gaps.get(tenant)
        if found is None:
            found = self.gaps[tenant] = GapCounts()
        return found

    def all_gaps(self) -> GapCounts:
        total = GapCounts()
        for counts in self.gaps.values():
            total.merge(counts)
        return total

    def ended(self, job: Job, status: Status, end: float, reason: str = "", retry_after_s: float | None = None) -> None:
        """Counts a request that is over; called once for each."""
        self.requests.add(job, status, end, reason, retry_after_s)
        totals = self.totals
        totals.output_tokens += job.delivered
        if status == "served":
            totals.served += 1
            totals.prompt_tokens += job.prompt_tokens
            totals.cached_tokens += job.cached_tokens
        elif status == "refused":
            totals.refused += 1
        elif status == "lost":
            totals.lost += 1
        else:
            totals.unfinished += 1
