"""Timelines: the engine's durations on the gateway's clock; bounded for requests of any length."""

from __future__ import annotations

import pytest

from penstock.telemetry.logging import RequestRecord
from penstock.telemetry.timeline import MOST_PHASES, EngineRun, Timeline


def run(**changes: object) -> EngineRun:
    given = {
        "engine": "0", "model": "m", "choice": 0, "asked_at": None, "submitted_at": 101.0, "ended_at": 106.0,
        "first_at": 103.0, "last_at": 105.5, "queue_s": 0.5, "prefill_s": 1.0, "decode_s": 2.0, "prompt_tokens": 9,
        "cached_tokens": 0, "completion_tokens": 4, "outcome": "stop", **changes,
    }  # fmt: skip
    return EngineRun(**given)  # type: ignore[arg-type]


def phases(*runs: EngineRun) -> dict[str, tuple[float, float]]:
    timeline = Timeline(RequestRecord("r", "/", 0.0), started_at=100.0)
    timeline.ran(list(runs))
    return {phase.name: (phase.start, phase.end) for phase in timeline.phases()}


def test_phases_end_where_the_first_token_arrived() -> None:
    assert phases(run()) == {"queue": (1.5, 2.0), "prefill": (2.0, 3.0), "decode": (3.0, 5.0)}


def test_without_the_engine_s_word_the_gateway_s_clock_is_used() -> None:
    assert phases(run(decode_s=None))["decode"] == (3.0, 5.5)


def test_a_server_that_tells_nothing_was_busy_until_its_first_token() -> None:
    found = phases(run(queue_s=None, prefill_s=None, decode_s=None))
    assert found == {"engine": (1.0, 3.0), "decode": (3.0, 5.5)}


def test_nothing_begins_before_it_was_submitted() -> None:
    found = phases(run(queue_s=50.0))
    assert found["queue"] == (1.0, 2.0)


def test_a_request_that_got_no_token_was_in_the_engine_until_its_end() -> None:
    assert phases(run(first_at=None, last_at=None, outcome="abort")) == {"engine": (1.0, 6.0)}


def test_admission_lasts_until_an_engine_has_it() -> None:
    assert phases(run(asked_at=100.25))["admission"] == (0.25, 1.0)


def test_a_request_that_was_turned_away_was_in_no_engine() -> None:
    refused = run(asked_at=100.25, submitted_at=None, ended_at=104.0, first_at=None, last_at=None, outcome="error")
    assert phases(refused) == {"admission": (0.25, 4.0)}


def test_lengths_of_the_same_phase_add_up() -> None:
    timeline = Timeline(RequestRecord("r", "/", 0.0), started_at=100.0)
    timeline.ran([run(), run(choice=1)])
    assert timeline.breakdown()["prefill"] == pytest.approx(2000)


def test_a_second_round_begins_when_the_first_has_ended() -> None:
    timeline = Timeline(RequestRecord("r", "/", 0.0), started_at=100.0)
    timeline.note("prepare", 100.0, 100.5)
    timeline.ran([run()])
    timeline.follow("prepare")
    assert timeline.phases()[-1].start == 6.0


def test_a_request_without_end_keeps_a_timeline_of_bounded_size() -> None:
    timeline = Timeline(RequestRecord("r", "/", 0.0), started_at=0.0)
    for _ in range(2000):
        timeline.follow("tool")
        timeline.ran([run()])
    assert len(timeline.phases()) <= 4 * MOST_PHASES
