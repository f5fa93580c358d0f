"""The measured time per token of an engine."""

import pytest

from penstock.backends.token_gap import FRESH_S, TokenGap
from penstock.engine.request import EngineLoad


def test_it_is_measured_on_steps_and_forgotten() -> None:
    pace, before, now = TokenGap(), EngineLoad(), 0.0
    for step in range(1, 50):  # four sequences, a step of 20 ms gives each a token
        load = EngineLoad(running=4, steps=step, generation_tokens=4 * step)
        pace.reported(before, load, now)
        before, now = load, now + 0.02
    assert pace.seconds(now) == pytest.approx(0.02, rel=0.05)
    for step in range(50, 120):  # with draft tokens a step gives two
        load = EngineLoad(running=4, steps=step, generation_tokens=before.generation_tokens + 8)
        pace.reported(before, load, now)
        before, now = load, now + 0.02
    assert pace.seconds(now) == pytest.approx(0.01, rel=0.05)
    assert pace.seconds(now + FRESH_S + 1) is None


def test_idle_time_does_not_count() -> None:
    pace = TokenGap()
    assert pace.seconds(100.0) is None
    idle, one = EngineLoad(generation_tokens=5), EngineLoad(running=1, generation_tokens=5)
    pace.reported(EngineLoad(), idle, 0.0)
    pace.reported(idle, one, 50.0)
    pace.reported(one, EngineLoad(running=1, generation_tokens=6), 50.03)
    assert pace.seconds(50.1) == pytest.approx(0.03)


def test_the_time_without_an_engine_does_not_count() -> None:
    pace = TokenGap()
    pace.reported(EngineLoad(), EngineLoad(running=2, generation_tokens=4), 0.0)
    pace.interrupt()
    pace.reported(EngineLoad(), EngineLoad(running=2, generation_tokens=2), 60.0)
    assert pace.seconds(60.0) is None
    pace.reported(EngineLoad(running=2, generation_tokens=2), EngineLoad(running=2, generation_tokens=4), 60.02)
    assert pace.seconds(60.1) == pytest.approx(0.02)
