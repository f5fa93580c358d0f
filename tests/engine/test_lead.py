"""Steps are launched shortly before the device is done with the one before."""

from __future__ import annotations

import pytest

from penstock.engine.lead import Lead

STEP_S = 0.006


def running(steps: int = 50, launch_s: float = 0.0005) -> tuple[Lead, float]:
    """A lead after some steps of decodes that the host waited for, and the time when the last of them ended. The next
    is in flight."""
    lead, now = Lead(), 0.0
    lead.launched(STEP_S, now - launch_s, now, True)
    for _ in range(steps):
        now += STEP_S
        lead.launched(STEP_S, now - 0.001 - launch_s, now - 0.001, True)
        lead.landed(blocked=True, now=now)
    return lead, now


def test_there_is_time_until_shortly_before_the_step_ends() -> None:
    lead, now = running()
    spare = lead.spare_s(now)
    assert 0.5 * STEP_S < spare < STEP_S - 0.0011
    assert lead.spare_s(now + spare / 2) == pytest.approx(spare / 2)
    assert lead.spare_s(now + STEP_S) == 0.0


def test_a_slow_host_launches_earlier() -> None:
    fast, now = running()
    slow, _ = running(launch_s=0.003)
    assert slow.spare_s(now) == pytest.approx(fast.spare_s(now) - 0.0025, abs=2e-4)


def test_nothing_is_put_off_for_a_step_of_unknown_length_or_with_another_behind_it() -> None:
    lead, now = running()
    lead.launched(STEP_S, now, now, True)
    assert lead.spare_s(now) == 0.0
    fresh = Lead()
    assert fresh.spare_s(0.0) == 0.0
    fresh.launched(0.0, 0.0, 0.0, True)
    assert fresh.spare_s(0.0) == 0.0


def test_a_step_that_ended_before_the_host_looked_began_the_next_one_then() -> None:
    """The host was busy launching: the device went on meanwhile."""
    lead, now = running()
    lead.launched(0.02, now + 0.001, now + 0.011, False)
    lead.landed(blocked=False, now=now + 0.011)
    done = now + STEP_S + 0.02
    assert lead.spare_s(now + 0.011) < done - (now + 0.011)


def test_a_device_that_ran_dry_is_given_work_earlier() -> None:
    lead, now = running()
    spare = lead.spare_s(now)
    for _ in range(3):
        lead.launched(STEP_S, now + STEP_S, now + STEP_S, True)
        lead.landed(blocked=False, now=now + STEP_S)  # it had ended before the host looked
        now += STEP_S
        lead.spare_s(now)
    assert lead.spare_s(now) < spare - 0.0005
