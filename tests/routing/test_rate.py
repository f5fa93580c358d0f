"""Work per busy second: idle time does not count, and old observations fade."""

from __future__ import annotations

import math

import pytest

from penstock.routing.rate import BusyRate


def test_only_busy_time_counts() -> None:
    rate = BusyRate(fade_s=1e9)
    rate.busy(10.0, True)
    rate.add(12.0, 30.0)
    assert rate.per_s(12.0) == pytest.approx(15.0)
    rate.busy(13.0, False)
    assert rate.per_s(999.0) == pytest.approx(10.0)
    rate.busy(1000.0, True)
    assert rate.per_s(1003.0) == pytest.approx(5.0)
    assert rate.per_s(1002.0) == pytest.approx(5.0), "time does not run backwards"


def test_it_is_unknown_until_half_a_busy_second_has_passed_with_some_work() -> None:
    rate = BusyRate(fade_s=1e9)
    rate.busy(0.0, True)
    assert rate.per_s(2.0) is None, "no work yet"
    rate = BusyRate(fade_s=1e9)
    rate.busy(0.0, True)
    rate.add(0.25, 8.0)
    assert rate.per_s(0.49) is None
    assert rate.per_s(0.501) == pytest.approx(8.0 / 0.501)


def test_observations_fade_with_busy_time() -> None:
    rate = BusyRate(fade_s=10.0)
    rate.busy(0.0, True)
    rate.add(0.0, 100.0)
    kept = math.exp(-1.0)
    assert rate.per_s(10.0) == pytest.approx(100.0 * kept / (10.0 * (1 - kept)))
    default = BusyRate()
    default.busy(0.0, True)
    default.add(0.0, 100.0)
    assert default.per_s(10.0) == rate.per_s(10.0)
    steady = BusyRate(fade_s=2.0)
    steady.busy(0.0, True)
    for second in range(1, 60):
        steady.add(float(second), 7.0 if second < 30 else 70.0)
    # Each second's work is added at its end, so the newest has not faded at all.
    assert steady.per_s(59.0) == pytest.approx(70.0 * 0.5 / (1 - math.exp(-0.5)), rel=1e-3)


def test_kinds_are_counted_apart() -> None:
    rate = BusyRate(fade_s=1e9, kinds=3)
    rate.busy(0.0, True)
    for kind, work in enumerate((1.0, 10.0, 100.0)):
        rate.add(1.0, work, kind)
    rate.add(1.0, 1000.0)
    assert [rate.per_s(1.0, first) for first in range(3)] == pytest.approx([1111.0, 110.0, 100.0])
    assert rate.per_s(1.0) == pytest.approx(1111.0)


def test_one_kind_of_work_is_enough_to_know_the_rate() -> None:
    rate = BusyRate(fade_s=1e9, kinds=2)
    rate.busy(0.0, True)
    rate.add(1.0, 4.0, 1)
    assert rate.per_s(1.0) == pytest.approx(4.0)


def test_work_that_was_done_evenly_fades_as_it_was_done() -> None:
    rate = BusyRate(fade_s=2.0)
    rate.busy(0.0, True)
    rate.add_evenly(5.0, 35.0, since=0.0)
    assert rate.per_s(5.0) == pytest.approx(7.0)
    at_once = BusyRate(fade_s=1e9)
    at_once.busy(0.0, True)
    at_once.add_evenly(5.0, 35.0, since=5.0)
    assert at_once.per_s(5.0) == pytest.approx(7.0)


def test_work_done_evenly_counts_as_in_small_parts() -> None:
    parts, whole = BusyRate(), BusyRate()
    for rate in (parts, whole):
        rate.busy(0.0, True)
    for step in range(1, 401):
        parts.add(step * 0.02, 3)
    whole.add_evenly(8.0, 1200, 0.0)
    assert whole.per_s(8.0) == pytest.approx(parts.per_s(8.0) or 0.0, rel=0.002)
    whole.add_evenly(8.0, 5, 8.0)
    assert (whole.per_s(8.0) or 0.0) > (parts.per_s(8.0) or 0.0)
