"""Goodput: requests per second that met their objectives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Served:
    """A request that succeeded. Seconds; `due`, `first` and `end` after the start of the run."""

    due: float
    first: float
    end: float
    per_token: float | None
    """First to last piece of text, over the tokens after the first; None for a single token."""

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

    def __bool__(self) -> bool:
        return self != Objectives()

    def met_by(self, request: Served) -> bool:
        pairs = ((request.ttft, self.ttft), (request.per_token, self.per_token), (request.latency, self.latency))
        return all(took is None or limit is None or took <= limit for took, limit in pairs)

    def met(self, requests: Iterable[Served]) -> int:
        return sum(self.met_by(request) for request in requests)

    def __str__(self) -> str:
        named = (("TTFT", self.ttft), ("TPOT", self.per_token), ("E2E", self.latency))
        return ", ".join(f"{name} {limit * 1e3:,.0f} ms" for name, limit in named if limit is not None)
