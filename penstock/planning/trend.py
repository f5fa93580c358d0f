"""The trend of a measured load and when it reaches a limit: a straight line, times the usual shape of a day once two
days are known.

A slope comes with its 90% interval, widened for measurements that resemble their neighbours, so that noise is not
reported as growth. A trend is trusted for twice as long as it was observed and no longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

HOUR = 3600.0
DAY = 24 * HOUR
SEASON_DAYS = 2
"""Whole days after which the shape of a day is used."""
LEAST_POINTS = 10
LEAST_GROWTH = 0.01
TRUST = 2.0
"""How far a trend is extended, in multiples of the time it was observed."""
_Z = 1.6449
"""Quantile of the normal distribution for a two-sided 90% interval."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A mean over some time."""

    at: float
    """The middle of that time, in seconds since 1970."""
    value: float


@dataclass(frozen=True, slots=True)
class Trend:
    """A line through measurements, times the shape of a day."""

    origin: float
    """The time at which the line has the value `level`."""
    level: float
    slope: float
    """Per second, of a mean hour of the day."""
    slope_low: float
    """The 90% interval of the slope."""
    slope_high: float
    season: tuple[float, ...]
    """Load of each hour of the day (UTC) relative to the mean; empty: not known yet."""
    last: float
    span_s: float
    """How long was observed, and until when."""

    @property
    def growing(self) -> bool:
        """Whether the whole interval of the slope is above zero, by more than a hundredth of the load in the time that
        was observed."""
        return self.slope_low * self.span_s > LEAST_GROWTH * self.level

    @property
    def horizon_s(self) -> float:
        """How long after the last measurement the trend is trusted."""
        return TRUST * self.span_s

    def at(self, when: float, slope: float | None = None) -> float:
        line = self.level + (self.slope if slope is None else slope) * (when - self.origin)
        return max(line, 0.0) * _season(self.season, when)


@dataclass(frozen=True, slots=True)
class Crossing:
    """When a trend reaches a limit, in seconds after its last measurement. None: not within the horizon."""

    likely_s: float | None
    earliest_s: float | None
    latest_s: float | None


def fit_trend(samples: Sequence[Sample]) -> Trend | None:
    """The trend of samples in order of time; None when there are too few."""
    if len(samples) < LEAST_POINTS:
        return None
    span = samples[-1].at - samples[0].at
    season: tuple[float, ...] = ()
    if span >= SEASON_DAYS * DAY - HOUR:
        season = _shape_of_a_day(samples)
    return _fit(samples, season, span)


def crossing(trend: Trend, limit: float) -> Crossing:
    """When the trend first reaches `limit`. The earliest and latest time follow from the interval of the slope."""

    def first(slope: float) -> float | None:
        if trend.season:
            return _first_hour(lambda when: trend.at(when, slope) >= limit, trend.last, trend.horizon_s)
        # The interval is that of the slope around the centre of the measurements, where the line is best known.
        if trend.at(trend.last, slope) >= limit:
            return 0.0
        if slope <= 0:
            return None
        ahead = trend.origin + (limit - trend.level) / slope - trend.last
        return max(ahead, 0.0) if ahead <= trend.horizon_s else None

    return Crossing(first(trend.slope), first(trend.slope_high), first(trend.slope_low))


def _first_hour(reached: Callable[[float], bool], start: float, horizon_s: float) -> float | None:
    """The start of the first hour in which the limit is reached."""
    if reached(start):
        return 0.0
    hour = (math.floor(start / HOUR) + 1) * HOUR
    while hour - start <= horizon_s:
        if reached(hour + HOUR / 2):
            return hour - start
        hour += HOUR
    return None


def _season(season: Sequence[float], when: float) -> float:
    return season[int(when % DAY // HOUR)] if season else 1.0


def _shape_of_a_day(samples: Sequence[Sample]) -> tuple[float, ...]:
    """The mean ratio of each hour of the day to the line through all samples; the mean of all hours is 1."""
    line = _fit(samples, (), samples[-1].at - samples[0].at)
    mean = sum(sample.value for sample in samples) / len(samples)
    if mean <= 0:
        return ()
    ratios: list[list[float]] = [[] for _ in range(24)]
    for sample in samples:
        # A line that falls to almost nothing would make ratios without bound.
        expected = max(line.at(sample.at), 0.1 * mean)
        ratios[int(sample.at % DAY // HOUR)].append(sample.value / expected)
    if not all(ratios):
        return ()
    shape = [sum(hour) / len(hour) for hour in ratios]
    total = sum(shape) / 24
    return tuple(hour / total for hour in shape) if total > 0 else ()


def _fit(samples: Sequence[Sample], season: tuple[float, ...], span: float) -> Trend:
    """Least squares of `season * (level + slope * t)`."""
    factors = [_season(season, sample.at) for sample in samples]
    weight = sum(factor * factor for factor in factors)
    origin = sum(factor * factor * sample.at for factor, sample in zip(factors, samples, strict=True)) / weight
    rows = [(factor, sample.at - origin, sample.value) for factor, sample in zip(factors, samples, strict=True)]
    across = sum((factor * time) ** 2 for factor, time, _ in rows)
    level = sum(factor * value for factor, _, value in rows) / weight
    slope = sum(factor * time * value for factor, time, value in rows) / across if across else 0.0
    rest = [value - factor * (level + slope * time) for factor, time, value in rows]
    error, freedom = _slope_error(rest, across, 2 + max(len(season) - 1, 0))
    margin = t_quantile(freedom) * error
    return Trend(origin, level, slope, slope - margin, slope + margin, season, samples[-1].at, span)


def _slope_error(rest: Sequence[float], across: float, parameters: int) -> tuple[float, float]:
    """The standard error of a slope and its degrees of freedom, given the residuals. Neighbours that resemble each
    other count as fewer measurements."""
    squares = sum(value * value for value in rest)
    if squares <= 0 or across <= 0:
        return 0.0, 1.0
    together = sum(one * other for one, other in pairwise(rest)) / squares
    alike = min(max(together, 0.0), 0.95)
    freedom = max((len(rest) - parameters) * (1 - alike) / (1 + alike), 1.0)
    variance = squares / max(len(rest) - parameters, 1)
    return math.sqrt(variance / across * (1 + alike) / (1 - alike)), freedom


def t_quantile(freedom: float) -> float:
    """Student's t for a two-sided 90% interval: the expansion around the normal quantile, which is within 1% from
    three degrees of freedom."""
    z, v = _Z, max(freedom, 3.0)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
