"""R-RT-10: a worse canary is found, an equal one is not, however often one looks."""

from __future__ import annotations

import math
import random

import pytest

from penstock.routing.experiments.confidence import Moments, bounded, mean
from penstock.routing.experiments.simulation import Scenario, simulate
from penstock.routing.experiments.verdict import Rules, as_good, findings, interval, part_of, typical

GOOD = {"errors": Moments(2000, 10, 10)}


def test_intervals_of_rates_hold_at_all_times_at_once() -> None:
    draw, missed = random.Random(1), 0
    for _ in range(100):
        seen, wrong = Moments(), False
        for number in range(200):
            seen = seen.with_value(draw.random() < 0.1)
            if number % 10 == 0:
                found = bounded(seen, 0.1)
                wrong = wrong or not found.low <= 0.1 <= found.high
        missed += wrong
    assert missed / 100 <= 0.1


def test_intervals_of_means_hold_at_all_times_at_once() -> None:
    draw, missed = random.Random(2), 0
    for _ in range(100):
        seen, wrong = Moments(), False
        for _ in range(300):
            seen = seen.with_value(draw.gauss(3, 2))
            found = mean(seen, 0.1)
            wrong = wrong or (found is not None and not found.low <= 3 <= found.high)
        missed += wrong
    assert missed / 100 <= 0.1


def test_intervals_shrink_with_more_values_and_without_any_say_nothing() -> None:
    assert bounded(Moments(), 0.01).high == 1.0 and bounded(Moments(), 0.01).low == 0.0
    widths = [(found := bounded(Moments(n, n / 4, n / 4), 0.01)).high - found.low for n in (4, 40, 400, 4000)]
    assert widths == sorted(widths, reverse=True) and widths[-1] < 0.1
    assert mean(Moments(29, 29, 29), 0.01) is None
    slow = Moments(100, 100 * math.log(2), 100 * math.log(2) ** 2)
    assert typical("ttft", slow) == pytest.approx(2) and typical("ttft", Moments()) is None
    found = interval("ttft", slow, 0.01)
    assert found is not None and found.low == pytest.approx(2) == found.high


def test_a_canary_that_only_fails_is_found_after_a_handful_of_requests() -> None:
    broken = {"errors": Moments(10, 10, 10)}
    (found, *_) = findings(broken, GOOD, Rules(), part_of(0.99, 1, 1))
    assert found.measure == "errors" and found.canary.low > found.control.high  # type: ignore[union-attr]
    assert "errors" in found.text() and "1.0% tolerated" in found.text()
    assert findings({"errors": Moments(9, 9, 9)}, GOOD, Rules(), part_of(0.99, 1, 1)) == []  # least_requests


def test_missing_inputs_decide_nothing_and_without_a_control_one_rule_is_left() -> None:
    broken = {"errors": Moments(30, 30, 30)}
    alpha = part_of(0.99, 1, 1)
    assert [found.control for found in findings(broken, {}, Rules(), alpha)] == [None]
    assert findings(broken, {}, Rules(most_errors=None), alpha) == []
    assert findings({}, GOOD, Rules(), alpha) == []
    assert not as_good({"errors": Moments(5000)}, {}, 0.05, alpha)


@pytest.mark.parametrize(
    ("measure", "canary", "control"),
    [
        ("grades", Moments(400, 120, 60), Moments(400, 320, 280)),
        ("dislikes", Moments(300, 200, 200), Moments(300, 30, 30)),
        ("ttft", Moments(200, 200 * 1.5, 200 * 3.0), Moments(200, 0, 200 * 0.5)),
    ],
)
def test_quality_and_latency_are_compared_too(measure: str, canary: Moments, control: Moments) -> None:
    fine = {"errors": Moments(2000, 10, 10)}
    found = findings({**fine, measure: canary}, {**fine, measure: control}, Rules(), part_of(0.99, 1, 1))
    assert [finding.measure for finding in found] == [measure]
    assert findings({**fine, measure: control}, {**fine, measure: canary}, Rules(), part_of(0.99, 1, 1)) == []


def test_the_parts_of_all_stages_add_up_to_the_stated_probability() -> None:
    whole = sum(part_of(0.99, stage, 2) for stage in range(1, 10_000)) * 6 * 2 * 2
    assert whole <= 0.01 + 1e-12 and whole > 0.00999


def test_simulated_experiments_an_equal_canary_stays_a_broken_one_goes() -> None:
    equal = simulate(Scenario(requests=2000, look=50, share=0.2, errors=0.05, canary_errors=0.05), Rules(), 10)
    assert equal.rolled_back == 0
    broken = simulate(Scenario(requests=2000, look=10, canary_errors=1.0), Rules(), 10)
    assert broken.share == 1.0 and max(broken.canary_errors) <= 20
    slow = simulate(Scenario(requests=3000, slower=6.0, share=0.2), Rules(), 4)
    assert slow.share == 1.0


def test_the_next_stage_needs_certainty_too() -> None:
    alpha = part_of(0.99, 1, 1)
    assert as_good({"errors": Moments(1000, 5, 5)}, {"errors": Moments(9000, 45, 45)}, 0.05, alpha)
    assert not as_good({"errors": Moments(50, 0, 0)}, {"errors": Moments(9000, 45, 45)}, 0.05, alpha)
