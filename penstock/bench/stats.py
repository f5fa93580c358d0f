"""Percentiles and medians over small samples. Pure functions; an empty sample is None, never zero."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one latency, in seconds."""

    p50: float
    p90: float
    p99: float
    mean: float
    largest: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the two nearest ranks of an ascending, non-empty sample."""
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def percentiles(values: Iterable[float]) -> Percentiles | None:
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, fraction) for fraction in (0.5, 0.9, 0.99))
    return Percentiles(p50, p90, p99, statistics.fmean(ordered), ordered[-1])


def median(values: Iterable[float | None]) -> float | None:
    """Median of the values that exist."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
