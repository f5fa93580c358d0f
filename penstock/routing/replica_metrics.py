"""Figures of models with several replicas: requests that moved, breakers, the retry budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.routing.dispatch import Dispatcher
from penstock.routing.registry import Registry as Models
from penstock.routing.replicas import ReplicaSet
from penstock.telemetry.exposition import Registry

_BREAKER = {"closed": 0, "half_open": 1, "open": 2}
_COUNTS: tuple[tuple[str, str, Callable[[Dispatcher], int]], ...] = (
    ("failovers", "Requests that went on elsewhere because their replica was gone.", lambda it: it.counts.failovers),
    ("retries", "Requests tried again after a replica refused or failed them.", lambda it: it.counts.retries),
    ("hedges", "Requests tried on a second replica because the first was slow.", lambda it: it.counts.hedges),
    ("retries_refused", "Retries and hedges for which the budget was spent.", lambda it: it.budget.refused),
    ("given_up", "Requests that no replica could finish.", lambda it: it.counts.given_up),
)


def add_replica_metrics(registry: Registry, models: Models) -> None:
    """Add them to `registry`; a model with one replica has none."""

    def sets() -> Iterator[tuple[str, ReplicaSet]]:
        for model in models:
            if isinstance(model.backend, ReplicaSet) and len(model.backend.members) > 1:
                yield model.name, model.backend

    def add(name: str, help: str, value: Callable[[Dispatcher], int]) -> None:
        registry.sampled(
            "counter",
            f"penstock_{name}_total",
            help,
            ("model_name",),
            lambda: [((model,), value(found.dispatcher)) for model, found in sets()],
            merge="sum",
        )

    for name, help, value in _COUNTS:
        add(name, help, value)
    registry.sampled(
        "gauge",
        "penstock_replica_breaker",
        "Circuit breaker of a replica: 0 closed, 1 half open, 2 open.",
        ("model_name", "engine"),
        lambda: [
            ((model, member.name), _BREAKER[member.breaker.state])
            for model, found in sets()
            for member in found.members
        ],
    )
    registry.sampled(
        "gauge",
        "penstock_parked_requests",
        "Requests that wait because no replica can take them.",
        ("model_name",),
        lambda: [((model,), found.dispatcher.parked) for model, found in sets()],
        merge="sum",
    )
