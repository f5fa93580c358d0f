"""One simulated engine with nothing before it, driven like a real one by `bench engine`: to be compared with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from penstock.bench.arrivals import Planned
from penstock.config.routing import AdmissionConfig
from penstock.planning.calibration import Calibration
from penstock.planning.deployment import Deployment
from penstock.planning.step_time import StepTime
from penstock.simulation.arrival import Arrival, Segment
from penstock.simulation.fleet import FleetSpec
from penstock.simulation.gateway import GatewaySpec
from penstock.simulation.real_run import Observed
from penstock.simulation.replica import ReplicaSpec
from penstock.simulation.run import simulate

LONGEST_S = 86_400.0
"""Of a run after its last arrival."""


class Replay:
    """A plan as a source: prompts that share nothing, when they are due or, as a closed loop, so many in flight."""

    def __init__(self, plan: Sequence[Planned], concurrency: int | None = None) -> None:
        self._left = iter(enumerate(plan, 1))
        self._concurrency = concurrency

    def arrivals(self) -> Iterator[Arrival]:
        for number, planned in itertools.islice(self._left, self._concurrency):
            yield Arrival(planned.at, (Segment(number, planned.input_len),), planned.output_len)

    def after(self, arrival: Arrival, finished_at: float) -> Arrival | None:
        following = next(self._left, None) if self._concurrency is not None else None
        if following is None:
            return None
        number, planned = following
        return Arrival(finished_at, (Segment(number, planned.input_len),), planned.output_len)

    def refused(self, arrival: Arrival, at: float, retry_after_s: float | None) -> Arrival | None:
        return None


def simulated(
    plan: Sequence[Planned],
    deployment: Deployment,
    calibration: Calibration,
    *,
    num_blocks: int,
    block_size: int = 16,
    max_model_len: int | None = None,
    overlap: bool = False,
    concurrency: int | None = None,
) -> Observed:
    """The plan on one simulated engine without a gateway before it."""
    replica = ReplicaSpec(
        step_time=StepTime(deployment, calibration),
        num_blocks=num_blocks,
        block_size=block_size,
        max_running=deployment.most_running,
        token_budget=deployment.step_tokens,
        target_gap_s=deployment.gap_s,
        gap_is_default=True,
        gap_yields_s=deployment.gap_yields_s,
        prompt_tile=deployment.prompt_tile,
        max_model_len=max_model_len or deployment.context_len,
        overlap=overlap,
        stages=deployment.pipeline_parallel,
    )
    gateway = GatewaySpec(policy="round_robin", admission=AdmissionConfig(enabled=False), hop_s=0.0)
    last = max(planned.at for planned in plan)
    record = simulate(
        Replay(plan, concurrency), FleetSpec(replica), gateway, seconds=last + LONGEST_S, sample_s=LONGEST_S
    )
    rows = list(record.requests)
    assert len(rows) == len(plan) and all(row.status == "served" for row in rows), "an engine serves whatever it gets"
    return Observed(
        ttft=[row.ttft_s for row in rows if row.ttft_s is not None],
        gaps=record.all_gaps(),
        output_tokens=record.totals.output_tokens,
        seconds=max(row.end for row in rows),
    )
