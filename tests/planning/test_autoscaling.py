"""The autoscaling policy: a pure object whose clock is in the load it is shown."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.autoscale import AutoscaleConfig, ScheduleConfig
from penstock.planning.autoscaling import Autoscaler, FleetLoad
from penstock.planning.schedule import covers

TICK_S = 5.0
MONDAY = 4 * 86400.0
"""1970-01-05, a Monday, at midnight UTC."""


@dataclass
class Fleet:
    """A model of a fleet: replicas with slots and a fixed time per request, a cold start, and a queue. Fluid: parts of
    requests count."""

    scaler: Autoscaler
    service_s: float = 4.0
    slots: int = 8
    cold_start_s: float = 20.0
    now: float = 1000.0
    ready: int = 1
    broken: bool = False
    """No replica started from now on becomes ready."""

    def __post_init__(self) -> None:
        self.starting: list[float] = []
        self.running = self.queue = 0.0
        self.counts: list[int] = []

    @property
    def rate(self) -> float:
        """Requests per second of a full replica."""
        return self.slots / self.service_s

    def pass_time(self, arrivals_per_s: float, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.tick(arrivals_per_s)

    def tick(self, arrivals_per_s: float) -> None:
        self.now += TICK_S
        up = [] if self.broken else [at for at in self.starting if at <= self.now]
        self.ready += len(up)
        self.starting = self.starting[len(up) :]
        self.queue += arrivals_per_s * TICK_S
        finished = min(self.running / self.service_s * TICK_S, self.running)
        self.running -= finished
        begun = min(self.queue, self.ready * self.slots - self.running)
        self.queue, self.running = self.queue - begun, self.running + begun
        load = FleetLoad(
            now=self.now,
            ready=self.ready,
            starting=len(self.starting),
            queued=math.ceil(self.queue - 1e-6),
            predicted_wait_s=self.queue / (self.ready * self.rate) if self.ready else 0.0,
            running=math.ceil(self.running - 1e-3),
            slots=self.ready * self.slots,
            kv_use=0.5 * self.running / (self.ready * self.slots) if self.ready else 0.0,
            arrivals_per_s=arrivals_per_s,
            finished_per_s=finished / TICK_S,
            cold_start_s=self.cold_start_s,
        )
        self.follow(self.scaler.desired(load))

    def follow(self, desired: int) -> None:
        self.counts.append(desired)
        while desired > self.ready + len(self.starting):
            self.starting.append(self.now + self.cold_start_s)
        while desired < self.ready + len(self.starting):
            if self.starting:
                self.starting.pop()
            else:
                self.ready -= 1
        self.running = min(self.running, self.ready * self.slots)


def quick(**settings: object) -> AutoscaleConfig:
    base = AutoscaleConfig(min=1, max=20, stabilisation_s=60.0, scale_down_cooldown_s=20.0)
    return replace(base, **settings)  # type: ignore[arg-type]


def reason(scaler: Autoscaler) -> str:
    assert scaler.last is not None
    return scaler.last.reason


configs = st.builds(
    lambda low, high, target, up, down, stable, step, zero: AutoscaleConfig(
        min=0 if zero else low, max=max(low, high), target_utilisation=target, scale_up_cooldown_s=up,
        scale_down_cooldown_s=down, stabilisation_s=stable, step_up=step, idle_s=60.0,
    ),
    st.integers(1, 6), st.integers(1, 30), st.floats(0.2, 1.0), st.floats(0, 60), st.floats(0, 120),
    st.floats(0, 300), st.floats(0.1, 3.0), st.booleans(),
)  # fmt: skip
loads = st.lists(
    st.builds(
        FleetLoad,
        now=st.just(0.0),
        ready=st.integers(0, 40),
        starting=st.integers(0, 10),
        queued=st.integers(0, 5000),
        predicted_wait_s=st.floats(0, 1e5),
        running=st.integers(0, 5000),
        slots=st.integers(0, 5000),
        kv_use=st.floats(0, 1),
        arrivals_per_s=st.floats(0, 1e4),
        finished_per_s=st.floats(0, 1e4),
        cold_start_s=st.none() | st.floats(0, 900),
    ),
    max_size=30,
)


@settings(max_examples=50, deadline=None)
@given(configs, loads, st.floats(0.1, 400))
def test_the_count_stays_within_its_limits_whatever_is_reported(
    config: AutoscaleConfig, seen: list[FleetLoad], step: float
) -> None:
    scaler = Autoscaler(config)
    for number, load in enumerate(seen):
        decision = scaler.decide(replace(load, now=number * step))
        assert config.min <= decision.desired <= config.max
        assert 0 <= decision.spot <= decision.desired
        assert decision.detail and decision.detail == scaler.explain()


@settings(max_examples=50, deadline=None)
@given(configs, loads)
def test_the_count_never_falls_while_requests_wait(config: AutoscaleConfig, seen: list[FleetLoad]) -> None:
    scaler = Autoscaler(replace(config, max=256))
    for number, load in enumerate(seen):
        before = scaler.last.desired if scaler.last else load.present
        desired = scaler.desired(replace(load, now=number * 10.0, queued=load.queued + 1, ready=before, starting=0))
        assert desired >= min(before, 256)


@pytest.mark.parametrize("rate", [5e-324, 2e-313, 1e-300])
def test_replicas_that_finish_next_to_nothing_ask_for_the_maximum(rate: float) -> None:
    scaler = Autoscaler(quick(replica_rate=rate, target_utilisation=0.4))
    load = FleetLoad(now=0.0, ready=1, slots=8, running=8, queued=5)
    decision = scaler.decide(load)
    assert decision.needs.rate == 10**9 and 1 < decision.desired <= scaler.config.max


@settings(max_examples=30, deadline=None)
@given(st.floats(0.0, 25.0), st.floats(0.4, 0.9), st.booleans())
def test_a_constant_load_never_makes_it_go_up_and_down(rate: float, target: float, known: bool) -> None:
    scaler = Autoscaler(quick(target_utilisation=target, replica_rate=2.0 if known else None))
    fleet = Fleet(scaler)
    fleet.pass_time(rate, 900)
    fleet.counts.clear()
    fleet.pass_time(rate, 900)
    assert len(set(fleet.counts)) == 1, fleet.counts
    assert fleet.queue < fleet.rate * fleet.ready * TICK_S or fleet.ready == 20


@settings(max_examples=30, deadline=None)
@given(st.floats(0.2, 2.0), st.floats(2.0, 10.0))
def test_a_spike_is_answered_within_bounded_time(base: float, factor: float) -> None:
    """Within the cool-down and a cold start there is capacity for the spike, and the backlog goes."""
    fleet = Fleet(Autoscaler(quick()))
    fleet.pass_time(base, 600)
    spike = min(base * factor, 0.9 * 20 * fleet.rate)
    enough = math.ceil(spike / fleet.rate)
    fleet.pass_time(spike, 60)
    assert fleet.ready >= enough
    fleet.pass_time(spike, 180)
    assert fleet.queue < fleet.rate * fleet.ready * TICK_S


@settings(max_examples=50, deadline=None)
@given(loads, st.integers(0, 3), st.floats(0.0, 500.0))
def test_more_load_never_means_fewer_replicas(seen: list[FleetLoad], which: int, more: float) -> None:
    """The first decision for a load, from the same state, rises with every signal."""
    for load in seen[:5]:
        load = replace(load, ready=max(load.ready, 1), now=0.0)
        bigger = [
            replace(load, queued=load.queued + round(more)),
            replace(load, running=load.running + round(more)),
            replace(load, kv_use=min(load.kv_use + more / 500, 1.0)),
            replace(load, queued=load.queued + 1, predicted_wait_s=load.predicted_wait_s + more),
        ][which]
        config = AutoscaleConfig(max=200, replica_rate=3.0)
        assert Autoscaler(config).desired(bigger) >= Autoscaler(config).desired(load)


def test_replicas_that_never_become_ready_do_not_pile_up() -> None:
    fleet = Fleet(Autoscaler(quick(max=6)), broken=True)
    fleet.pass_time(0.9 * fleet.rate, 900)
    assert fleet.ready == 1
    assert fleet.ready + len(fleet.starting) <= 6
    assert fleet.counts == sorted(fleet.counts), "it asks for them and waits, and does not give up and ask again"


def test_it_looks_ahead_by_the_cold_start() -> None:
    """On a ramp, the forecast orders replicas earlier than the same policy without it."""

    def needed_at(forecast: bool) -> list[int]:
        fleet = Fleet(Autoscaler(quick(forecast=forecast, max=20, replica_rate=2.0)), cold_start_s=60.0)
        fleet.pass_time(1.0, 300)
        for step in range(60):
            fleet.tick(1.0 + step * 0.2)
        return fleet.counts[-60:]

    ahead, behind = needed_at(True), needed_at(False)
    assert sum(ahead) > sum(behind)
    assert all(early >= late for early, late in zip(ahead, behind, strict=True))


def test_random_arrivals_are_no_trend() -> None:
    """Poisson noise around a constant rate does not make the forecast ask for more than a replica on top."""
    rng = random.Random(3)
    fleet = Fleet(Autoscaler(quick()))
    for _ in range(400):
        fleet.tick(rng.gauss(6.0, math.sqrt(6.0 / TICK_S)))
    late = fleet.counts[100:]
    assert max(late) - min(late) <= 1
    assert sum(a != b for a, b in itertools.pairwise(late)) <= 2


def test_scale_to_zero_and_wake() -> None:
    scaler = Autoscaler(quick(min=0, idle_s=30.0))
    load = FleetLoad(now=0.0, ready=1, slots=8)
    assert [scaler.desired(replace(load, now=t)) for t in (0.0, 10.0, 29.0)] == [1, 1, 1]
    assert scaler.desired(replace(load, now=31.0)) == 0
    assert reason(scaler) == "idle"
    asleep = FleetLoad(now=40.0, ready=0)
    assert scaler.desired(asleep) == 0
    assert scaler.desired(replace(asleep, now=41.0, queued=1)) == 1
    assert reason(scaler) == "wake"
    assert scaler.desired(FleetLoad(now=42.0, ready=0, starting=1)) == 1, "a client that left does not stop the start"


def test_a_schedule_is_ready_in_time_and_ends() -> None:
    office = ScheduleConfig(days=("mon",), start="08:00", end="18:00", min=5)
    scaler = Autoscaler(quick(schedules=(office,), cold_start_s=120.0, scale_down_cooldown_s=0.0, step_down=1.0))
    idle = FleetLoad(now=MONDAY, ready=1)

    def at(hour: float, ready: int) -> int:
        return scaler.desired(replace(idle, now=MONDAY + hour * 3600, ready=ready))

    assert at(7.9, 1) == 1
    assert at(8 - 1 / 40, 1) == 5, "90 s before eight, because a start takes 120 s"
    assert reason(scaler) == "schedule"
    assert at(17.99, 5) == 5
    assert at(18.1, 5) == 1
    assert at(24 + 9, 1) == 1, "not on Tuesday"


def test_a_night_schedule_ends_on_the_next_day() -> None:
    night = ScheduleConfig(days=("sun",), start="22:00", end="06:00", min=2)
    assert covers(night, MONDAY - 3600)
    assert covers(night, MONDAY + 5 * 3600)
    assert not covers(night, MONDAY + 6 * 3600)
    assert not covers(night, MONDAY + 23 * 3600), "it begins on Sundays only"


def test_kv_use_alone_asks_for_replicas() -> None:
    scaler = Autoscaler(quick())
    assert scaler.desired(FleetLoad(now=0.0, ready=4, running=4, slots=400, kv_use=0.97)) == 5
    assert reason(scaler) == "kv"


def test_a_lost_replica_does_not_lower_the_count() -> None:
    """A replica with a spot notice is no longer counted; the decision stays, so that a replacement starts."""
    scaler = Autoscaler(quick())
    load = FleetLoad(now=0.0, ready=4, running=22, slots=32, arrivals_per_s=5.0)
    assert scaler.desired(load) == 4
    assert scaler.desired(replace(load, now=5.0, ready=3, slots=24)) == 4


def test_the_spot_share_leaves_a_base_on_demand() -> None:
    scaler = Autoscaler(quick(spot=0.5, spot_base=2))
    assert [scaler.spot(count) for count in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]


def test_the_sentence_names_what_decided() -> None:
    scaler = Autoscaler(quick(max=3))
    scaler.desired(FleetLoad(now=0.0, ready=1, running=8, slots=8, queued=40, predicted_wait_s=20.0))
    assert scaler.last is not None
    assert scaler.explain() == "the requests in flight ask for 9 rather than 1"
    assert scaler.last.desired == 3


def test_requests_that_come_back_are_not_counted_again() -> None:
    """Clients try three times: while all are refused, a third of the arrivals are new."""
    load = FleetLoad(now=0.0, ready=1, arrivals_per_s=15.0)
    assert load.new_per_s == 15.0
    assert replace(load, refused_per_s=15.0).new_per_s == 5.0
    assert FleetLoad(now=0.0, ready=1, refused_per_s=3.0).new_per_s == 0.0


def test_the_predicted_wait_tells_the_rate_of_a_replica_before_one_was_learned() -> None:
    scaler = Autoscaler(quick(forecast=False, drain_s=60.0))
    for now in range(0, 60, 5):
        scaler.desired(FleetLoad(now=now, ready=2, running=4, slots=400, arrivals_per_s=10.0))
    queued = FleetLoad(now=60.0, ready=2, running=90, slots=400, arrivals_per_s=10.0, queued=60, predicted_wait_s=15.0)
    # 60 in 15 s on two replicas are 2 per second each: (10 + 60 / 60) / (2 x 0.7) replicas are needed.
    decision = scaler.decide(queued)
    assert decision.needs.rate == 8 and decision.desired == 6


def test_a_short_busy_moment_teaches_nothing_and_a_busy_time_the_true_rate() -> None:
    """Requests that began just now have had no time to finish; what finishes then is no measure of capacity."""
    fleet = Fleet(Autoscaler(quick(max=1)), service_s=12.0)
    fleet.pass_time(0.2, 120)
    fleet.pass_time(2.0, 5)
    fleet.pass_time(0.2, 120)
    assert (fleet.scaler.replica_rate or 0.0) == 0.0
    fleet.pass_time(2.0, 240)
    assert 0.85 * fleet.rate < (fleet.scaler.replica_rate or 0.0) < 1.15 * fleet.rate
