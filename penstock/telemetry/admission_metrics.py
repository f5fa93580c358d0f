"""Metrics of the admission queues."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.telemetry.exposition import Buckets, Merge, MetricRegistry

LABELS = ("model_name", "class")
WAITS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)

Depths = Callable[[], Iterable[tuple[tuple[str, str], float]]]
"""Waiting requests, by model and class."""
Rates = Callable[[], Iterable[tuple[tuple[str], float]]]


class AdmissionMetrics:
    """Waits, sheds and downgrades of admission."""

    def __init__(self, registry: MetricRegistry, depths: Depths, rates: Rates, limits: Rates, merge: Merge) -> None:
        """`merge`: how the values of several gateway processes combine: sum if each has its own queue, max if they
        share one."""
        self._waits = registry.histogram(
            "penstock_queue_wait_seconds", "Queue wait of admitted requests.", WAITS, LABELS
        )
        self._sheds = registry.counter("penstock_sheds_total", "Requests refused by admission.", (*LABELS, "reason"))
        self._downgrades = registry.counter(
            "penstock_downgrades_total",
            "Requests sent to a smaller model because the queue was long.",
            ("model_name",),
        )
        registry.sampled("gauge", "penstock_queue_depth", "Requests waiting.", LABELS, depths, merge=merge)
        registry.sampled(
            "gauge", "penstock_queue_limit", "Requests that may wait.", ("model_name",), limits, merge=merge
        )
        registry.sampled(
            "gauge",
            "penstock_queue_drain_rate",
            "Drain rate of the queue, in prompt tokens per second.",
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
