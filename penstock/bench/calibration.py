"""`penstock bench engine --calibrate FILE`: runs that show each factor of a calibration, the fit, and the file.

Steps that only decode are timed apart from those that compute prompts. What each step had to do is counted by walking
the same workload through the scheduler (`step_walk`), so the fit uses the very arithmetic that predicts later.
"""

from __future__ import annotations

import datetime
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
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
from penstock.planning.numbers import WEIGHT_FORMATS, KVDType, WeightDType, WeightFormat
from penstock.planning.step_time import StepWork

COMMON = ("kv_read", "attention", "step_s", "prompt_step_s", "layer_s", "sequence_s")
"""Factors that do not depend on the weight format."""
_SEGMENTS = 3
"""A run's decode steps are split into this many measurements: context grows between them."""
_DTYPES: dict[str, KVDType] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _sized(requests: int, inputs: int, outputs: int) -> Workload:
    return Workload(f"{requests} x {inputs}/{outputs}", requests, (inputs, inputs), (outputs, outputs))


def default_workloads(on_cpu: bool) -> list[Workload]:
    """One stream, several batches, prompts of several lengths, long contexts; on a CPU shorter, since it is slower."""
    if on_cpu:
        sizes = ((1, 128, 48), (1, 1500, 24), (4, 128, 24), (16, 128, 24), (16, 512, 8), (48, 128, 16))
        return [_sized(*size) for size in sizes]
    names = ("b1", "ttft128", "ttft2048", "b64", "b256", "prefill", "long30k", "long8x30k")
    return [_sized(4, 1024, 128), *(workloads.named(name) for name in names)]


def main(
    settings: offline.OfflineBenchSettings,
    names: Sequence[str],
    path: Path,
    hardware: str | None,
    json_file: Path | None,
    console: Console,
) -> None:
    """Measure, fit, print, write."""
    on_cpu = pick_device(settings.device).type == "cpu"
    chosen = [workloads.named(name) for name in names] or default_workloads(on_cpu)
    loaded = offline.load(settings, chosen, console)
    machine = _hardware(hardware, loaded.engine.info.device)
    deployment = _deployment(loaded, settings, machine)
    form = deployment.weights.name
    start = _start(path, machine, deployment.weights)
    console.print(
        f"[bold]{loaded.label}[/bold] on {machine.title or machine.name}, {form} weights: {report.machine_line()}"
    )
    observations: list[Observation] = []
    for workload in chosen:
        console.print(f"{workload.name}: {workload.summary}", style="dim")
        observations += measure(loaded, workload, deployment, settings)
    factors = [f"{form}.read_few", f"{form}.read", f"{form}.compute", *COMMON]
    if deployment.shape.moe is not None:
        factors.append("expert_layer_s")
    fitted = replace(fit(start, factors, observations), source=_source(loaded, settings))
    show(start, fitted, factors, observations, console)
    write_calibration(fitted, path)
    console.print(f"Wrote {path}")
    if json_file is not None:
        results = [
            {"name": item.name, "measured_s": item.seconds, "predicted_s": item.predicted(fitted)}
            for item in observations
        ]
        report.write_json(json_file, "calibration", {"model": loaded.label, "device": machine.name}, results)


def measure(
    loaded: offline.Loaded, workload: Workload, deployment: Deployment, settings: offline.OfflineBenchSettings
) -> list[Observation]:
    """Warm up, run, and split the median run into measurements."""
    engine = loaded.engine
    if settings.warm_up:
        Run(engine, workloads.warm_up(workload, engine.info.vocab_size), None)()
    traces = [run(engine, workload, salt=f"calibrate{attempt}") for attempt in range(settings.repeat)]
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
    size = -(-len(decodes) // _SEGMENTS)
    for begin in range(0, len(decodes) if len(decodes) >= 2 * _SEGMENTS else 0, size):
        part = decodes[begin : begin + size]
        works = [StepWork(step.sampled, step.context, 0, 0, step.sampled) for step in part]
        streams = round(sum(step.sampled for step in part) / len(part))
        context = sum(step.context for step in part) // max(1, sum(step.sampled for step in part))
        yield f"{workload.name}, {streams} decoding at {context:,}", works, sum(step.seconds for step in part)


def show(
    start: Calibration,
    fitted: Calibration,
    factors: Sequence[str],
    observations: Sequence[Observation],
    console: Console,
) -> None:
    """The fit and how far it is off."""
    rows = report.table("Measured and predicted", "steps", "measured ms", "predicted ms", "error")
    for item in observations:
        predicted = item.predicted(fitted)
        rows.add_row(
            item.name,
            report.number(item.seconds * 1e3, 2),
            report.number(predicted * 1e3, 2),
            f"{predicted / item.seconds - 1:+.1%}",
        )
    console.print(rows)
    found = report.table("Factors", "factor", "before", "fitted")
    for name in factors:
        found.add_row(name, *(_readable(name, factor(calibration, name)) for calibration in (start, fitted)))
    console.print(found)
    errors = sorted(abs(item.error(fitted)) for item in observations)
    console.print(
        f"{len(factors)} factors from {len(observations)} measurements: median error {errors[len(errors) // 2]:.1%}, "
        f"largest {errors[-1]:.1%}. Fractions are of the catalogue's peaks."
    )


def _readable(name: str, value: float) -> str:
    return f"{value * 1e6:,.1f} us" if name.endswith("_s") else f"{value:.3f}"


def _hardware(name: str | None, on: str) -> Device:
    """The catalogue's entry for the device that the engine runs on."""
    if name is not None:
        return device(name)
    if on.startswith("cpu"):
        return this_machine()
    title = torch.cuda.get_device_name(torch.device(on))
    words = set(re.findall(r"[a-z]+[0-9]+[a-z]*|[0-9]+", title.lower()))
    known = [entry for entry in devices() if set(entry.name.split("-")) <= words]
    if not known:
        raise ConfigError(f"the catalogue has no {title}; name the nearest with --hardware, or add it")
    return max(known, key=lambda entry: len(entry.name))


def _deployment(loaded: offline.Loaded, settings: offline.OfflineBenchSettings, machine: Device) -> Deployment:
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


def _start(path: Path, machine: Device, form: WeightFormat) -> Calibration:
    """The file that is there already, whose other factors are kept, or what the device would borrow."""
    if not path.exists():
        borrowed = calibration_for(machine)
        return replace(borrowed, device=machine.name, borrowed_for=None, weights={form.name: borrowed.factors(form)})
    start = read_calibration(path)
    if start.device != machine.name:
        raise ConfigError(f"{path} is a calibration of {start.device}, not {machine.name}; write to another file")
    return replace(start, weights={**start.weights, form.name: start.factors(form)})


def _source(loaded: offline.Loaded, settings: offline.OfflineBenchSettings) -> Source:
    info = loaded.engine.info
    where = report.machine_line()
    if not info.device.startswith("cpu"):
        where = f"{torch.cuda.get_device_name(torch.device(info.device))}; {where}"
    command = "penstock " + shlex.join(sys.argv[1:])
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
