"""The plain autoscaler that ours is compared with."""

from __future__ import annotations

from penstock.planning.autoscaling import FleetLoad
from penstock.simulation.queue_hpa import QueueHPA


def load(now: float, ready: int, queued: int, starting: int = 0) -> FleetLoad:
    return FleetLoad(now=now, ready=ready, starting=starting, queued=queued)


def test_it_follows_the_queue_up_in_bounded_steps() -> None:
    hpa = QueueHPA(1, 20, waiting_per_replica=2.0)
    assert hpa.decide(load(0, 2, 4)).desired == 2, "at the target"
    assert hpa.decide(load(5, 2, 400)).desired == 2, "between two decisions nothing changes"
    assert hpa.decide(load(15, 2, 400)).desired == 6, "four are always allowed"
    assert hpa.decide(load(30, 6, 400)).desired == 12, "or twice as many"
    assert hpa.decide(load(45, 12, 400)).desired == 20, "up to the maximum"


def test_it_forgets_a_queue_only_after_its_window() -> None:
    hpa = QueueHPA(1, 20)
    assert hpa.decide(load(0, 4, 16)).desired == 8
    assert hpa.decide(load(15, 8, 0)).desired == 8
    assert hpa.decide(load(290, 8, 0)).desired == 8
    assert hpa.decide(load(315, 8, 0)).desired == 1, "an empty queue is no load at all"


def test_starting_replicas_are_not_asked_for_twice() -> None:
    hpa = QueueHPA(1, 20)
    assert hpa.decide(load(0, 2, 8)).desired == 4
    assert hpa.decide(load(15, 2, 8, starting=2)).desired == 4
