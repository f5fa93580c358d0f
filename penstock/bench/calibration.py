"""`penstock bench engine --calibrate FILE`: runs that show each factor of a calibration, the fit, and the file.

Steps that only decode are timed apart from those that compute prompts. What each step had to do is counted by walking
the same workload through the scheduler (`step_walk`), so the fit uses the very arithmetic that predicts later.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from penstock.bench import offline, report, workloads
from penstock.bench.engine import Run, Trace, run
from penstock.bench.fit import Observation, factor, fit
from penstock.bench.step_walk import walk
from penstock.bench.workloads import Workload
from penstock.engine.backends.select import pick_device
from penstock.engine.kv.kinds import PagedKV
from penstock.errors import ConfigError
from penstock.planning.calibration import (
    Calibration,
    Source,
    calibration_for,
    read_calibration,
    write_calibration,
)
from penstock.planning.catalogue import Device, device, devices, this_machine
from penstock.planning.config_shape import shape_of_config
from penstock.planning.deployment import Deployment
from penstock.planning.numbers import WEIGHT_FORMATS, KVDType, WeightDType
from penstock.planning.step_time import StepWork

COMMON = ("kv_read", "attention", "step_s", "prompt_step_s", "layer_s", "sequence_s")
"""Factors that do not depend on the weight format."""
_SEGMENTS = 3
"""A run's decode steps are split into this many measurements: context grows between them."""
_DTYPES: dict[str, KVDType] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _sized(requests: int, inputs: int, outputs: int) -> Workload:
    return Workload(f"{requests} x {inputs}/{outputs}", requests, (inputs, inputs), (outputs, outputs))


def default_workloads(on_cpu: bool) -> list[Workload]:
    """One stream, several batches, prompts of several lengths, prompts beside streams, long contexts; less of
    everything on a CPU, which is slower."""
    if on_cpu:
        sizes = ((1, 128, 48), (1, 1000, 12), (4, 128, 24), (16, 64, 24), (4, 512, 8), (40, 64, 12))
        mixed = Workload("6 in flight", 18, (32, 96), (8, 24), concurrency=6)
        return [*(_sized(*size) for size in sizes), mixed]
    names = ("b1", "ttft128", "ttft2048", "c16", "b64", "b256", "prefill", "long30k", "long8x30k")
    return [_sized(4, 1024, 128), *(workloads.named(name) for name in names)]


def main(
    settings: offline.OfflineBenchSettings,
    names: Sequence[str],
    path: Path,
    hardware: str | None,
    json_file: Path | None,
    console: Console,
) -> None:
    """Load, calibrate, print, write."""
    where = pick_device(settings.device)
    chosen = [workloads.named(name) for name in names] or default_workloads(where.type == "cpu")
    start = read_calibration(path) if path.exists() else None
    machine = hardware_of(hardware, str(where))
    if start is not None and start.device != machine.name:
        raise ConfigError(f"{path} is a calibration of {start.device}, not {machine.name}; write to another file")
    loaded = offline.load(settings, chosen, console)
    console.print(f"[bold]{loaded.label}[/bold] on {machine.title or machine.name}: {report.machine_line()}")
    for workload in chosen:
        console.print(f"{workload.name}: {workload.summary}", style="dim")
    with console.status("measuring"):
        deployment, fitted, observations = calibrate(loaded, chosen, settings, machine, start)
    show(fitted, deployment, observations, console)
    write_calibration(fitted, path)
    console.print(f"Wrote {path}")
    if json_file is not None:
        results = [
            {"steps": item.name, "measured_s": item.seconds, "predicted_s": item.predicted(fitted)}
            for item in observations
        ]
        facts = {"model": loaded.label, "device": machine.name, "calibration": dataclasses.asdict(fitted)}
        report.write_json(json_file, "calibration", facts, results)


def calibrate(
    loaded: offline.Loaded,
    chosen: Sequence[Workload],
    settings: offline.OfflineBenchSettings,
    machine: Device,
    start: Calibration | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Deployment, Calibration, list[Observation]]:
    """Measure and fit; without a `start` from what the device would borrow. A `start` without this weight format gets
    its factors, and those that do not depend on the format stay."""
    deployment = deployment_of(loaded, settings, machine)
    form = deployment.weights
    factors = factors_of(deployment)
    if start is None:
        borrowed = calibration_for(machine)
        start = replace(borrowed, device=machine.name, borrowed_for=None, weights={form.name: borrowed.factors(form)})
    elif form.name not in start.weights:
        start = replace(start, weights={**start.weights, form.name: start.factors(form)})
        factors = [name for name in factors if name not in COMMON]
    observations = [
        item for workload in chosen for item in measure(loaded, workload, deployment, settings, clock=clock)
    ]
    return deployment, fit(replace(start, source=_source(loaded)), factors, observations), observations


def refit(start: Calibration, deployment: Deployment, observations: Sequence[Observation]) -> Calibration:
    """`start` with the factors that show in this deployment's steps fitted to the observations."""
    return fit(start, factors_of(deployment), observations)


def factors_of(deployment: Deployment) -> list[str]:
    """Those that steps of a deployment on one device depend on."""
    form = deployment.weights.name
    found = [f"{form}.read_few", f"{form}.read", f"{form}.compute", *COMMON]
    return found if deployment.shape.moe is None else [*found, "expert_layer_s"]


