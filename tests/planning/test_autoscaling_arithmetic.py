"""The figures of the autoscaling policy, one by one: what each signal asks for, steps, cool-downs, edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.config.autoscale import AutoscaleConfig, ScheduleConfig
from penstock.planning.autoscaling import COLD_START_S, Autoscaler, FleetLoad, Needs

IDLE = FleetLoad(now=0.0, ready=4)


def config(**settings: Any) -> AutoscaleConfig:
    return AutoscaleConfig(
        **{"max": 20, "forecast": False, "target_utilisation": 0.5, "hysteresis": 0.0, "target_wait_s": 1.0, **settings}
    )


def needs(load: FleetLoad, **settings: Any) -> Needs:
    return Autoscaler(config(**settings)).decide(load).needs


@pytest.mark.parametrize(("wait_s", "asked"), [(1.0, 0), (1.5, 6), (2.0, 8), (30.0, 8)])
def test_the_wait_asks_in_proportion_and_for_at_most_twice_as_many(wait_s: float, asked: int) -> None:
    assert needs(replace(IDLE, queued=1, predicted_wait_s=wait_s)).wait == asked
    assert needs(replace(IDLE, predicted_wait_s=wait_s)).wait == 0, "nobody waits"


@pytest.mark.parametrize(("running", "asked"), [(0, 0), (1, 1), (5, 1), (6, 2), (10, 2), (11, 3)])
def test_requests_in_flight_ask_for_slots(running: int, asked: int) -> None:
    assert needs(replace(IDLE, running=running), concurrency=10).busy == asked
    assert needs(replace(IDLE, running=running, slots=40)).busy == asked, "ten slots each"
    assert needs(replace(IDLE, running=running)).busy == 0, "slots are not known"


def test_waiting_requests_count_as_running_only_while_no_rate_is_known() -> None:
    load = replace(IDLE, running=5, queued=6)
    assert needs(load, concurrency=10).busy == 3
    assert needs(load, concurrency=10, replica_rate=100.0).busy == 1
    assert needs(replace(load, running=6), concurrency=10, replica_rate=100.0).busy == 2


def test_at_most_all_arrivals_are_refused() -> None:
    load = replace(IDLE, arrivals_per_s=15.0)
    assert [replace(load, refused_per_s=refused).new_per_s for refused in (-1.0, 15.0, 30.0)] == [15.0, 5.0, 5.0]


@pytest.mark.parametrize(("arrivals", "queued", "asked"), [(0.0, 0, 0), (3.0, 0, 3), (3.0, 60, 5), (3.1, 60, 6)])
def test_arrivals_and_the_backlog_ask_for_rate(arrivals: float, queued: int, asked: int) -> None:
    load = replace(IDLE, arrivals_per_s=arrivals, queued=queued)
    found = needs(load, replica_rate=2.0, drain_s=30.0)
    assert found.rate == found.forecast == asked


def test_requests_in_flight_are_expected_to_grow_with_the_arrivals_however_few_those_are() -> None:
    scaler = Autoscaler(config(forecast=True, concurrency=10, cold_start_s=60.0, scale_up_cooldown_s=1e9))
    for tick in range(20):
        decision = scaler.decide(replace(IDLE, now=5.0 * tick, running=50, arrivals_per_s=0.04 * tick))
    assert decision.needs.busy == 10 < decision.needs.forecast <= 15


@pytest.mark.parametrize(("use", "asked"), [(0.0, 0), (0.85, 4), (0.86, 5), (1.0, 5)])
def test_the_kv_cache_asks_in_proportion(use: float, asked: int) -> None:
    assert needs(replace(IDLE, kv_use=use)).kv == asked


def test_the_signal_that_says_most_is_named() -> None:
    assert Needs(1, 2, 3, 4, 5).most == 5 and Needs(1, 2, 3, 4, 5).first == "kv"
    assert Needs(5, 5, 5, 5, 5).first == "kv" and Needs(5, 5, 5, 5, 1).first == "wait"
    assert Needs(5, 5, 5, 1, 1).first == "rate" and Needs(1, 5, 5, 1, 1).first == "busy"
    assert Needs(1, 5, 1, 1, 1).first == "forecast"


def busy(running: int, now: float = 0.0, ready: int = 1) -> FleetLoad:
    """Asks for a fifth of `running` replicas."""
    return FleetLoad(now=now, ready=ready, running=running)


def test_as_many_as_there_are_is_no_change() -> None:
    decision = Autoscaler(config(concurrency=10)).decide(busy(20, ready=4))
    assert (decision.desired, decision.reason, decision.detail) == (4, "steady", "4 are needed")
    decision = Autoscaler(config(concurrency=10, min=4)).decide(busy(20, ready=4))
    assert (decision.reason, decision.detail) == ("steady", "the minimum of 4 is enough")


@pytest.mark.parametrize(
    ("ready", "running", "step_up", "found"),
    [(1, 100, 1.0, 5), (6, 100, 1.0, 12), (6, 100, 0.1, 10), (8, 100, 0.75, 14), (8, 45, 1.0, 9), (8, 400, 4.0, 20)],
)
def test_a_rise_is_four_or_a_share_of_those_there_are(ready: int, running: int, step_up: float, found: int) -> None:
    decision = Autoscaler(config(concurrency=10, step_up=step_up)).decide(busy(running, ready=ready))
    assert (decision.before, decision.desired, decision.reason) == (ready, found, "busy")


def test_between_two_rises_there_is_a_cool_down() -> None:
    scaler = Autoscaler(config(concurrency=10, scale_up_cooldown_s=15.0))
    assert scaler.desired(busy(100)) == 5
    held = scaler.decide(busy(100, now=14.0, ready=5))
    assert (held.desired, held.reason) == (5, "held") and held.detail.endswith("the cool-down ends in 1 s")
    assert scaler.desired(busy(100, now=15.0, ready=5)) == 10


def test_the_maximum_is_said_when_more_are_needed() -> None:
    scaler = Autoscaler(config(concurrency=10, max=4))
    decision = scaler.decide(busy(100, ready=4))
    assert (decision.desired, decision.reason) == (4, "maximum") and "ask for 20; the maximum is 4" in decision.detail
    assert Autoscaler(config(max=4)).decide(replace(IDLE, ready=6)).desired == 4, "lowered by somebody"


QUICK = {"concurrency": 10, "scale_down_cooldown_s": 0.0, "stabilisation_s": 0.0}


@pytest.mark.parametrize(
    ("ready", "step_down", "found"), [(8, 0.5, 4), (5, 0.5, 3), (8, 0.25, 6), (8, 0.01, 7), (2, 1.0, 1)]
)
def test_a_fall_is_one_or_a_share_of_those_there_are(ready: int, step_down: float, found: int) -> None:
    scaler = Autoscaler(config(**QUICK, step_down=step_down))
    scaler.decide(busy(5 * ready, ready=ready))
    decision = scaler.decide(busy(1, now=5.0, ready=ready))
    assert (decision.desired, decision.reason) == (found, "fall")


def test_a_fall_stops_at_what_is_needed_and_at_the_minimum() -> None:
    for settings, found in (({}, 3), ({"min": 5}, 5)):
        scaler = Autoscaler(config(**QUICK, step_down=1.0, **settings))
        scaler.decide(busy(40, ready=8))
        assert scaler.desired(busy(15, now=5.0, ready=8)) == found


def test_a_fall_waits_for_the_window_and_the_cool_down() -> None:
    scaler = Autoscaler(config(concurrency=10, stabilisation_s=100.0, scale_down_cooldown_s=30.0, step_down=0.01))
    scaler.decide(busy(40, ready=8))
    held = scaler.decide(busy(5, now=100.0, ready=8))
    assert (held.reason, held.detail) == ("held", "1 would be enough, but 8 were needed within 100 s")
    fell = scaler.decide(busy(5, now=101.0, ready=8))
    assert (fell.desired, fell.detail) == (7, "1 were enough for 100 s")
    held = scaler.decide(busy(5, now=130.0, ready=7))
    assert (held.reason, held.detail) == ("held", "1 are enough; the cool-down ends in 1 s")
    assert scaler.desired(busy(5, now=131.0, ready=7)) == 6


def test_a_fall_needs_a_load_well_below_the_target() -> None:
    scaler = Autoscaler(config(**QUICK, hysteresis=0.2))
    scaler.decide(busy(20, ready=4))
    assert scaler.desired(busy(13, now=5.0, ready=4)) == 4, "13 of 3 x 10 x 0.5 are not 20% below"
    assert scaler.desired(busy(12, now=10.0, ready=4)) == 3


def test_the_last_replica_stops_after_the_idle_time_and_not_before() -> None:
    scaler = Autoscaler(config(min=0, idle_s=60.0))
    scaler.decide(FleetLoad(now=0.0, ready=1, arrivals_per_s=1.0))
    assert scaler.desired(FleetLoad(now=59.0, ready=1)) == 1
    decision = scaler.decide(FleetLoad(now=60.0, ready=1))
    assert (decision.desired, decision.reason) == (0, "idle")
    assert scaler.desired(FleetLoad(now=61.0, ready=0)) == 0
    woken = scaler.decide(FleetLoad(now=62.0, ready=0, queued=1))
    assert (woken.desired, woken.reason) == (1, "wake")


@pytest.mark.parametrize("sign", [{"queued": 1}, {"running": 1}, {"arrivals_per_s": 0.01}])
def test_any_sign_of_demand_keeps_the_last_replica(sign: dict[str, Any]) -> None:
    scaler = Autoscaler(config(min=0, idle_s=60.0))
    scaler.decide(FleetLoad(now=0.0, ready=1))
    assert FleetLoad(now=0.0, ready=1, **sign).demand
    assert scaler.desired(FleetLoad(now=100.0, ready=1, **sign)) == 1


def test_a_minimum_is_reached_at_once() -> None:
    decision = Autoscaler(config(min=9, step_up=0.1)).decide(IDLE)
    assert (decision.desired, decision.reason, decision.detail) == (9, "minimum", "the minimum is 9")
    schedule = (ScheduleConfig(start="00:00", end="24:00", min=7),)
    decision = Autoscaler(config(schedules=schedule)).decide(IDLE)
    assert (decision.desired, decision.reason, decision.detail) == (7, "schedule", "the scheduled minimum is 7")


def test_the_cold_start_is_the_configured_one_then_the_measured_one() -> None:
    measured = replace(IDLE, cold_start_s=7.0)
    assert Autoscaler(config(cold_start_s=0.0)).cold_start(measured) == 0.0
    assert Autoscaler(config()).cold_start(measured) == 7.0
    assert Autoscaler(config()).cold_start(IDLE) == COLD_START_S


def test_what_is_not_given_is_nothing() -> None:
    assert FleetLoad(3.0, 4) == FleetLoad(3.0, 4, 0, 0, 0.0, 0, 0, 0.0, 0.0, 0.0, 0.0, None)
    assert not FleetLoad(3.0, 4).demand and FleetLoad(3.0, 4, starting=2).present == 6
    assert replace(IDLE, arrivals_per_s=0.5, refused_per_s=0.25).new_per_s == pytest.approx(0.5 / 1.75)
    assert Autoscaler(config()).explain() == "no decision yet"


@pytest.mark.parametrize(
    ("load", "concurrency", "learned"),
    [
        (FleetLoad(0.0, 2, running=16, slots=20, finished_per_s=4.0), None, 2.0),
        (FleetLoad(0.0, 2, running=15, slots=20, finished_per_s=4.0), None, None),
        (FleetLoad(0.0, 2, running=16, finished_per_s=4.0), 10, 2.0),
        (FleetLoad(0.0, 2, running=16, finished_per_s=4.0), None, None),  # slots are not known
        (FleetLoad(0.0, 2, running=0, finished_per_s=4.0), None, None),
        (FleetLoad(0.0, 2, queued=1, finished_per_s=4.0), None, 2.0),
        (FleetLoad(0.0, 1, running=1, finished_per_s=0.5), 1, 0.5),
        (FleetLoad(0.0, 2, running=16, slots=400, finished_per_s=4.0), 10, 2.0),  # the configured ones count
    ],
)
def test_the_rate_of_a_replica_is_learned_while_eight_tenths_of_its_slots_are_taken(
    load: FleetLoad, concurrency: int | None, learned: float | None
) -> None:
    scaler = Autoscaler(config(concurrency=concurrency, max=2))
    for tick in range(13):
        scaler.decide(replace(load, now=5.0 * tick))
    assert scaler.replica_rate == (learned if learned is None else pytest.approx(learned))


@pytest.mark.parametrize(
    ("queued", "wait_s", "ready", "asked"), [(2, 0.5, 2, 4), (2, 0.0, 2, 0), (0, 0.5, 2, 0), (2, 0.5, 0, 0)]
)
def test_before_a_rate_is_known_the_predicted_wait_tells_it(queued: int, wait_s: float, ready: int, asked: int) -> None:
    """Two in half a second on two replicas: two per second each. Half of that serves 3 and two in 2 s."""
    load = FleetLoad(0.0, ready, queued=queued, predicted_wait_s=wait_s, arrivals_per_s=3.0)
    assert needs(load, drain_s=2.0, target_wait_s=10.0).rate == asked


def test_without_arrivals_nothing_is_expected_to_grow() -> None:
    assert needs(replace(IDLE, running=5), concurrency=10, forecast=True).forecast == 1
    assert needs(replace(IDLE, running=5), concurrency=10).forecast == 1
    both = needs(replace(IDLE, running=5, arrivals_per_s=6.0), concurrency=10, replica_rate=1.0)
    assert (both.rate, both.forecast, both.busy) == (12, 12, 1)


def test_the_largest_count_of_the_window_holds_a_fall() -> None:
    scaler = Autoscaler(config(**(QUICK | {"stabilisation_s": 100.0}), step_down=1.0))
    for now, running in ((0.0, 40), (10.0, 30), (20.0, 20), (30.0, 25)):
        assert scaler.desired(busy(running, now=now, ready=8)) == 8
    assert scaler.desired(busy(25, now=100.0, ready=8)) == 8
    assert scaler.desired(busy(25, now=105.0, ready=8)) == 6, "that of 0 s is out of the window, that of 10 s is not"
    assert scaler.desired(busy(25, now=110.0, ready=6)) == 6
    held = scaler.decide(busy(1, now=111.0, ready=6))
    assert (held.desired, held.reason) == (5, "fall")
    assert scaler.decide(busy(1, now=112.0, ready=5)).detail.startswith("1 would be enough, but 5 were needed")


def test_as_many_as_there_are_count_as_needed_while_requests_wait() -> None:
    scaler = Autoscaler(config(**QUICK, step_down=1.0))
    scaler.decide(busy(40, ready=8))
    waiting = FleetLoad(now=5.0, ready=5, starting=3, running=5, queued=1)
    assert scaler.desired(waiting) == 8
    assert scaler.desired(replace(waiting, now=6.0, queued=0)) == 1


def test_only_changes_start_a_cool_down() -> None:
    scaler = Autoscaler(config(concurrency=10, scale_up_cooldown_s=15.0))
    assert scaler.desired(busy(5)) == 1
    assert scaler.desired(busy(20, now=5.0)) == 4, "nothing rose at 0 s"
    scaler = Autoscaler(config(**(QUICK | {"scale_down_cooldown_s": 30.0}), step_down=0.01))
    assert scaler.desired(busy(20, ready=4)) == 4
    assert scaler.desired(busy(1, now=5.0, ready=4)) == 3, "nothing fell at 0 s"
    assert scaler.desired(busy(20, now=6.0, ready=3)) == 4, "a rise does not wait for the cool-down of a fall"
    assert scaler.desired(busy(1, now=35.5, ready=4)) == 4, "but a fall for that of a rise"
    assert scaler.desired(busy(1, now=36.0, ready=4)) == 3


def test_from_nothing_to_a_scheduled_minimum() -> None:
    night = {"idle_s": 10.0, "min": 0}
    for least, reason in ((1, "minimum"), (2, "schedule"), (3, "schedule")):
        schedule = (ScheduleConfig(start="00:00", end="24:00", min=least),)
        decision = Autoscaler(config(schedules=schedule, **night)).decide(FleetLoad(now=0.0, ready=0))
        assert (decision.desired, decision.reason) == (least, reason)
    both = (ScheduleConfig(start="00:00", end="24:00", min=5),)
    assert Autoscaler(config(schedules=both, min=3)).decide(FleetLoad(now=0.0, ready=1)).reason == "schedule"
    assert Autoscaler(config(schedules=both, min=5)).decide(FleetLoad(now=0.0, ready=1)).reason == "minimum"


def test_a_model_without_replicas_wakes_for_few_requests_and_a_minimum_never_sleeps() -> None:
    asleep = FleetLoad(now=0.0, ready=0)
    for sign in ({"arrivals_per_s": 0.5}, {"queued": 1}):
        assert Autoscaler(config(min=0)).desired(replace(asleep, **sign)) == 1
    sleeping = Autoscaler(config(min=0)).decide(asleep)
    assert (sleeping.desired, sleeping.reason) == (0, "steady")
    awake = Autoscaler(config(min=1, idle_s=10.0))
    assert [awake.desired(FleetLoad(now=now, ready=1)) for now in (0.0, 1000.0)] == [1, 1]


def test_as_many_as_the_maximum_are_no_excess() -> None:
    at = Autoscaler(config(max=4, concurrency=10)).decide(busy(20, ready=4))
    assert (at.desired, at.reason) == (4, "steady")
    lowered = Autoscaler(config(max=4)).decide(replace(IDLE, ready=5))
    assert (lowered.desired, lowered.reason) == (4, "maximum")
    assert Autoscaler(config(spot=0.5, spot_base=1)).decide(replace(IDLE, ready=5)).spot == 2
