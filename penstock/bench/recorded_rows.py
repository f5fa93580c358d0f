"""Figures that were measured and recorded, as steps and seconds, and the calibrations that are fitted to them.

Rows are data with their source (`data/recorded_rows.yaml`). A workload is predicted by walking it through the scheduler
step by step, so batching and chunked prompts are those of the engine. Rows that are held out judge a fit without being
a part of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, Literal

from penstock.bench import shapes, workloads
from penstock.bench.fit import Observation, fit
from penstock.bench.step_walk import walk
from penstock.bench.workloads import Workload
from penstock.planning.calibration import Calibration, Source, WeightFactors
from penstock.planning.catalogue import device
from penstock.planning.config_shape import shape_of_config
from penstock.planning.deployment import Deployment
from penstock.planning.model_shape import with_layers
from penstock.planning.numbers import KVDType, WeightDType
from penstock.planning.step_time import StepWork

Unit = Literal["output_tps", "total_tps", "prompt_tps", "ttft_ms", "gap_ms"]
_UNITS: dict[Unit, str] = {
    "output_tps": "output tok/s",
    "total_tps": "total tok/s",
    "prompt_tps": "prompt tok/s",
    "ttft_ms": "ms to first token",
    "gap_ms": "ms per step",
}

_STEP_TOKENS = {"h200": 8192}
"""The budget with which rows were measured, where it is not the engine's any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One recorded figure."""

    device: str
    model: str
    unit: Unit
    measured: float
    source: str
    weights: WeightDType = "bf16"
    kv: KVDType = "auto"
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
            config = with_layers(config, self.layers)
        return Deployment(
            shape=shape_of_config(config, self.model),
            device=device(self.device),
            weight_dtype=self.weights,
            kv_dtype=self.kv,
            token_budget=_STEP_TOKENS.get(self.device),
        )

    def _steps(self) -> Sequence[StepWork]:
        if self.workload is None:
            return [StepWork(self.streams, self.streams * self.context, 0, 0, self.streams)]
        deployment = self.deployment
        steps = _walked(self.workload, deployment.most_running, deployment.step_tokens)
        if self.unit != "ttft_ms":
            return steps
        first = next(index for index, step in enumerate(steps) if step.samples)
        return steps[: first + 1]

    def _tokens(self) -> int:
        assert self.workload is not None, "tokens per second need a workload"
        lengths = list(_workload(self.workload).lengths())
        inputs, outputs = sum(inputs for inputs, _ in lengths), sum(outputs for _, outputs in lengths)
        return {"output_tps": outputs, "prompt_tps": inputs}.get(self.unit, inputs + outputs)


@lru_cache(maxsize=64)
def _walked(workload: str, max_running: int, token_budget: int) -> tuple[StepWork, ...]:
    return tuple(walk(_workload(workload), max_running=max_running, token_budget=token_budget))


def _workload(name: str) -> Workload:
    sizes = re.fullmatch(r"(\d+) x (\d+)/(\d+)", name)
    if sizes is None:
        return workloads.named(name)
    requests, inputs, outputs = map(int, sizes.groups())
    return Workload(name, requests, (inputs, inputs), (outputs, outputs))


def recorded_rows(of: str) -> list[Row]:
    """Of a device, with their sources spelled out."""
    import yaml

    file = resources.files("penstock.bench") / "data" / "recorded_rows.yaml"
    tree: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [Row(device=of, **row | {"source": tree["sources"][row["source"]]}) for row in tree["devices"][of]]


@dataclass(frozen=True, slots=True)
class Fit:
    """How the packaged calibration of a device comes from its rows."""

    start: Calibration
    """Round guesses, except for what no row shows."""
    factors: tuple[str, ...]
    """What the rows show."""


def fit_rows(rows: Sequence[Row]) -> Calibration:
    """The calibration of a device, from those of its rows that are neither held out nor outside."""
    how = FITS[rows[0].device]
    return fit(how.start, how.factors, [row.observation() for row in rows if not row.held_out and not row.outside])


FITS = {
    "h200": Fit(
        Calibration(
            device="h200",
            source=Source(
                machine="NVIDIA H200; torch 2.11.0 + CUDA 13.0, triton 3.6.0, Python 3.12.3",
                date="2026-11-15 and 2026-11-16",
                commit="79b6534 and later",
                command="penstock bench predictions --device h200 --fit FILE",
                note="fitted to recorded rows (bench/data/recorded_rows.yaml) of several runs, not measured by "
                "--calibrate; verify_s from the speculation test, launch_layer_s from prompts launched kernel by "
                "kernel (results/h200.md)",
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
        ),
        (
            *(f"{form}.{factor}" for form in ("bf16", "fp8") for factor in ("read_few", "read", "compute")),
            *("kv_read", "attention", "step_s", "prompt_step_s", "layer_s", "sequence_s", "expert_layer_s"),
        ),
    ),
    "cpu-2": Fit(
        Calibration(
            device="cpu-2",
            source=Source(
                machine="two Neoverse-N1 cores; torch 2.13.0",
                date="2026-11-15",
                commit="188f995 and earlier",
                command="penstock bench predictions --device cpu-2 --fit FILE",
                note="fitted to recorded rows of smollm2-135m (Q4_1), not measured by --calibrate; reading speed, "
                "step_s and prompt_step_s are estimates: arithmetic is the bound at any batch",
            ),
            weights={"int4": WeightFactors(0.8, 0.8, 1.0)},
            kv_read=0.5,
            attention=0.3,
            step_s=500e-6,
            prompt_step_s=1000e-6,
            layer_s=100e-6,
            sequence_s=300e-6,
            few_tokens=1,
        ),
        ("int4.compute", "attention", "layer_s", "sequence_s"),
    ),
    "cpu-2-amx": Fit(
        Calibration(
            device="cpu-2-amx",
            source=Source(
                machine="two cores of a Xeon with AMX; torch 2.11",
                date="2026-11-16",
                commit="faa2f70",
                command="penstock bench predictions --device cpu-2-amx --fit FILE",
                note="fitted to recorded rows of smollm2-135m (Q4_1, int8 cache), not measured by --calibrate; "
                "attention, kv_read, step_s and layer_s from where the time of steps goes (results/cpu-x86.md), "
                "reading speed from buffers of 128 MiB. Part of this model stays in the caches: a larger one is read "
                "more slowly than this says",
            ),
            weights={"int4": WeightFactors(1.6, 0.9, 0.2)},
            kv_read=0.8,
            attention=0.08,
            step_s=500e-6,
            prompt_step_s=500e-6,
            layer_s=10e-6,
            sequence_s=20e-6,
            few_tokens=1,
        ),
        ("int4.compute", "prompt_step_s", "sequence_s"),
    ),
}
