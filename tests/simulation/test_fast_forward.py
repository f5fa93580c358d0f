"""Several decode steps at once are the same as one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.routing import AdmissionConfig
from penstock.simulation.decode_run import DecodeRun
from penstock.simulation.fleet import Fault, FleetSpec
from penstock.simulation.gateway import GatewaySpec
from penstock.simulation.record import Record
from penstock.simulation.replica import ReplicaSpec
from penstock.simulation.run import Simulation
from penstock.simulation.step_model import LinearSteps
from tests.simulation.traffic import Chats

STEPS = LinearSteps(step_s=0.01, context_token_s=2e-7)


@dataclass(frozen=True)
class KneeSteps:
    """Twice as steep beyond some context."""

    def of(self, decodes: int, context: int, prefill: int, attended: int, samples: int) -> float:
        return max(0.01 + 1e-6 * context, 0.008 + 3e-6 * context) + 3e-5 * prefill


def run(chats: Chats, spec: FleetSpec, fast: bool, seconds: float, **options: Any) -> Record:
    """Without admission as a rule: it knows the use of KV memory, which it sees a little later in a run."""
    gateway = GatewaySpec(policy="round_robin", admission=AdmissionConfig(enabled=options.pop("admission", False)))
    simulation = Simulation(replace(chats), spec, gateway, seconds, fast_forward=fast, **options)
    record = simulation.run()
    for unit in simulation.fleet.units:
        unit.replica.scheduler.check_idle()
    return record


def assert_same(chats: Chats, spec: FleetSpec, seconds: float = 12.0, **options: Any) -> Record:
    fast, slow = (run(chats, spec, mode, seconds, **options) for mode in (True, False))
    assert len(fast.requests) == len(slow.requests) > 0
    for ours, theirs in zip(fast.requests, slow.requests, strict=True):
        times = [[row.first_token or 0.0, row.end, row.longest_gap, row.queued_s or 0.0] for row in (ours, theirs)]
        assert times[0] == pytest.approx(times[1], rel=1e-9, abs=1e-9)
        same = {"at": 0.0, "first_at": 0.0, "first_token": None, "end": 0.0, "longest_gap": 0.0, "queued_s": None}
        assert replace(ours, **same) == replace(theirs, **same)  # type: ignore[arg-type]
    assert fast.totals.steps == slow.totals.steps
    assert fast.totals.preemptions == slow.totals.preemptions
    assert fast.totals.engine_cached_tokens == slow.totals.engine_cached_tokens
    assert fast.totals.host_cached_tokens == slow.totals.host_cached_tokens
    ours, theirs = fast.all_gaps(), slow.all_gaps()
    assert ours.count == theirs.count
    return fast


@pytest.mark.parametrize("seed", range(12))
def test_records_are_the_same(seed: int) -> None:
    rng = random.Random(seed)
    replica = ReplicaSpec(
        STEPS,
        rng.choice((24, 40, 300)),
        max_running=rng.choice((2, 5, 64)),
        token_budget=rng.choice((64, 512)),
        overlap=rng.random() < 0.5,
        prefix_cache=rng.random() < 0.8,
    )
    chats = Chats(seed, rng.choice((2.0, 12.0)), stop=rng.random() < 0.5)
    assert_same(chats, FleetSpec(replica, replicas=2), seconds=4.0)


def test_admission_with_enough_memory() -> None:
    replica = ReplicaSpec(STEPS, 2000, max_running=4)
    record = assert_same(Chats(rate=20.0), FleetSpec(replica, replicas=2), seconds=6.0, admission=True)
    assert max(row.queued_s or 0.0 for row in record.requests) > 0.1


def test_memory_that_runs_out_preempts_alike() -> None:
    replica = ReplicaSpec(STEPS, 30, overlap=True, max_model_len=400)
    record = assert_same(Chats(rate=20.0, answer=120, turns=1), FleetSpec(replica), seconds=4.0)
    assert record.totals.preemptions > 0


def test_deadlines_cut_a_run() -> None:
    record = assert_same(Chats(rate=3.0, answer=200, timeout_s=1.0), FleetSpec(ReplicaSpec(STEPS, 300)))
    assert record.totals.lost > 0


def test_the_host_tier_is_asked_in_every_step() -> None:
    replica = ReplicaSpec(STEPS, 40, host_blocks=60, host_idle_s=0.3, host_block_s=0.001, max_model_len=600)
    record = assert_same(Chats(rate=3.0), FleetSpec(replica))
    assert record.totals.host_cached_tokens > 0


def test_a_step_time_with_a_knee() -> None:
    assert_same(Chats(rate=3.0, answer=150), FleetSpec(ReplicaSpec(KneeSteps(), 400)))


def test_failures_in_the_middle_of_a_run() -> None:
    replica = ReplicaSpec(STEPS, 300)
    faults = [Fault(3.123, target=0, back_after_s=0.5), Fault(6.0, target=1, back_after_s=None)]
    record = assert_same(Chats(rate=6.0, answer=100), FleetSpec(replica, 3, cold_start_s=1.0), faults=faults)
    assert record.totals.failovers > 0


@given(first=st.floats(1e-4, 1.0), slope=st.floats(0.0, 1e-3), steps=st.integers(1, 2000), part=st.floats(0.0, 1.2))
@settings(max_examples=100, deadline=None)
def test_how_many_steps_are_over(first: float, slope: float, steps: int, part: float) -> None:
    decode = DecodeRun(5.0, steps, 3, first, slope)
    now = 5.0 + part * (decode.end(steps) - 5.0)
    done = decode.done(now)
    assert 0 <= done <= steps
    assert done == 0 or decode.end(done) <= now
    assert done == steps or decode.end(done + 1) > now
