"""`penstock bench predictions`: what `planning.step_time` predicts beside what was measured, row by row.

Rows are recorded figures with their source (`data/h200_rows.yaml`). A workload is predicted by walking it through the
scheduler step by step, so batching and chunked prompts are those of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from penstock.bench import report, shapes, workloads
from penstock.bench.fit import Observation, fit
from penstock.bench.step_walk import walk
from penstock.planning.calibration import (
    Calibration,
    Source,
    WeightFactors,
    calibration_for,
    read_calibration,
    write_calibration,
)
from penstock.planning.catalogue import device
from penstock.planning.config_shape import shape_of_config
from penstock.planning.deployment import Deployment
from penstock.planning.numbers import WeightDType
from penstock.planning.step_time import StepWork

Unit = Literal["output_tps", "total_tps", "ttft_ms", "gap_ms"]
_UNITS: dict[Unit, str] = {
    "output_tps": "output tok/s",
    "total_tps": "total tok/s",
    "ttft_ms": "ms to first token",
    "gap_ms": "ms per step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One recorded figure."""

    model: str
    unit: Unit
    measured: float
    source: str
    weights: WeightDType = "bf16"
    layers: int | None = None
    """Where the measured model had fewer than the shape says."""
    workload: str | None = None
    streams: int = 0
    context: int = 0
    held_out: bool = False
    """Whether the factors are judged by the row without being fitted to it."""
    outside: str = ""
    """Why the row is neither fitted nor judged."""

    @property
    def name(self) -> str:
        size = f" ({self.layers} layers)" if self.layers else ""
        what = self.workload or f"{self.streams} decoding at {self.context}"
        return f"{self.model}{size} {self.weights} {what}"

    @property
    def in_unit(self) -> str:
        return _UNITS[self.unit]

    def observation(self) -> Observation:
        """The row as steps and their seconds, for a fit."""
        steps = self._steps()
        if self.unit in ("ttft_ms", "gap_ms"):
            return Observation(self.name, self.deployment, steps, self.measured / 1e3)
        return Observation(self.name, self.deployment, steps, self._tokens() / self.measured)

    def predicted(self, calibration: Calibration) -> float:
        """In the unit of the row."""
        seconds = self.observation().predicted(calibration)
        return seconds * 1e3 if self.unit in ("ttft_ms", "gap_ms") else self._tokens() / seconds

    def error(self, calibration: Calibration) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted(calibration) / self.measured - 1

    @property
    def deployment(self) -> Deployment:
        config = shapes.named(self.model)
        if self.layers is not None:
            config["num_hidden_layers"] = self.layers
        return Deployment(shape=shape_of_config(config, self.model), device=device("h200"), weight_dtype=self.weights)

    def _steps(self) -> Sequence[StepWork]:
        if self.workload is None:
            return [StepWork(self.streams, self.streams * self.context, 0, 0, self.streams)]
        steps = _walked(self.workload)
        if self.unit != "ttft_ms":
            return steps
        first = next(index for index, step in enumerate(steps) if step.samples)
        return steps[: first + 1]

    def _tokens(self) -> int:
        assert self.workload is not None, "tokens per second need a workload"
        lengths = list(workloads.named(self.workload).lengths())
        outputs = sum(output for _, output in lengths)
        return outputs + sum(inputs for inputs, _ in lengths) if self.unit == "total_tps" else outputs


@lru_cache(maxsize=32)
def _walked(workload: str) -> tuple[StepWork, ...]:
    """With the engine's limits on CUDA."""
    return tuple(walk(workloads.named(workload), max_running=256, token_budget=8192))


def h200_rows() -> list[Row]:
    """Those of this repository's results, with their sources spelled out."""
    import yaml

    file = resources.files("penstock.bench") / "data" / "h200_rows.yaml"
    tree: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [Row(**row | {"source": tree["sources"][row["source"]]}) for row in tree["rows"]]


START = Calibration(
    device="h200",
    source=Source(
        machine="NVIDIA H200; torch 2.11.0 + CUDA 13.0, triton 3.6.0, Python 3.12.3",
        date="2026-11-15 and 2026-11-16",
        commit="79b6534 and later",
        command="penstock bench predictions --fit FILE",
        note="fitted to recorded rows (bench/data/h200_rows.yaml) of several runs, not measured by --calibrate; "
        "verify_s from the speculation test, launch_layer_s from prompts launched kernel by kernel (results/h200.md)",
    ),
    weights={"bf16": WeightFactors(0.9, 0.9, 0.6), "fp8": WeightFactors(0.8, 0.7, 0.6)},
    kv_read=0.85,
    attention=0.5,
    step_s=200e-6,
    prompt_step_s=1000e-6,
    layer_s=20e-6,
    sequence_s=3e-6,
    expert_layer_s=20e-6,
    launch_layer_s=400e-6,
    verify_s=1660e-6,
)
"""Where the fit to the rows begins: round guesses, except for what no row shows."""
FITTED = (
    *(f"{form}.{factor}" for form in ("bf16", "fp8") for factor in ("read_few", "read", "compute")),
    *("kv_read", "attention", "step_s", "prompt_step_s", "layer_s", "sequence_s", "expert_layer_s"),
)
"""The factors that the rows show."""


def fit_rows(rows: Sequence[Row]) -> Calibration:
    """The calibration of an H200, from the rows that are neither held out nor outside."""
    return fit(START, FITTED, [row.observation() for row in rows if not row.held_out and not row.outside])


def main(path: Path | None, fit_to: Path | None, json_file: Path | None, console: Console) -> None:
    rows = h200_rows()
    if fit_to is not None:
        write_calibration(fit_rows(rows), fit_to)
        path = fit_to
    calibration = calibration_for(device("h200")) if path is None else read_calibration(path)
    table = report.table("Predicted and measured, one H200", "row", "unit", "measured", "predicted", "error")
    for row in rows:
        digits = 0 if row.measured >= 1000 else 1
        mark = "*" if row.outside else ", held out" if row.held_out else ""
        table.add_row(
            row.name + mark,
            row.in_unit,
            report.number(row.measured, digits),
            report.number(row.predicted(calibration), digits),
            f"{row.error(calibration):+.1%}",
        )
    console.print(table)
    for kind, judged in (("fitted", False), ("held out", True)):
        errors = sorted(abs(row.error(calibration)) for row in rows if row.held_out == judged and not row.outside)
        console.print(f"{len(errors)} rows {kind}: median error {_middle(errors):.1%}, largest {errors[-1]:.1%}")
    console.print(f"Calibration: {calibration.title}. {calibration.source.note}")
    for row in rows:
        if row.outside:
            console.print(f"* {row.name}: {row.outside}", style="dim")
    if json_file is not None:
        results = [
            {
                "row": row.name,
                "unit": row.unit,
                "measured": row.measured,
                "predicted": row.predicted(calibration),
                "held_out": row.held_out,
            }
            for row in rows
        ]
        report.write_json(json_file, "predictions", {"calibration": calibration.title}, results)


def _middle(values: Sequence[float]) -> float:
    return values[len(values) // 2]
