"""A simulated pipeline is full: as many steps in flight as stages (R-ENG-10)."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from penstock.bench.arrivals import Planned
from penstock.config.routing import AdmissionConfig
from penstock.planning.calibration import calibration_for
from penstock.planning.capacity import RequestShape, closed_loop
from penstock.planning.catalogue import device
from penstock.planning.deployment import Deployment
from penstock.planning.model_shape import model_shape
from penstock.simulation.fleet import Fault, FleetSpec
from penstock.simulation.gateway import GatewaySpec
from penstock.simulation.one_engine import Replay
from penstock.simulation.replica import ReplicaSpec
from penstock.simulation.run import Simulation
from penstock.simulation.step_model import LinearSteps, StepModel
from tests.simulation.traffic import Chats

PLAN = random.Random(0)
REQUESTS = [Planned(0.0, PLAN.randint(20, 500), PLAN.randint(10, 90)) for _ in range(300)]
GATEWAY = GatewaySpec(policy="round_robin", admission=AdmissionConfig(enabled=False), hop_s=0.0)


@dataclass(frozen=True)
class OneStage:
    """The time of one stage of several."""

    whole: StepModel
    stages: int

    def of(self, decodes: int, context: int, prefill: int, attended: int, samples: int) -> float:
        return self.whole.of(decodes, context, prefill, attended, samples) / self.stages


def rate(replica: ReplicaSpec, concurrency: int) -> float:
    """Requests per second of mixed lengths with so many in flight, while none are missing at the beginning or end."""
    run = Simulation(Replay(REQUESTS, concurrency), FleetSpec(replica), GATEWAY, 1e6, sample_s=1e6)
    rows = list(run.run().requests)
    assert len(rows) == len(REQUESTS) and all(row.status == "served" for row in rows)
    for unit in run.fleet.units:
        unit.replica.scheduler.check_idle()
    ends = sorted(row.end for row in rows)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (last - first) / (ends[last] - ends[first])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_do_nearly_as_much_as_each_alone(stages: int, overlap: bool) -> None:
    """Each stage alone has as many sequences as one step of the pipeline; all together must reach 0.85 of their sum."""
    steps = LinearSteps()
    alone = ReplicaSpec(OneStage(steps, stages), 20_000, token_budget=1024, overlap=overlap)
    pipeline = replace(alone, step_time=steps, stages=stages)
    full = rate(pipeline, 8 * pipeline.batches) / rate(alone, 8)
    print(f"{stages} stages, overlap {overlap}: {full:.3f} of the sum of its stages")
    assert full >= 0.85


def test_one_batch_at_a_time_would_not_be() -> None:
    """The same pipeline with a single request in flight: its stages take turns."""
    steps = LinearSteps()
    alone = ReplicaSpec(OneStage(steps, 4), 20_000, overlap=False)
    assert rate(replace(alone, step_time=steps, stages=4), 1) < 0.35 * rate(alone, 1)


def test_replicas_with_stages_die_and_come_back_with_nothing_held() -> None:
    spec = ReplicaSpec(LinearSteps(step_s=0.01), 300, max_running=8, token_budget=256, stages=3)
    faults = [Fault(4.0, "replica", 0, 3.0), Fault(9.0, "replica", 1, 2.0)]
    run = Simulation(Chats(), FleetSpec(spec, replicas=2, cold_start_s=1.0), GATEWAY, 15.0, faults=faults)
    record = run.run()
    assert record.totals.failures == 2 and record.totals.failovers > 0
    assert record.totals.served == record.totals.arrived > 100
    late = {row.replica for row in record.requests if row.at > 12.0}
    assert late == {"0", "1"}, "both came back"
    for unit in run.fleet.units:
        unit.replica.scheduler.check_idle()


def test_a_plan_counts_the_steps_in_flight() -> None:
    """Two stages serve more than one device with as many sequences in a step; not twice as much, since the steps of
    several ranks are launched kernel by kernel."""
    h100 = device("h100")
    request, factors = RequestShape(prompt=1000, output=250), calibration_for(h100)
    one = Deployment(shape=model_shape("llama-8b"), device=h100, max_model_len=8192)
    two = replace(one, pipeline_parallel=2)
    single, both = (closed_loop(one, factors, request, 32), closed_loop(two, factors, request, 64))
    assert 1.3 * single.requests_per_s < both.requests_per_s < 2 * single.requests_per_s
    assert both.itl_s > single.itl_s
