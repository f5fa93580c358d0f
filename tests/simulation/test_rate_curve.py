"""Rates that change with time."""

from __future__ import annotations

import itertools
import random

import pytest

from penstock.bench.arrivals import Pattern, positions
from penstock.planning.workload import CURVES
from penstock.simulation.rate_curve import RateCurve, Surge

DAY = 86_400.0


def times(curve: RateCurve, pattern: Pattern = "constant") -> list[float]:
    return list(curve.times(positions(pattern, random.Random(1))))


def test_a_flat_rate_is_an_even_one() -> None:
    assert times(RateCurve(4.0, 2.0)) == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75])


def test_a_spike_has_its_factor_and_ends() -> None:
    found = times(RateCurve(2.0, 30.0, surges=[Surge(10.0, 20.0, 10.0)]))
    count = [sum(begin <= at < begin + 10 for at in found) for begin in (0, 10, 20)]
    assert count == pytest.approx([20, 200, 20], abs=1)
    assert times(RateCurve(1.0, 3.0, surges=[Surge(1.0, 2.0, 0.0)])) == pytest.approx([0.0, 2.0])


@pytest.mark.parametrize("name", CURVES)
def test_a_day_keeps_its_average_and_its_shape(name: str) -> None:
    curve = RateCurve(0.5, DAY, curve=CURVES[name])
    assert curve.total == pytest.approx(0.5 * DAY)
    found = times(curve)
    assert len(found) == pytest.approx(0.5 * DAY, abs=2)
    assert all(earlier <= later for earlier, later in itertools.pairwise(found))
    busiest = max(range(24), key=lambda hour: sum(hour * 3600 <= at < (hour + 1) * 3600 for at in found[::10]))
    assert CURVES[name].hours[busiest] == pytest.approx(CURVES[name].peak, rel=0.07)


def test_a_simulation_may_begin_at_any_hour() -> None:
    office = CURVES["office"]
    at_ten = RateCurve(1.0, 3600.0, curve=office, start_s=10 * 3600.0)
    assert at_ten.at(1800.0) == pytest.approx(office.hours[10])
    before_midnight = RateCurve(1.0, 7200.0, curve=office, start_s=23 * 3600.0)
    assert before_midnight.at(1800.0) == pytest.approx(office.hours[23])
    assert before_midnight.at(5400.0) == pytest.approx(office.hours[0])


def test_random_arrivals_stay_random_in_a_spike() -> None:
    found = times(RateCurve(50.0, 40.0, surges=[Surge(0.0, 20.0, 4.0)]), "poisson")
    gaps = [later - earlier for earlier, later in itertools.pairwise(at for at in found if at < 20)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 200, rel=0.1) and deviation == pytest.approx(mean, rel=0.1)
