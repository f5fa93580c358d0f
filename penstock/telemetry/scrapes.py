"""Computes rates and percentiles from two scrapes of `/metrics`. No state, no I/O.

A counter that fell was reset because its process restarted: its current value is its growth. Percentiles cover the
requests between the two scrapes and are interpolated within their bucket, as in Prometheus.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = Mapping[str, str]


class Scrape:
    """One parsed reading of `/metrics`."""

    def __init__(self, text: str, at: float) -> None:
        self.at = at
        self._series: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._series.setdefault(sample.name, []).append((sample.labels, sample.value))

    def series(self, name: str, **where: str) -> Iterator[tuple[Labels, float]]:
        return (
            (labels, value)
            for labels, value in self._series.get(name, ())
            if all(labels.get(label) == wanted for label, wanted in where.items())
        )

    def sum(self, name: str, **where: str) -> float:
        return sum(value for _, value in self.series(name, **where))

    def most(self, name: str, **where: str) -> float | None:
        """The largest value; None when there is none."""
        return max((value for _, value in self.series(name, **where)), default=None)


@dataclass(frozen=True, slots=True)
class Interval:
    """The changes between two scrapes."""

    before: Scrape
    after: Scrape

    @property
    def seconds(self) -> float:
        return max(self.after.at - self.before.at, 1e-9)

    def rate(self, name: str, **where: str) -> float:
        return sum(grown for _, grown in self._growth(name, where)) / self.seconds

    def rates(self, name: str, label: str) -> dict[str, float]:
        """Rates per second by the value of a label; series that did not grow are left out."""
        found: dict[str, float] = {}
        for labels, grown in self._growth(name, {}):
            if grown > 0:
                found[labels[label]] = found.get(labels[label], 0.0) + grown / self.seconds
        return found

    def ratio(self, above: str, below: str, **where: str) -> float | None:
        rate = self.rate(below, **where)
        return self.rate(above, **where) / rate if rate else None

    def quantile(self, q: float, histogram: str, **where: str) -> float | None:
        """A quantile of a histogram; None when nothing was observed."""
        buckets: dict[float, float] = {}
        for labels, grown in self._growth(f"{histogram}_bucket", where):
            bound = float(labels["le"])
            buckets[bound] = buckets.get(bound, 0.0) + grown
        return quantile(q, buckets)

    def _growth(self, name: str, where: Labels) -> Iterator[tuple[Labels, float]]:
        old = {tuple(sorted(labels.items())): value for labels, value in self.before.series(name, **where)}
        for labels, value in self.after.series(name, **where):
            known = old.get(tuple(sorted(labels.items())), 0.0)
            yield labels, value - known if value >= known else value


def quantile(q: float, buckets: Mapping[float, float]) -> float | None:
    """A quantile of cumulative counts by upper bound."""
    total = buckets.get(math.inf, 0.0)
    if not total:
        return None
    rank, low, below = q * total, 0.0, 0.0
    for bound in sorted(buckets):
        count = buckets[bound]
        if count >= rank:
            if math.isinf(bound):
                return low  # nothing is known beyond the last bound
            return low + (bound - low) * ((rank - below) / (count - below) if count > below else 1.0)
        low, below = bound, count
    return low
