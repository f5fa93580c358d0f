"""Figures of the admission queues."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.telemetry.exposition import Buckets, Merge, MetricRegistry

LABELS = ("model_name", "class")
WAITS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)

Depths = Callable[[], Iterable[tuple[tuple[str, str], float]]]
"""Requests that wait, by model and class."""
Rates = Callable[[], Iterable[tuple[tuple[str], float]]]


class AdmissionMetrics:
    """What became of requests in front of models."""

    def __init__(self, registry: MetricRegistry, depths: Depths, rates: Rates, merge: Merge) -> None:
        """`merge`: how several gateway processes add up: each has its own queue (sum), or all share one (max)."""
        self._waits = registry.histogram(
            "penstock_queue_wait_seconds", "Wait of requests that were admitted.", WAITS, LABELS
        )
        self._sheds = registry.counter("penstock_sheds_total", "Requests turned away.", (*LABELS, "reason"))
        self._downgrades = registry.counter(
            "penstock_downgrades_total",
            "Requests answered by a smaller model as too many waited.",
            ("model_name",),
        )
        registry.sampled("gauge", "penstock_queue_depth", "Requests that wait.", LABELS, depths, merge=merge)
        registry.sampled(
            "gauge",
            "penstock_queue_drain_rate",
            "Work that leaves the queue per second, in prompt tokens.",
            ("model_name",),
            rates,
            merge=merge,
        )

    def waits(self, model: str, name: str) -> Buckets:
        return self._waits.child(model, name)

    def shed(self, model: str, name: str, reason: str) -> None:
        self._sheds.child(model, name, reason).inc()

    def downgraded(self, model: str) -> None:
        self._downgrades.child(model).inc()
