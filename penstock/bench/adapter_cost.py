"""`penstock bench adapters`: what a decode step costs with LoRA adapters, compared with the same step without.

One engine, every mixture alternating with the plain path: adapters on every linear and on those that PEFT chooses by
default (query and value), batches of several sizes, one adapter for all and as many as fit. The bound says what
reading the adapters alone must cost: their bytes at the read speed measured in the same run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from penstock.bench import bounds, report
from penstock.bench.adapters import compare, insert_random
from penstock.bench.offline import OfflineBenchSettings, load
from penstock.bench.workloads import Workload
from penstock.engine.adapters.runtime import AdapterRuntime
from penstock.engine.core import Engine

TARGETS = {"every linear": None, "q_proj, v_proj": ("self_attn.q_proj", "self_attn.v_proj")}
"""Which modules adapters touch; None: all that can be."""
COLUMNS = ("targets", "adapters", "batch", "without", "with ms", "ratio", "bytes", "request")


@dataclass(frozen=True, slots=True)
class Cost:
    """One row: medians."""

    targets: str
    adapters: int
    batch: int
    without_ms: float
    with_ms: float
    ratio: float
    bound: float
    """The ratio if nothing but the adapters' bytes cost anything."""
    request_ratio: float


def main(
    settings: OfflineBenchSettings,
    batches: Sequence[int],
    counts: Sequence[int],
    output_len: int,
    json_file: Path | None,
    console: Console,
) -> None:
    chosen = [Workload(f"b{size}", size, (128, 128), (output_len, output_len)) for size in batches]
    settings = dataclasses.replace(settings, adapters=max(counts), max_running=settings.max_running or max(batches))
    loaded = load(settings, chosen, console)
    engine, info = loaded.engine, loaded.engine.info
    with console.status("measuring the machine's bounds"):
        read = bounds.probe(torch.device(info.device), getattr(torch, info.dtype)).read_gbps
    console.print(f"[bold]{loaded.label}[/bold] on {info.device}, {loaded.numbers}: {report.machine_line()}")
    console.print(f"Read bound measured now: {read:,.0f} GB/s")
    rows = report.table(f"Adapters of rank {settings.adapter_rank}, every request uses one", *COLUMNS)
    results = []
    for name, modules in TARGETS.items():
        names = insert_random(engine, name, max(counts), settings.adapter_rank, modules)
        for workload, size in zip(chosen, batches, strict=True):
            for count in counts:
                if count > 1 and size == 1:
                    continue  # one request, one adapter
                cost = _cost(engine, workload, settings, name, names[:count], min(count, size), read)
                results.append(dataclasses.asdict(cost))
                rows.add_row(
                    name, str(count), str(size), f"{cost.without_ms:.3f}", f"{cost.with_ms:.3f}", f"{cost.ratio:.3f}",
                    f"{cost.bound:.3f}", f"{cost.request_ratio:.3f}",
                )  # fmt: skip
    console.print(rows)
    if json_file is not None:
        report.write_json(json_file, "adapters", dataclasses.asdict(settings), results)


def _cost(
    engine: Engine,
    workload: Workload,
    settings: OfflineBenchSettings,
    targets: str,
    names: list[str],
    used: int,
    read_gbps: float,
) -> Cost:
    plain, adapted = compare(engine, workload, settings, names)
    adapters = engine.runner.adapters
    assert adapters is not None
    read_ms = used * _bytes(adapters, settings.adapter_rank, TARGETS[targets]) / read_gbps / 1e6
    return Cost(
        targets=targets,
        adapters=len(names),
        batch=workload.requests,
        without_ms=plain.step_ms,
        with_ms=adapted.step_ms,
        ratio=adapted.step_ms / plain.step_ms,
        bound=1 + read_ms / plain.step_ms,
        request_ratio=adapted.latency_ms / plain.latency_ms,
    )


def _bytes(adapters: AdapterRuntime, rank: int, modules: tuple[str, ...] | None) -> int:
    """Of the matrices of one adapter that a step has to read."""
    elements = 0
    for site in adapters.layout.sites:
        for module, size in zip(site.modules, site.sizes, strict=True):
            if not site.end if modules is None else module in modules:
                elements += site.inputs + size
    return rank * elements * adapters.layout.cached_layers * adapters.dtype.itemsize
