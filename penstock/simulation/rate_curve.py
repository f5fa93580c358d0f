"""A rate that changes with time: a day's curve and spikes, as consecutive pieces of constant rate.

Arrivals of any pattern are made at one request per unit of time and carried over to the clock by the inverse of the
integrated rate, so a pattern keeps its character (even, random, in bursts) whatever the rate does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.planning.workload import HOURS, Curve

PIECE_S = 300.0
"""Longest piece of a day's curve that has one rate."""


@dataclass(frozen=True, slots=True)
class Surge:
    """A span of time in which `factor` times as many requests arrive."""

    begin: float
    end: float
    factor: float


class RateCurve:
    """Requests per second over the simulated time."""

    def __init__(
        self, rate: float, seconds: float, *, curve: Curve | None = None, start_s: float = 0.0,
        surges: Sequence[Surge] = (),
    ) -> None:  # fmt: skip
        self._rate = rate
        self._hours = None if curve is None or len(set(curve.hours)) == 1 else curve.hours
        self._start_s = start_s
        self._surges = surges
        edges = {0.0, seconds}
        edges.update(edge for surge in surges for edge in (surge.begin, surge.end) if 0.0 < edge < seconds)
        if self._hours is not None:
            edges.update(PIECE_S * index for index in range(1, int(seconds / PIECE_S) + 1))
        self._edges = sorted(edges)

    def at(self, time: float) -> float:
        """Between the middles of two hours the curve is a straight line, so its mean over a day stays 1."""
        rate = self._rate
        if self._hours is not None:
            place = (self._start_s + time) / 3600.0 - 0.5
            hour = int(place // 1)
            part = place - hour
            rate *= (1 - part) * self._hours[hour % HOURS] + part * self._hours[(hour + 1) % HOURS]
        for surge in self._surges:
            if surge.begin <= time < surge.end:
                rate *= surge.factor
        return rate

    @property
    def total(self) -> float:
        """Requests that arrive, on average."""
        return sum((end - begin) * rate for begin, end, rate in self._pieces())

    @property
    def peak(self) -> float:
        return max(rate for _, _, rate in self._pieces())

    def times(self, positions: Iterable[float]) -> Iterator[float]:
        """The times of arrivals whose positions, in ascending order, were made at one per unit of time."""
        source = iter(positions)
        position, done = next(source), 0.0
        for begin, end, rate in self._pieces():
            held = (end - begin) * rate
            while position < done + held:
                yield begin + (position - done) / rate
                position = next(source)
            done += held

    def _pieces(self) -> Iterator[tuple[float, float, float]]:
        for begin, end in zip(self._edges, self._edges[1:], strict=False):
            yield begin, end, self.at((begin + end) / 2)
