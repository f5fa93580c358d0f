"""Metrics of LoRA adapters, for engines that have any: running and waiting adapters, slots, loading."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from penstock.engine.adapters.spec import AdapterLoad
from penstock.telemetry.exposition import MetricRegistry

if TYPE_CHECKING:
    from penstock.telemetry.engine_metrics import EngineView

_Samples = tuple[str, str, str, Callable[[AdapterLoad], float]]
_METRICS: tuple[_Samples, ...] = (
    ("gauge", "slots", "Adapter slots in device memory.", lambda load: load.slots),
    ("gauge", "on_device", "Adapters in device memory.", lambda load: load.on_device),
    ("gauge", "on_host", "Adapters in host memory.", lambda load: load.on_host),
    ("gauge", "loading", "Adapters being loaded.", lambda load: load.loading),
    ("counter", "loads_total", "Adapters loaded.", lambda load: load.loads),
    ("counter", "load_failures_total", "Adapters that failed to load.", lambda load: load.failures),
    ("counter", "load_seconds_total", "Time spent loading adapters.", lambda load: load.load_seconds),
    ("counter", "copies_total", "Adapters copied to the device.", lambda load: load.copies),
    ("counter", "evictions_total", "Adapters evicted from their device slot.", lambda load: load.evictions),
    ("counter", "host_evictions_total", "Adapters evicted from host memory.", lambda load: load.host_evictions),
)


def add_adapter_samples(
    registry: MetricRegistry, labels: tuple[str, ...], engines: Callable[[], Iterable[EngineView]]
) -> None:
    def loads() -> Iterator[tuple[EngineView, AdapterLoad]]:
        return ((view, view.load.adapters) for view in engines() if view.load.adapters is not None)

    def add(kind: str, name: str, help: str, value: Callable[[AdapterLoad], float]) -> None:
        registry.sampled(
            kind,
            f"penstock_adapter_{name}",
            help,
            labels,
            lambda: [((view.model, view.engine), value(load)) for view, load in loads()],
        )

    for metric in _METRICS:
        add(*metric)
    registry.sampled(
        "gauge",
        "vllm:lora_requests_info",
        "Adapters of running and waiting requests; the value is the time of the snapshot.",
        (*labels, "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        lambda: [
            ((view.model, view.engine, str(load.slots), _names(load.running), _names(load.waiting)), time.time())
            for view, load in loads()
        ],
    )


def _names(names: list[str]) -> str:
    return ",".join(sorted(set(names)))