def measure(
    loaded: offline.Loaded,
    workload: Workload,
    deployment: Deployment,
    settings: offline.OfflineBenchSettings,
    *,
    salt: str = "calibrate",
    clock: Callable[[], float] = time.perf_counter,
) -> list[Observation]:
    """Warm up, run, and split the median run into measurements. A second measurement on the same engine needs another
    salt, or its prompts would be in the cache."""
    engine = loaded.engine
    if settings.warm_up:
        Run(engine, workloads.warm_up(workload, engine.info.vocab_size), None)()
    traces = [run(engine, workload, salt=f"{salt}{attempt}", clock=clock) for attempt in range(settings.repeat)]
    trace = sorted(traces, key=lambda trace: trace.seconds)[len(traces) // 2]
    steps = list(
        walk(
            workload,
            max_running=engine.info.max_running,
            token_budget=engine.scheduler.token_budget,
            num_blocks=engine.info.num_blocks,
        )
    )
    return [
        Observation(name, deployment, steps, seconds) for name, steps, seconds in _measurements(workload, steps, trace)
    ]


def _measurements(
    workload: Workload, steps: Sequence[StepWork], trace: Trace
) -> Iterator[tuple[str, list[StepWork], float]]:
    prompts = [step for step in steps if step.prefill]
    seconds = sum(step.seconds for step in trace.steps if not step.decode_only)
    yield f"{workload.name}, prompts", prompts, seconds
    decodes = [step for step in trace.steps if step.decode_only]
    size = max(1, -(-len(decodes) // _SEGMENTS))  # a workload of one token each has none
    for begin in range(0, len(decodes) if len(decodes) >= 2 * _SEGMENTS else 0, size):
        part = decodes[begin : begin + size]
        works = [StepWork(step.sampled, step.context, 0, 0, step.sampled) for step in part]
        streams = round(sum(step.sampled for step in part) / len(part))
        context = sum(step.context for step in part) // max(1, sum(step.sampled for step in part))
        yield f"{workload.name}, {streams} decoding at {context:,}", works, sum(step.seconds for step in part)


def show(fitted: Calibration, deployment: Deployment, observations: Sequence[Observation], console: Console) -> None:
    """The fit and how far it is off."""
    rows = report.table("Measured and predicted", "steps", "measured ms", "predicted ms", "error")
    for item in observations:
        rows.add_row(
            item.name,
            report.number(item.seconds * 1e3, 2),
            report.number(item.predicted(fitted) * 1e3, 2),
            f"{item.error(fitted):+.1%}",
        )
    console.print(rows)
    found = report.table(f"Factors ({deployment.label})", "factor", "fitted")
    factors = factors_of(deployment)
    for name in factors:
        found.add_row(name, _readable(name, factor(fitted, name)))
    console.print(found)
    errors = sorted(abs(item.error(fitted)) for item in observations)
    console.print(
        f"{len(factors)} factors from {len(observations)} measurements: median error {errors[len(errors) // 2]:.1%}, "
        f"largest {errors[-1]:.1%}. Fractions are of the catalogue's peaks for {deployment.device.name}."
    )


def _readable(name: str, value: float) -> str:
    return f"{value * 1e6:,.1f} us" if name.endswith("_s") else f"{value:.3f}"


def hardware_of(name: str | None, on: str) -> Device:
    """The catalogue's entry for the device that the engine runs on."""
    if name is not None:
        return device(name)
    if on.startswith("cpu"):
        return this_machine()
    title = torch.cuda.get_device_name(torch.device(on))
    words = set(re.findall(r"[a-z]+[0-9]*[a-z]*|[0-9]+", title.lower()))
    known = [entry for entry in devices() if set(entry.name.split("-")) <= words]
    if not known:
        raise ConfigError(f"the catalogue has no {title}; name the nearest with --hardware, or add it")
    return max(known, key=lambda entry: len(entry.name))


def deployment_of(loaded: offline.Loaded, settings: offline.OfflineBenchSettings, machine: Device) -> Deployment:
    """What was loaded, as a plan describes it."""
    engine, info = loaded.engine, loaded.engine.info
    shape = shape_of_config(loaded.checkpoint.config, loaded.label)
    forms: dict[str, WeightDType] = {"int8": "int8", "int4": "int4", "fp8": "fp8"}
    dense: WeightDType = "fp32" if info.dtype == "float32" else "bf16"
    weights = forms.get(settings.weights, dense)
    if settings.weights == "auto":
        weights = min(
            (form for form in forms.values() if loaded.bytes_per_weight < 0.75 * WEIGHT_FORMATS[dense].matrix_bytes),
            key=lambda form: abs(WEIGHT_FORMATS[form].matrix_bytes - loaded.bytes_per_weight),
            default=dense,
        )
    kind = next(kind for kind in engine.runner.kv.shape.kinds if isinstance(kind, PagedKV))
    kv: KVDType = _DTYPES[info.dtype] if kind.element_bytes >= 2 else "int8"
    if settings.kv_dtype == "fp8":
        kv = "fp8"
    return Deployment(
        shape=shape,
        device=machine,
        weight_dtype=weights,
        kv_dtype=kv,
        max_running=info.max_running,
        token_budget=engine.scheduler.token_budget,
    )


def _source(loaded: offline.Loaded) -> Source:
    info = loaded.engine.info
    where = report.machine_line()
    if not info.device.startswith("cpu"):
        where = f"{torch.cuda.get_device_name(torch.device(info.device))}; {where}"
    words = sys.argv[1:]
    command = shlex.join(["penstock", *(["bench"] if words[:1] == ["engine"] else []), *words])
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Source(machine=where, date=date, commit=_commit(), command=command, note=f"{loaded.label}, {loaded.numbers}")


def _commit() -> str:
    """Of the source tree that this runs from, or the version that is installed."""
    here = Path(__file__).parent
    found = subprocess.run(
        ["git", "-C", str(here), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
    )
    if found.returncode == 0:
        return found.stdout.strip()
    return str(report.machine()["versions"].get("penstock", "unknown"))
