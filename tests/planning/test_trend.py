"""Trends of load: growth that is real is found, noise is not, and nothing is extended beyond what was seen."""

from __future__ import annotations

import math
import random

import pytest

from penstock.planning.trend import DAY, HOUR, Sample, crossing, fit_trend

START = 1_800_000_000.0 // DAY * DAY


def line(level: float, slope: float, count: int, step: float, noise: float = 0.0, seed: int = 1) -> list[Sample]:
    rng = random.Random(seed)
    return [Sample(START + i * step, level + slope * i * step + rng.gauss(0, noise)) for i in range(count)]


def test_a_straight_line_is_extended_to_the_limit() -> None:
    trend = fit_trend(line(10.0, 1.0 / 3600, 61, 60.0))  # one more per hour, for an hour
    assert trend is not None and trend.growing
    assert trend.slope == pytest.approx(1 / 3600)
    found = crossing(trend, 12.0)
    assert found.likely_s == pytest.approx(HOUR) and found.earliest_s == pytest.approx(HOUR)
    assert crossing(trend, 13.5).likely_s is None, "two and a half hours ahead, after an hour of watching"


def test_a_constant_load_does_not_grow() -> None:
    trend = fit_trend(line(10.0, 0.0, 60, 60.0))
    assert trend is not None and not trend.growing
    assert crossing(trend, 20.0).likely_s is None


def test_noise_is_reported_as_growth_about_as_often_as_the_interval_says() -> None:
    grown = 0
    for seed in range(200):
        trend = fit_trend(line(10.0, 0.0, 60, 60.0, noise=1.0, seed=seed))
        assert trend is not None
        grown += trend.growing
    assert grown / 200 < 0.08, "one side of a 90% interval: 5%"


def test_a_slow_wave_is_not_taken_for_many_independent_measurements() -> None:
    rng, value, grown = random.Random(3), 0.0, 0
    for _ in range(100):
        samples = []
        for i in range(120):
            value = 0.9 * value + rng.gauss(0, 1)
            samples.append(Sample(START + 60 * i, 50 + value))
        trend = fit_trend(samples)
        assert trend is not None
        grown += trend.growing
    assert grown < 15


def test_uncertain_growth_has_an_earlier_and_a_later_date() -> None:
    trend = fit_trend(line(10.0, 2.0 / 3600, 90, 60.0, noise=0.5))
    assert trend is not None and trend.growing
    found = crossing(trend, 14.5)
    assert found.earliest_s is not None and found.likely_s is not None and found.latest_s is not None
    assert found.earliest_s < found.likely_s < found.latest_s


def day_shape(at: float) -> float:
    return 1 + 0.8 * math.sin(2 * math.pi * (at % DAY) / DAY)


def test_the_shape_of_a_day_is_learnt_and_the_peak_reaches_the_limit_first() -> None:
    hours = [START + HOUR * (i + 0.5) for i in range(24 * 7)]
    growth = 0.2 / DAY
    trend = fit_trend([Sample(at, (10 + growth * (at - START)) * day_shape(at)) for at in hours])
    assert trend is not None and trend.growing and len(trend.season) == 24
    assert trend.slope == pytest.approx(growth, rel=0.05)
    assert trend.season[5] == pytest.approx(day_shape(START + 5.5 * HOUR), rel=0.03)
    found = crossing(trend, 22.0)  # the daily peak is 1.8 times the mean; that of day 12 is the first above it
    assert found.likely_s is not None
    when = hours[-1] + found.likely_s
    assert (when - START) / DAY == pytest.approx(11.2, abs=1.1)
    assert 4 <= when % DAY / HOUR <= 8, "at the peak of the day"


def test_a_day_that_repeats_is_full_at_its_peak_although_nothing_grows() -> None:
    hours = [START + HOUR * (i + 0.5) for i in range(24 * 3 + 18)]  # it is night: the load is low
    trend = fit_trend([Sample(at, 10 * day_shape(at)) for at in hours])
    assert trend is not None and not trend.growing
    found = crossing(trend, 17.0)
    assert found.likely_s is not None and 6 * HOUR <= found.likely_s <= 12 * HOUR
    assert crossing(trend, 19.0).likely_s is None


def test_few_measurements_give_no_trend_and_hours_without_traffic_do_no_harm() -> None:
    assert fit_trend(line(1.0, 1.0, 9, 60.0)) is None
    hours = [START + HOUR * (i + 0.5) for i in range(24 * 4)]
    trend = fit_trend([Sample(at, 5.0 if 8 <= at % DAY / HOUR < 18 else 0.0) for at in hours])
    assert trend is not None and trend.season[3] == 0.0 and not trend.growing
    empty = fit_trend([Sample(at, 0.0) for at in hours])
    assert empty is not None and not empty.growing and crossing(empty, 1.0).likely_s is None
