"""`penstock bench engine`: load once, run each workload a few times, print medians next to the machine's bounds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress, TaskID

from penstock.bench import bounds, profiler, report, shapes, stats, workloads
from penstock.bench.adapters import compare_adapters
from penstock.bench.engine import Metrics, Run, run, summarize
from penstock.bench.workloads import Workload
from penstock.engine.backends.host_memory import HostMemory, is_host
from penstock.engine.backends.select import pick_device, pick_dtype
from penstock.engine.config import DType, EngineConfig, KVDType, WeightForm
from penstock.engine.core import Engine
from penstock.engine.kv.kinds import BothKinds, PagedKV, PagedLatent
from penstock.engine.loading.random_checkpoint import RandomCheckpoint, stored_elements
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.loading.checkpoint import Checkpoint

COLUMNS = (
    "workload",
    "output tok/s",
    "total tok/s",
    "ms/step",
    "TTFT p50 ms",
    "p99 ms",
    "GB/s",
    "of read bound",
    "TFLOP/s",
    "of bound",
)
_BITS = {"int4": 4, "int8": 8, "fp8": 8}


@dataclass(frozen=True, slots=True)
class OfflineBenchSettings:
    """What to load and how often to run."""

    model: str = "smollm2-135m"
    shape: str | None = None
    """Random weights of a named shape instead of `model`."""
    device: str = "auto"
    dtype: DType = "auto"
    weights: WeightForm = "auto"
    kv_dtype: KVDType = "auto"
    fp8_attention: bool = False
    threads: int | None = None
    max_running: int | None = None
    token_budget: int | None = None
    max_model_len: int | None = None
    num_blocks: int | None = None
    host_memory: int = 0
    repeat: int = 1
    warm_up: bool = True
    adapters: int = 0
    """Compare with and without this many random LoRA adapters."""
    adapter_rank: int = 16
    tensor_parallel: int = 1
    devices: tuple[str, ...] = ()
    """Of each rank; see `EngineConfig`."""
    profile: bool = False
    """Also record decode steps of each workload and show where they go."""


@dataclass(frozen=True, slots=True)
class Loaded:
    engine: Engine
    checkpoint: Checkpoint
    label: str
    seconds: float

    @property
    def bytes_per_weight(self) -> float:
        """As the engine keeps them; 4 for float32, about 0.6 for blocks of 4 bits with their scales."""
        return (
            self.engine.runner.decoder.weight_bytes
            * self.engine.info.ranks
            / sum(shapes.parameters(self.checkpoint.config))
        )

    @property
    def bytes_by_kind(self) -> tuple[float, float]:
        """The same of the weights that every token passes, and of those of experts: they may be in fewer bits."""
        config, decoder, ranks = self.checkpoint.config, self.engine.runner.decoder, self.engine.info.ranks
        all_params, further = sum(shapes.parameters(config)), shapes.expert_parameters(config)
        if not further:
            return self.bytes_per_weight, 0.0
        parts = [layer.feed_forward for layer in decoder.layers]
        held = sum(part.weight_bytes - sum(linear.weight_bytes for linear in part.linears) for part in parts)
        return (decoder.weight_bytes - held) * ranks / (all_params - further), held * ranks / further

    @property
    def numbers(self) -> str:
        """Which numbers the engine computes with, in words."""
        return f"{self.engine.info.dtype}, {8 * self.bytes_per_weight:.1f} bits per weight"


def load(settings: OfflineBenchSettings, chosen: Sequence[Workload], console: Console) -> Loaded:
    """Resolves, opens and loads, with a progress line for each phase."""
    with report.progress_bar(console) as bar:
        task = bar.add_task("starting", total=100)

        def engine_progress(phase: str, fraction: float) -> None:
            bar.update(task, description=phase, completed=round(100 * fraction), total=100)

        def fetch_progress(what: str, done: int, total: int | None) -> None:
            bar.update(task, description=what, completed=done, total=total)

        begin = time.perf_counter()
        if settings.shape is not None:
            label = f"{settings.shape} (random weights)"
            device = pick_device(settings.device)
            dtype = pick_dtype(settings.dtype, device)
            shape = shapes.named(settings.shape)
            if is_host(device):
                check_room(settings.shape, shape, dtype, settings.weights)
            checkpoint: Checkpoint = RandomCheckpoint(shape, device=device, dtype=dtype)
            model = settings.shape
        else:
            label = settings.model
            model, checkpoint = _open(settings.model, fetch_progress)
        wanted = [workload.max_running for workload in chosen if workload.max_running is not None]
        config = EngineConfig(
            model=model,
            name=settings.shape or settings.model,
            device=settings.device,
            dtype=settings.dtype,
            weights=settings.weights,
            kv_dtype=settings.kv_dtype,
            fp8_attention=settings.fp8_attention,
            threads=settings.threads,
            max_running=settings.max_running or max(wanted, default=None),
            token_budget=settings.token_budget,
            max_model_len=settings.max_model_len,
            adapter_slots=settings.adapters or None,
            adapter_host_slots=max(100, settings.adapters),
            adapter_rank=settings.adapter_rank,
            num_blocks=settings.num_blocks,
            host_memory=settings.host_memory,
            tensor_parallel=settings.tensor_parallel,
            devices=settings.devices,
        )
        engine = Engine.load(config, engine_progress, checkpoint=checkpoint)
        seconds = time.perf_counter() - begin
        bar.update(task, description="idle")
        while engine.improve():  # as an engine does that has nothing to do yet
            pass
    return Loaded(engine, checkpoint, label, seconds)


def check_room(name: str, shape: dict[str, Any], dtype: torch.dtype, weights: str) -> None:
    """Refuses a shape whose weights cannot lie in host memory: the system would end some process or other for it."""
    bits = 4 if "quantization_config" in shape else _BITS.get(weights, 8 * dtype.itemsize)
    least = stored_elements(shape) * bits // 8
    free = HostMemory().available()
    if least > free:
        raise ConfigError(
            f"the weights of {name} take at least {least / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of memory are "
            f"free; choose fewer layers (--shape {name.partition(':')[0]}:2), fewer bits (--weights int4) or another "
            "device"
        )


def _open(source: str, progress: Callable[[str, int, int | None], None]) -> tuple[str, Checkpoint]:
    # Imported here: random weights need no checkpoint reader, and a sealed GPU machine may lack safetensors.
    from penstock.engine.loading.checkpoint import open_checkpoint
    from penstock.sources.resolve import resolve

    path = resolve(source, progress)
    return str(path), open_checkpoint(path)


def measure(
    loaded: Loaded, workload: Workload, settings: OfflineBenchSettings, limits: bounds.Bounds, console: Console
) -> list[Metrics]:
    """Warm up once, then `repeat` runs, each with a cache salt of its own."""
    info = loaded.engine.info
    kinds = [kind.first if isinstance(kind, BothKinds) else kind for kind in loaded.engine.runner.kv.shape.kinds]
    kv_bytes = next(kind.element_bytes for kind in kinds if isinstance(kind, PagedKV | PagedLatent))
    weight_bytes, expert_bytes = loaded.bytes_by_kind
    cost = shapes.cost(
        loaded.checkpoint.config, weight_bytes=weight_bytes, kv_bytes=kv_bytes, expert_bytes=expert_bytes
    )
    total = sum(outputs for _, outputs in workload.lengths())
    results = []
    with report.progress_bar(console) as bar:
        if settings.warm_up:
            task = bar.add_task(f"{workload.name}: warm-up", total=None)
            Run(loaded.engine, workloads.warm_up(workload, info.vocab_size), None)()
            bar.remove_task(task)
        for attempt in range(settings.repeat):
            task = bar.add_task(f"{workload.name}: run {attempt + 1} of {settings.repeat}", total=total)
            tell = partial(_tell, bar, task)
            trace = run(loaded.engine, workload, salt=f"run{attempt}", progress=tell)
            bar.remove_task(task)
            results.append(summarize(trace, cost, limits.read_gbps, limits.matmul_tflops))
    return results


def _tell(bar: Progress, task: TaskID, done: int) -> None:
    bar.update(task, completed=done)


def medians(runs: Sequence[Metrics]) -> dict[str, float | None]:
    return {
        field.name: stats.median(getattr(metrics, field.name) for metrics in runs)
        for field in dataclasses.fields(Metrics)
    }


def main(settings: OfflineBenchSettings, names: Sequence[str], json_file: Path | None, console: Console) -> None:
    chosen = [workloads.named(name) for name in names]
    loaded = load(settings, chosen, console)
    info = loaded.engine.info
    with console.status("measuring the machine's bounds"):
        limits = bounds.probe(torch.device(info.device), getattr(torch, info.dtype))
    console.print(f"[bold]{loaded.label}[/bold] on {info.device}, {loaded.numbers}: {report.machine_line()}")
    phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in info.startup.items())
    console.print(f"Started in {loaded.seconds:.2f} s" + (f" ({phases})" if phases else ""))
    console.print(
        f"KV cache {info.num_blocks:,} blocks of {info.block_size} tokens; at most {info.max_running} running. "
        f"Bounds measured now: read {limits.read_gbps:,.1f} GB/s, "
        f"matrix product {limits.matmul_tflops:,.3f} TFLOP/s ({limits.matmul_dtype})"
    )
    if settings.adapters:
        compare_adapters(loaded.engine, chosen, settings, json_file, console)
        return
    runs = f"median of {settings.repeat} runs" if settings.repeat > 1 else "one run"
    rows = report.table(f"Offline engine, {runs}", *COLUMNS)
    results = []
    for workload in chosen:
        console.print(f"{workload.name}: {workload.summary}", style="dim")
        measured = measure(loaded, workload, settings, limits, console)
        middle = medians(measured)
        rows.add_row(
            workload.name,
            report.number(middle["output_tps"]),
            report.number(middle["total_tps"]),
            report.number(middle["step_ms"], 2),
            report.number(middle["ttft_ms"]),
            report.number(middle["ttft_p99_ms"]),
            report.number(middle["gbps"]),
            report.share(middle["memory_share"]),
            report.number(middle["tflops"], 3),
            report.share(middle["bound_share"]),
        )
        runs_json = [dataclasses.asdict(metrics) for metrics in measured]
        results.append({"workload": workload.name, "median": middle, "runs": runs_json})
    console.print(rows)
    console.print(
        "ms/step, GB/s and its share are of steps that only decode; 'of bound' is the least time the whole run "
        "could take on this machine over the time it took.",
        style="dim",
    )
    if settings.profile:
        for workload in chosen:
            for profile in profiler.record(loaded.engine, workload):
                profiler.show(profile, workload, console)
    if json_file is not None:
        facts = dataclasses.asdict(settings) | {"engine": dataclasses.asdict(info)}
        report.write_json(json_file, "engine", facts | {"bounds": dataclasses.asdict(limits)}, results)
