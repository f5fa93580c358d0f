"""Confidence sequences: intervals that hold at all times at once, however often somebody looks.

An ordinary 99% interval that is looked at after every request is wrong far more often than in 1% of all experiments. A
confidence sequence is wrong at any time at all with the stated probability at most.

`bounded`, for values from 0 to 1 (errors, votes, grades): with n values that sum to s, p is in the interval unless

    B(s + 1/2, n - s + 1/2) / (B(1/2, 1/2) p^s (1 - p)^(n - s))  >=  1 / alpha

The left side is the likelihood of the values averaged over all rates (Jeffreys prior), relative to that of p. If p is
the true mean its expectation is at most 1 at every time, so by Ville's inequality it ever reaches 1 / alpha with
probability at most alpha. Exact at every n.

`mean`, for values without bounds (logarithms of latencies, costs): mean +- sd sqrt(2 (n r + 1) / (n^2 r) ln(1 +
sqrt(n r + 1) / alpha)), where r makes it narrowest near `TIGHT` values. It holds asymptotically (the standard deviation
is estimated), so there is none below `FEWEST` values. Either side alone is wrong with probability alpha / 2 at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

TIGHT = 500
"""Number of values for which `mean` is narrowest."""
FEWEST = 30
_STEPS = 40


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Moments:
    """What is known of values: how many, their sum and the sum of their squares."""

    n: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def plus(self, other: Moments) -> Moments:
        return Moments(self.n + other.n, self.total + other.total, self.squares + other.squares)

    def with_value(self, value: float) -> Moments:
        return Moments(self.n + 1, self.total + value, self.squares + value * value)

    @property
    def mean(self) -> float:
        return self.total / self.n if self.n else math.nan

    @property
    def deviation(self) -> float:
        if self.n < 2:
            return math.nan
        return math.sqrt(max(self.squares - self.total * self.total / self.n, 0.0) / (self.n - 1))


def bounded(seen: Moments, alpha: float) -> Interval:
    """For values from 0 to 1. Without any it is the whole range."""
    n, total = seen.n, min(max(seen.total, 0.0), seen.n)
    if n <= 0:
        return Interval(0.0, 1.0)
    evidence = _log_beta(total + 0.5, n - total + 0.5) - _log_beta(0.5, 0.5) - math.log(1 / alpha)

    def inside(p: float) -> bool:
        return evidence < _term(total, p) + _term(n - total, 1 - p)

    best = total / n
    return Interval(_edge(best, 0.0, inside), _edge(best, 1.0, inside))


def mean(seen: Moments, alpha: float) -> Interval | None:
    """For values without bounds; None while there are too few."""
    if seen.n < FEWEST:
        return None
    rate = (-2 * math.log(alpha) + math.log(1 - 2 * math.log(alpha))) / TIGHT
    spread = seen.n * rate + 1
    width = seen.deviation * math.sqrt(2 * spread / (seen.n * seen.n * rate) * math.log(1 + math.sqrt(spread) / alpha))
    return Interval(seen.mean - width, seen.mean + width)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _term(count: float, p: float) -> float:
    return 0.0 if count <= 0 else -math.inf if p <= 0 else count * math.log(p)


def _edge(inner: float, outer: float, inside: Callable[[float], bool]) -> float:
    """Where the interval ends between its best value and the end of the range, by bisection, rounded outwards."""
    if inside(outer):
        return outer
    for _ in range(_STEPS):
        middle = (inner + outer) / 2
        if inside(middle):
            inner = middle
        else:
            outer = middle
    return outer
