"""What LoRA adapters cost: the same requests with and without them, alternating on one engine, and the ratio.

With adapters every request uses one, each in turn, so a batch holds as many different ones as it can: the most
expensive mixture. Without, the same engine runs its plain path, which is that of an engine without adapter slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from penstock.bench import report, stats, workloads
from penstock.bench.engine import Run, Trace, run
from penstock.bench.workloads import Workload
from penstock.engine.adapters.peft import random_adapter
from penstock.engine.core import Engine

if TYPE_CHECKING:
    from penstock.bench.offline import OfflineBenchSettings


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """Figures of one side, medians over the runs."""

    step_ms: float
    """Median step that only decodes; of all steps where there is none."""
    ttft_ms: float
    latency_ms: float
    """Mean time of a request from submission to its last token."""
    output_tps: float


def compare_adapters(
    engine: Engine, chosen: Sequence[Workload], settings: OfflineBenchSettings, json_file: Path | None, console: Console
) -> None:
    """Run each workload both ways and print a table."""
    names = insert_random(engine, "random", settings.adapters, settings.adapter_rank)
    title = f"{settings.adapters} adapters of rank {settings.adapter_rank} on every linear, every request uses one"
    rows = report.table(title, "workload", "side", "ms/step", "TTFT p50 ms", "request ms", "output tok/s")
    results = []
    for workload in chosen:
        console.print(f"{workload.name}: {workload.summary}", style="dim")
        plain, adapted = compare(engine, workload, settings, names)
        for side, figures in (("without", plain), ("with", adapted)):
            rows.add_row(workload.name, side, *(report.number(v, 2) for v in dataclasses.astuple(figures)))
        ratios = [b / a for a, b in zip(dataclasses.astuple(plain), dataclasses.astuple(adapted), strict=True)]
        rows.add_row(workload.name, "ratio", *(f"{ratio:.3f}" for ratio in ratios))
        sides = {"without": dataclasses.asdict(plain), "with": dataclasses.asdict(adapted)}
        results.append({"workload": workload.name, **sides, "latency_ratio": ratios[2]})
    console.print(rows)
    if json_file is not None:
        report.write_json(json_file, "adapters", dataclasses.asdict(settings), results)


def insert_random(
    engine: Engine, label: str, count: int, rank: int, modules: tuple[str, ...] | None = None
) -> list[str]:
    """Put `count` adapters of noise into the engine's host memory, on `modules` or on all linears; their names."""
    adapters = engine.runner.adapters
    assert adapters is not None, "the engine was loaded with slots"
    dtype, pin = adapters.dtype, not engine.runner.backend.in_host_memory
    noise = random_adapter(label, adapters.layout, rank=rank, dtype=dtype, pin=False, seed=count, modules=modules)
    names = [f"{label} {index}" for index in range(count)]
    for name in names:
        # The same numbers in memory of their own: that is what a step reads.
        data = noise.data.pin_memory() if pin else noise.data.clone()
        ranks = noise.ranks.pin_memory() if pin else noise.ranks
        adapters.pool.registry.insert(dataclasses.replace(noise, name=name, data=data, ranks=ranks))
    return names


def compare(engine: Engine, workload: Workload, settings: OfflineBenchSettings, names: list[str]) -> tuple[Side, Side]:
    """Without and with the adapters of these names, alternating."""
    sides: dict[str, list[Side]] = {"without": [], "with": []}
    if settings.warm_up:
        warm = workloads.warm_up(workload, engine.info.vocab_size)
        Run(engine, warm, None)()
        adapted = [
            dataclasses.replace(request, request_id=f"adapted {request.request_id}", adapter=names[i % len(names)])
            for i, request in enumerate(warm)
        ]
        Run(engine, adapted, None)()
    for attempt in range(settings.repeat):
        for side, used in (("without", []), ("with", names)):
            trace = run(engine, workload, salt=f"{side}-{names[0]}-{len(names)}-{attempt}", adapters=used)
            sides[side].append(_figures(trace))
    return _median(sides["without"]), _median(sides["with"])


def _figures(trace: Trace) -> Side:
    decode = [step.seconds for step in trace.steps if step.decode_only] or [step.seconds for step in trace.steps]
    return Side(
        step_ms=1e3 * (stats.median(decode) or 0.0),
        ttft_ms=1e3 * (stats.median(trace.ttft) or 0.0),
        latency_ms=1e3 * sum(trace.latency) / len(trace.latency),
        output_tps=trace.output_tokens / trace.seconds,
    )


def _median(sides: list[Side]) -> Side:
    columns = zip(*(dataclasses.astuple(side) for side in sides), strict=True)
    return Side(*(stats.median(column) or 0.0 for column in columns))
