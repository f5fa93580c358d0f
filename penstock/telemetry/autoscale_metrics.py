"""Metrics of automatic scaling, as the supervisor reports it; every gateway of a server has the same values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.protocol.control import ModelScaling
from penstock.telemetry.exposition import MetricRegistry

_GAUGES: tuple[tuple[str, str, Callable[[ModelScaling], float]], ...] = (
    ("desired", "Replicas that automatic scaling asks for.", lambda it: it.desired),
    ("ready", "Replicas of an automatically scaled model that are ready.", lambda it: it.ready),
    ("starting", "Replicas of an automatically scaled model that are starting.", lambda it: it.starting),
    ("min", "Minimum of replicas under automatic scaling, without schedules.", lambda it: it.min),
    ("max", "Maximum of replicas under automatic scaling.", lambda it: it.max),
)


def add_autoscale_metrics(registry: MetricRegistry, read: Callable[[], Mapping[str, ModelScaling]]) -> None:
    """Registers the metrics; `read` returns the models that are scaled automatically."""

    def add(name: str, help: str, value: Callable[[ModelScaling], float]) -> None:
        registry.sampled(
            "gauge",
            f"penstock_autoscale_{name}_replicas",
            help,
            ("model_name", "pool"),
            lambda: [((it.model or name, it.pool), value(it)) for name, it in read().items()],
        )

    for name, help, value in _GAUGES:
        add(name, help, value)
    registry.sampled(
        "counter",
        "penstock_autoscale_decisions_total",
        "Changes of the number of replicas by automatic scaling, by reason.",
        ("model_name", "pool", "reason"),
        lambda: [
            ((it.model or name, it.pool, reason), n)
            for name, it in read().items()
            for reason, n in it.decisions.items()
        ],
    )
    registry.sampled(
        "counter",
        "penstock_autoscale_failed_starts_total",
        "Replicas that automatic scaling asked for and that could not start.",
        ("model_name", "pool"),
        lambda: [((it.model or name, it.pool), it.failed_starts) for name, it in read().items()],
    )
