"""Goodput: which requests were as quick as promised."""

from __future__ import annotations

import pytest

from penstock.bench.goodput import Objectives, Served

QUICK = Served(due=1.0, first=1.2, end=2.0, per_token=0.02)
SLOW = Served(due=1.0, first=1.9, end=5.0, per_token=0.1)
SINGLE = Served(due=0.0, first=0.1, end=0.1, per_token=None)


def test_times_count_from_when_a_request_was_due() -> None:
    assert QUICK.ttft == pytest.approx(0.2) and QUICK.latency == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("objectives", "met"),
    [
        (Objectives(ttft=0.5), [QUICK, SINGLE]),
        (Objectives(per_token=0.05), [QUICK, SINGLE]),  # a single token has no further one to be slow
        (Objectives(latency=0.5), [SINGLE]),
        (Objectives(ttft=1.0, per_token=0.2, latency=10.0), [QUICK, SLOW, SINGLE]),
        (Objectives(ttft=1.0, latency=2.0), [QUICK, SINGLE]),
    ],
)
def test_all_of_the_promises_must_hold(objectives: Objectives, met: list[Served]) -> None:
    everyone = [QUICK, SLOW, SINGLE]
    assert [request for request in everyone if objectives.met_by(request)] == met
    assert objectives.met(everyone) == len(met)
    assert objectives


def test_without_promises_there_is_no_goodput() -> None:
    assert not Objectives()
    assert str(Objectives(ttft=0.5, latency=2.0)) == "TTFT 500 ms, E2E 2,000 ms"
