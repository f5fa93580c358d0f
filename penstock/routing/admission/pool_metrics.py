"""Metrics of pools: slots, requests, queues, reservations and spill-over."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.routing.admission.lanes import COMMON
from penstock.routing.admission.pools import PooledAdmission, PoolLanes
from penstock.telemetry.exposition import Merge, MetricRegistry

Pooled = Callable[[], Iterator[PooledAdmission]]
_LABELS = ("model_name", "pool")


def add_pool_metrics(registry: MetricRegistry, pooled: Pooled, merge: Merge) -> None:
    """`pooled`: the models with pools. `merge`: how the values of several gateway processes combine."""

    def each(value: Callable[[PoolLanes], float]) -> list[tuple[tuple[str, str], float]]:
        return [((found.model, name), value(pool)) for found in pooled() for name, pool in found.pools.items()]

    registry.sampled(
        "gauge",
        "penstock_pool_slots",
        "Requests that a pool runs at one time.",
        _LABELS,
        lambda: each(lambda pool: pool.capacity().slots or 0),
    )
    registry.sampled(
        "gauge",
        "penstock_pool_requests_in_flight",
        "Slots of a pool that admitted requests hold.",
        _LABELS,
        lambda: each(lambda pool: sum(load.held for load in pool.loads().values())),
        merge=merge,
    )
    registry.sampled(
        "gauge",
        "penstock_pool_queue_depth",
        "Requests waiting for a pool.",
        _LABELS,
        lambda: each(lambda pool: pool.loads()[COMMON].waiting),
        merge=merge,
    )

    def reserved(value: Callable[[PoolLanes, str], float]) -> list[tuple[tuple[str, str, str], float]]:
        return [
            ((found.model, name, reserve.name.strip("/")), value(pool, reserve.name))
            for found in pooled()
            for name, pool in found.pools.items()
            for reserve in pool.reserves
        ]

    registry.sampled(
        "gauge",
        "penstock_pool_reserved_slots",
        "Slots of a pool that only their owner may use.",
        (*_LABELS, "owner"),
        lambda: reserved(lambda pool, name: pool.capacities()[name].slots or 0),
    )
    registry.sampled(
        "gauge",
        "penstock_pool_reserved_in_flight",
        "Reserved slots that their owner holds.",
        (*_LABELS, "owner"),
        lambda: reserved(lambda pool, name: pool.loads()[name].held),
        merge=merge,
    )
    registry.sampled(
        "counter",
        "penstock_pool_spills_total",
        "Requests that another pool than that of their rule took.",
        (*_LABELS, "to"),
        lambda: [((found.model, pool, to), count) for found in pooled() for (pool, to), count in found.spills.items()],
        merge="sum",
    )
