"""The simulator beside what one H200 was measured to do (docs/results/h200.md), with the packaged calibration."""

from __future__ import annotations

import pytest

from penstock.bench import workloads
from penstock.bench.arrivals import Planned
from penstock.bench.recorded_rows import Row, recorded_rows
from penstock.planning.calibration import calibration_for
from penstock.planning.catalogue import device
from penstock.simulation.one_engine import simulated

TOLERANCE = 0.15
ROWS = [row for row in recorded_rows("h200") if row.workload is not None and not row.outside]


def figure(row: Row) -> float:
    """What the simulator says, in the unit of the row."""
    assert row.workload is not None
    workload = workloads.named(row.workload)
    seen = simulated(
        [Planned(0.0, inputs, outputs) for inputs, outputs in workload.lengths()],
        row.deployment,
        calibration_for(device("h200")),
        num_blocks=sum(-(-sum(lengths) // 16) + 1 for lengths in workload.lengths()),
        max_model_len=workload.longest + 1,
        overlap=True,
        concurrency=workload.concurrency,
    )
    if row.unit == "ttft_ms":
        return 1e3 * seen.ttft[0]
    prompts = sum(inputs for inputs, _ in workload.lengths()) if row.unit == "total_tps" else 0
    return (seen.output_tokens + prompts) / seen.seconds


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_measured_row_is_simulated_within_the_tolerance(row: Row) -> None:
    assert figure(row) == pytest.approx(row.measured, rel=TOLERANCE)
