"""Metrics of prompts handed over, for engines that do: how many, how much, how long, how often it came to nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from penstock.engine.request import HandoverLoad
from penstock.telemetry.exposition import MetricRegistry

if TYPE_CHECKING:
    from penstock.telemetry.engine_metrics import EngineView

_METRICS: tuple[tuple[str, str, str, Callable[[HandoverLoad], float]], ...] = (
    ("gauge", "handover_waiting", "Requests whose KV blocks are on their way.", lambda load: load.waiting),
    ("counter", "handovers_total", "Prompts that another engine computed for this one.", lambda load: load.handovers),
    ("counter", "handover_fallbacks_total", "Prompts computed here after all.", lambda load: load.fallbacks),
    ("counter", "handover_seconds_total", "From asking to the last block, in all.", lambda load: load.seconds),
    ("counter", "handover_blocks_received_total", "KV blocks from other engines.", lambda load: load.blocks_in),
    ("counter", "handover_bytes_received_total", "Their bytes.", lambda load: load.bytes_in),
    ("counter", "handover_blocks_sent_total", "KV blocks for other engines.", lambda load: load.blocks_out),
    ("counter", "handover_bytes_sent_total", "Their bytes.", lambda load: load.bytes_out),
)


def add_handover_samples(
    registry: MetricRegistry, labels: tuple[str, ...], engines: Callable[[], Iterable[EngineView]]
) -> None:
    def add(kind: str, name: str, help: str, value: Callable[[HandoverLoad], float]) -> None:
        registry.sampled(
            kind,
            f"penstock_{name}",
            help,
            labels,
            lambda: [
                ((view.model, view.engine), value(view.load.handover))
                for view in engines()
                if view.load.handover is not None
            ],
        )

    for metric in _METRICS:
        add(*metric)
