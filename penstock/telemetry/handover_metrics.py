"""Metrics of prefill/decode disaggregation, for engines with a role: handovers, bytes, durations, fallbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from penstock.engine.request import HandoverLoad
from penstock.telemetry.exposition import MetricRegistry

if TYPE_CHECKING:
    from penstock.telemetry.engine_metrics import EngineView

_METRICS: tuple[tuple[str, str, str, Callable[[HandoverLoad], float]], ...] = (
    ("gauge", "handover_waiting", "Requests waiting for KV blocks from a prefill engine.", lambda load: load.waiting),
    (
        "counter",
        "handovers_total",
        "Prompts computed by a prefill engine for this engine.",
        lambda load: load.handovers,
    ),
    (
        "counter",
        "handover_fallbacks_total",
        "Failed handovers; the prompt was computed here.",
        lambda load: load.fallbacks,
    ),
    ("counter", "handover_seconds_total", "Time from request to last block, summed.", lambda load: load.seconds),
    ("counter", "handover_blocks_received_total", "KV blocks received.", lambda load: load.blocks_in),
    ("counter", "handover_bytes_received_total", "Bytes of KV blocks received.", lambda load: load.bytes_in),
    ("counter", "handover_blocks_sent_total", "KV blocks sent.", lambda load: load.blocks_out),
    ("counter", "handover_bytes_sent_total", "Bytes of KV blocks sent.", lambda load: load.bytes_out),
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
