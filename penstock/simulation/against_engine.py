"""A real engine and its simulation on the same trace, on this machine: how far apart are they?

The engine is calibrated in the same process immediately before and after (`bench.calibration`); between the two it runs
an open loop of mixed lengths. The simulator gets the calibration, the engine's limits and the same arrivals. A machine
that other programs share is not the machine that was calibrated a minute ago, so the drift between the two calibrations
is printed, and everything can be measured in processor time instead (`processor_time`, one thread).
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass

from rich.console import Console

from penstock.bench import offline
from penstock.bench import report as bench_report
from penstock.bench.arrivals import Planned
from penstock.bench.calibration import calibrate, default_workloads, hardware_of, measure, refit
from penstock.bench.engine import Run
from penstock.bench.workloads import Workload, warm_up
from penstock.engine.backends.select import pick_device
from penstock.errors import ConfigError
from penstock.planning.step_time import StepTime, StepWork
from penstock.simulation.one_engine import simulated
from penstock.simulation.real_run import real_run

TOLERANCE = 0.15
CPU_WORKLOADS = [
    *(
        Workload(f"{requests} x {inputs}/{outputs}", requests, (inputs, inputs), (outputs, outputs))
        for requests, inputs, outputs in ((1, 64, 32), (1, 192, 8), (4, 96, 24), (8, 128, 16), (16, 32, 16))
    ),
    Workload("6 in flight", 18, (32, 160), (12, 40), concurrency=6),
]
"""Steps such as those of the trace, which is shorter than the calibration of `penstock bench engine --calibrate`."""


@dataclass(frozen=True, slots=True)
class TraceShape:
    """An open loop of mixed lengths; both are uniform in their range."""

    seconds: float = 60.0
    load: float = 0.5
    """Part of what the engine can do, as the calibration predicts it."""
    inputs: tuple[int, int] = (16, 192)
    outputs: tuple[int, int] = (8, 64)
    seed: int = 1


def trace(shape: TraceShape, rate: float) -> list[Planned]:
    """Poisson arrivals."""
    rng = random.Random(shape.seed)
    plan, at = [], rng.expovariate(rate)
    while at < shape.seconds:
        plan.append(Planned(at, rng.randint(*shape.inputs), rng.randint(*shape.outputs)))
        at += rng.expovariate(rate)
    return plan


def suitable_rate(shape: TraceShape, step_time: StepTime, streams: int = 8) -> float:
    """Requests per second that keep the engine busy for `shape.load` of the time, with a few streams at once."""
    prompt, answer = sum(shape.inputs) / 2, sum(shape.outputs) / 2
    context = round(prompt + answer / 2)
    decode = step_time.seconds(StepWork(streams, streams * context, 0, 0, streams)) / streams
    joint = StepWork(streams, streams * context, round(prompt), round(prompt * prompt / 2), streams + 1)
    prefill = step_time.seconds(joint) - streams * decode
    return shape.load / (prefill + answer * decode)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Both sides of a comparison."""

    requests: int
    rate: float
    real: dict[str, float]
    simulated: dict[str, float]
    drift: float
    """How much longer the calibration's workloads took after the run than before it, as a factor."""

    @property
    def ratios(self) -> dict[str, float]:
        """Simulated over real."""
        return {name: self.simulated[name] / value for name, value in self.real.items()}

    @property
    def agrees(self) -> bool:
        return all(abs(ratio - 1) <= TOLERANCE for ratio in self.ratios.values())

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"ratios": self.ratios}


def run(model: str, shape: TraceShape, processor_time: bool, console: Console) -> Agreement:
    """Loads the engine, calibrates, runs the trace, calibrates again, simulates."""
    on_cpu = pick_device("auto").type == "cpu"
    if processor_time and not on_cpu:
        raise ConfigError("processor time says nothing about a GPU; use --against engine")
    settings = offline.OfflineBenchSettings(model=model, threads=1 if processor_time else None, warm_up=False)
    clock = time.process_time if processor_time else time.perf_counter
    chosen = CPU_WORKLOADS if on_cpu else default_workloads(on_cpu=False)
    loaded = offline.load(settings, chosen, console)
    info = loaded.engine.info
    console.print(f"[bold]{loaded.label}[/bold] on {info.device}, {loaded.numbers}: {bench_report.machine_line()}")
    machine = hardware_of(None, info.device)
    with console.status("calibrating"):
        # Once, with as many streams as any: every smaller batch runs on the way.
        widest = max(chosen, key=lambda load: load.concurrency or load.requests)
        Run(loaded.engine, warm_up(widest, info.vocab_size), None)()
        deployment, first, before = calibrate(loaded, chosen, settings, machine, clock=clock)
    rate = suitable_rate(shape, StepTime(deployment, first))
    plan = trace(shape, rate)
    with bench_report.progress_bar(console) as bar:
        task = bar.add_task(f"{len(plan)} requests in {shape.seconds:g} s on the real engine", total=len(plan))
        observed = real_run(
            loaded.engine,
            plan,
            seed=shape.seed,
            processor_time=processor_time,
            progress=lambda done: bar.update(task, completed=done),
        )
    with console.status("calibrating again"):
        after = [
            item for load in chosen for item in measure(loaded, load, deployment, settings, salt="after", clock=clock)
        ]
    calibration = refit(first, deployment, [*before, *after])
    model_run = simulated(
        plan,
        deployment,
        calibration,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        overlap=not info.device.startswith("cpu"),
    )
    drift = sum(item.seconds for item in after) / sum(item.seconds for item in before)
    return Agreement(len(plan), rate, observed.figures(), model_run.figures(), drift)


def show(console: Console, made: Agreement) -> None:
    title = f"{made.requests} requests at {made.rate:.2f}/s, real and simulated"
    table = bench_report.table(title, "", "real", "simulated", "simulated / real")
    for name, value in made.real.items():
        table.add_row(name, f"{value:,.1f}", f"{made.simulated[name]:,.1f}", f"{made.ratios[name]:.2f}")
    console.print(table)
    console.print(
        f"The same calibration steps took {made.drift:.2f} times as long after the run as before it: more than 1.1 or "
        "less than 0.9 means that something else used this machine, and the comparison is worth little.",
        style="dim",
    )
    if not made.agrees:
        far = [name for name, ratio in made.ratios.items() if abs(ratio - 1) > TOLERANCE]
        console.print(f"not within {TOLERANCE:.0%}: {', '.join(far)}", style="red")
