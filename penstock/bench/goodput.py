"""Goodput: requests per second that met their objectives, and the highest rate at which nearly all of them do.

A rate is looked for by halving: between the highest that was kept and the lowest that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.bench import stats

KEPT = 0.95
"""Share of the requests that must keep their objectives."""


@dataclass(frozen=True, slots=True)
class Served:
    """A request that succeeded. Seconds; `due`, `first` and `end` after the start of the run."""

    due: float
    first: float
    end: float
    per_token: float | None
    """First to last piece of text, over the tokens after the first; None for a single token."""
    slow_gap: float | None = None
    """Between two pieces of text; 99% of its gaps are shorter. None: a single piece."""

    @property
    def ttft(self) -> float:
        return self.first - self.due

    @property
    def latency(self) -> float:
        return self.end - self.due


@dataclass(frozen=True, slots=True)
class Objectives:
    """Latency objectives of a request, in seconds; None: no limit."""

    ttft: float | None = None
    per_token: float | None = None
    latency: float | None = None
    gap: float | None = None
    """Of 99% of the gaps of a request."""

    def __bool__(self) -> bool:
        return self != Objectives()

    def met_by(self, request: Served) -> bool:
        pairs = (
            (request.ttft, self.ttft),
            (request.per_token, self.per_token),
            (request.latency, self.latency),
            (request.slow_gap, self.gap),
        )
        return all(took is None or limit is None or took <= limit for took, limit in pairs)

    def met(self, requests: Iterable[Served]) -> int:
        return sum(self.met_by(request) for request in requests)

    def __str__(self) -> str:
        named = (("TTFT", self.ttft), ("TPOT", self.per_token), ("E2E", self.latency), ("gap p99", self.gap))
        return ", ".join(f"{name} {limit * 1e3:,.0f} ms" for name, limit in named if limit is not None)


@dataclass(frozen=True, slots=True)
class AtRate:
    """What requests saw at one rate. Seconds."""

    rate: float
    kept: float
    """Share that kept its objectives."""
    ttft: stats.Percentiles
    gap: stats.Percentiles
    tokens_per_s: float


def highest_rate(measure: Callable[[float], AtRate], low: float, high: float, runs: int) -> tuple[float, list[AtRate]]:
    """The highest rate that is known to be kept (0: not even `low`), and every measurement."""
    found, kept = [measure(low)], 0.0
    if found[0].kept < KEPT:
        return 0.0, found
    kept = low
    for _ in range(runs - 1):
        rate = (kept + high) / 2
        found.append(measure(rate))
        if found[-1].kept >= KEPT:
            kept = rate
        else:
            high = rate
    return kept, found
