"""The figures of a trend: its interval, the shape of a day and the hour of a crossing, computed in other ways too."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from penstock.planning.trend import DAY, HOUR, Sample, Trend, crossing, fit_trend, t_quantile

START = 1_800_000_000.0 // DAY * DAY


def fitted(values: Sequence[float], step: float = 60.0) -> Trend:
    trend = fit_trend([Sample(START + i * step, value) for i, value in enumerate(values)])
    assert trend is not None
    return trend


@pytest.mark.parametrize(
    ("freedom", "table", "within"),
    [(3, 2.3534, 0.01), (5, 2.0150, 1e-3), (10, 1.8125, 1e-4), (30, 1.6973, 1e-4), (1e9, 1.6449, 1e-4)],
)
def test_quantiles_are_those_of_the_table(freedom: float, table: float, within: float) -> None:
    assert t_quantile(freedom) == pytest.approx(table, abs=within)
    assert t_quantile(1.0) == t_quantile(3.0), "fewer than three are taken for three"


def test_the_interval_of_independent_measurements_is_that_of_least_squares() -> None:
    times = 60.0 * np.arange(20)
    values = 5.0 + 0.01 * times + np.where(np.arange(20) % 2, 1.0, -1.0)
    slope, level = np.polyfit(times, values, 1)
    rest = values - (level + slope * times)
    error = math.sqrt((rest @ rest) / 18 / ((times - times.mean()) ** 2).sum())
    trend = fitted(list(values))
    assert trend.slope == pytest.approx(slope)
    assert trend.slope_high - trend.slope == pytest.approx(t_quantile(18) * error)
    assert trend.slope - trend.slope_low == pytest.approx(t_quantile(18) * error)
    assert trend.at(START + 300.0) == pytest.approx(level + slope * 300.0)


def test_neighbours_that_are_alike_count_as_fewer_measurements() -> None:
    times = 60.0 * np.arange(40)
    values = 5.0 + np.where(np.arange(40) // 5 % 2, 1.0, -1.0)
    slope, level = np.polyfit(times, values, 1)
    rest = values - (level + slope * times)
    alike = (rest[1:] @ rest[:-1]) / (rest @ rest)
    assert 0.5 < alike < 0.7
    error = math.sqrt((rest @ rest) / 38 / ((times - times.mean()) ** 2).sum() * (1 + alike) / (1 - alike))
    margin = t_quantile(38 * (1 - alike) / (1 + alike)) * error
    assert fitted(list(values)).slope_high - slope == pytest.approx(margin)


def test_seconds_or_hours_between_measurements_make_no_other_trend() -> None:
    values = [1.0, 2.0, 1.5, 2.5, 2.0, 3.5, 2.5, 4.0, 3.0, 4.5, 4.0]
    short, long = fitted(values, 0.05), fitted(values, 600.0)
    assert short.slope * 0.05 == pytest.approx(long.slope * 600.0)
    assert short.slope_low * 0.05 == pytest.approx(long.slope_low * 600.0, rel=1e-4)
    assert short.slope_low < short.slope < short.slope_high


def test_a_load_never_falls_below_nothing() -> None:
    falling = fitted([20.0 - i for i in range(20)])
    assert falling.at(START + 60.0 * 15) == pytest.approx(5.0) and falling.at(START + DAY) == 0.0


def test_what_is_reached_already_is_reached_now() -> None:
    assert crossing(fitted([10.0 + i for i in range(20)]), 15.0).likely_s == 0.0
    hours = [Sample(START + HOUR * (i + 0.5), 10.0) for i in range(24 * 4)]
    daily = fit_trend(hours)
    assert daily is not None and daily.season == pytest.approx((1.0,) * 24)
    assert crossing(daily, 9.0).likely_s == 0.0 and crossing(daily, 11.0).likely_s is None


@pytest.mark.parametrize(("hours", "known"), [(47, False), (48, True)])
def test_two_whole_days_show_the_shape_of_a_day(hours: int, known: bool) -> None:
    trend = fit_trend([Sample(START + HOUR * (i + 0.5), 10.0 + i % 24) for i in range(hours)])
    assert trend is not None and bool(trend.season) == known


def test_the_shape_of_a_day_has_a_mean_of_one_and_the_ratio_of_each_hour() -> None:
    def load(hour: int) -> float:
        return 30.0 if hour == 9 else 10.0

    trend = fit_trend([Sample(START + HOUR * (i + 0.5), load(i % 24)) for i in range(24 * 5)])
    assert trend is not None and sum(trend.season) / 24 == pytest.approx(1.0)
    assert trend.season[9] == pytest.approx(3 * trend.season[8], rel=0.02)
    found = crossing(trend, 25.0)
    assert found.likely_s == pytest.approx(9.5 * HOUR), "from half past eleven at night to nine"


def test_days_without_load_or_without_some_hours_have_no_shape() -> None:
    hours = [START + HOUR * (i + 0.5) for i in range(24 * 3)]
    empty = fit_trend([Sample(at, 0.0) for at in hours])
    assert empty is not None and empty.season == () and (empty.level, empty.slope) == (0.0, 0.0)
    night = fit_trend([Sample(at, 5.0) for at in hours if int(at % DAY // HOUR) != 3])
    assert night is not None and night.season == () and night.at(hours[3]) == pytest.approx(5.0)


def test_the_last_moment_that_a_trend_is_trusted_for() -> None:
    rising = Trend(START, 10.0, 1 / HOUR, 1 / HOUR, 1 / HOUR, (), START, HOUR)
    assert crossing(rising, 12.0).likely_s == 2 * HOUR and crossing(rising, 12.001).likely_s is None
    assert crossing(rising, 10.0).likely_s == 0.0 and rising.horizon_s == 2 * HOUR
    assert crossing(Trend(START, 10.0, 0.0, 0.0, 0.0, (), START, HOUR), 11.0).likely_s is None
    just = Trend(START, 10.0, 1.0, 0.1 / HOUR, 2.0, (), START, HOUR)
    assert not just.growing, "by a hundredth of the load, and no more"
    assert Trend(START, 10.0, 1.0, 0.101 / HOUR, 2.0, (), START, HOUR).growing


def test_ten_measurements_are_enough() -> None:
    samples = [Sample(START + 60.0 * i, float(i)) for i in range(10)]
    assert fit_trend(samples) is not None and fit_trend(samples[1:]) is None


def test_the_hours_of_a_day_count_as_parameters() -> None:
    """A line has two; the shape of a day has 24, of which one is its mean."""
    times = START + HOUR * (np.arange(96) + 0.5)
    values = 10.0 + np.random.default_rng(1).normal(size=96)
    trend = fit_trend([Sample(at, value) for at, value in zip(times, values, strict=True)])
    assert trend is not None and len(trend.season) == 24
    factors = np.array([trend.season[int(at % DAY // HOUR)] for at in times])
    rest = values - factors * (trend.level + trend.slope * (times - trend.origin))
    alike = max((rest[1:] @ rest[:-1]) / (rest @ rest), 0.0)
    across = ((factors * (times - trend.origin)) ** 2).sum()
    error = math.sqrt((rest @ rest) / (96 - 25) / across * (1 + alike) / (1 - alike))
    margin = t_quantile((96 - 25) * (1 - alike) / (1 + alike)) * error
    assert trend.slope_high - trend.slope == pytest.approx(margin, rel=1e-6)
