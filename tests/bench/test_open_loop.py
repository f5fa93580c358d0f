"""The open-loop benchmark: arrivals at random, the highest rate that is kept."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from penstock.bench.goodput import AtRate, highest_rate
from penstock.bench.open_loop import Timed, arrivals, drive
from penstock.bench.stats import Percentiles
from penstock.engine.request import Request, SamplingParams
from penstock.testing.timed_engine import Speed, TimedEngine


def test_arrivals_are_random_at_the_given_rate() -> None:
    due = arrivals(4000, 8.0)
    gaps = [after - before for before, after in pairwise(due)]
    assert due == sorted(due)
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.1)


def test_a_request_keeps_its_objectives_with_99_percent_of_its_gaps() -> None:
    steady = [0.2 + 0.01 * index for index in range(401)]
    assert Timed(0.0, steady).keeps(0.5, 0.02)
    assert not Timed(0.0, steady).keeps(0.1, 0.02), "its first token is late"
    assert Timed(0.0, [*steady, steady[-1] + 1.0]).keeps(0.5, 0.02), "one gap of 401"
    stalls = [at + (at > 2.0) + (at > 2.5) + (at > 3.0) + (at > 3.5) + (at > 4.0) for at in steady]
    assert not Timed(0.0, stalls).keeps(0.5, 0.02)


def test_requests_wait_for_their_time_and_times_are_those_of_their_tokens() -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    engine = TimedEngine(
        speed=Speed(step_s=0.01, prefill_token_s=0.0, decode_s=0.0, context_token_s=0.0), clock=lambda: now, sleep=sleep
    )
    requests = [Request(str(index), [1, 2, 3], SamplingParams(max_tokens=5)) for index in range(2)]
    first, second = drive(engine, requests, [0.5, 2.0], clock=lambda: now, sleep=sleep)
    assert first.ttft == pytest.approx(0.01) and second.tokens[0] == pytest.approx(2.01)
    assert first.gaps == pytest.approx([0.01] * 4)


@pytest.mark.parametrize(("limit", "found"), [(13.0, 13.0), (100.0, 24.0), (2.0, 0.0)])
def test_the_highest_rate_is_approached_by_halving(limit: float, found: float) -> None:
    nothing = Percentiles(0.0, 0.0, 0.0, 0.0, 0.0)
    asked: list[float] = []

    def measure(rate: float) -> AtRate:
        asked.append(rate)
        return AtRate(rate, 1.0 if rate <= limit else 0.5, nothing, nothing, 0.0)

    best, runs = highest_rate(measure, 4.0, 24.0, 8)
    assert best == pytest.approx(found, abs=0.2) and best <= limit
    assert len(runs) == len(asked) == (8 if found else 1)
