"""Metrics of replicas and remote servers: failovers, retries, breakers, parked requests, reachability."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.routing.dispatch import Dispatcher
from penstock.routing.registry import ModelRegistry as Models
from penstock.routing.remotes import RemoteMember
from penstock.routing.replicas import ReplicaSet
from penstock.telemetry.exposition import MetricRegistry

_BREAKER = {"closed": 0, "half_open": 1, "open": 2}
_COUNTS: tuple[tuple[str, str, Callable[[Dispatcher], int]], ...] = (
    ("failovers", "Requests moved to another replica because theirs was lost.", lambda it: it.counts.failovers),
    ("retries", "Requests retried after a replica refused or failed them.", lambda it: it.counts.retries),
    ("hedges", "Requests also sent to a second replica because the first was slow.", lambda it: it.counts.hedges),
    ("retries_refused", "Retries and hedges skipped because the retry budget was spent.", lambda it: it.budget.refused),
    ("given_up", "Requests that no replica could finish.", lambda it: it.counts.given_up),
)


def add_replica_metrics(registry: MetricRegistry, models: Models) -> None:
    """Registers the metrics; a single replica has no breaker."""

    def sets() -> Iterator[tuple[str, ReplicaSet]]:
        for model in models:
            if isinstance(model.backend, ReplicaSet):
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

    def breakers() -> Iterator[tuple[tuple[str, str], float]]:
        for model, found in sets():
            for member in found.members if len(found.members) > 1 else ():
                yield (model, member.name), _BREAKER[member.breaker.state]
        for remote in models.remotes.values():
            for other in remote.members:
                yield (remote.name, other.server.name), _BREAKER[other.breaker.state]

    registry.sampled(
        "gauge",
        "penstock_replica_breaker",
        "Circuit breaker of a replica or remote server: 0 closed, 1 half open, 2 open.",
        ("model_name", "engine"),
        lambda: list(breakers()),
    )
    _add_place_metrics(registry, models, sets)
    _add_remote_metrics(registry, models)
    registry.sampled(
        "gauge",
        "penstock_held_requests",
        "Requests waiting for the first replica of a model that was scaled to zero.",
        ("model_name",),
        lambda: [((model,), found.hold.waiting) for model, found in sets() if found.hold is not None],
        merge="sum",
    )
    registry.sampled(
        "gauge",
        "penstock_parked_requests",
        "Requests waiting because no replica can take them.",
        ("model_name",),
        lambda: [((model,), found.dispatcher.parked) for model, found in sets()],
        merge="sum",
    )


def _add_remote_metrics(registry: MetricRegistry, models: Models) -> None:
    labels = ("model_name", "engine")

    def each(read: Callable[[RemoteMember], float | None]) -> Callable[[], list[tuple[tuple[str, ...], float]]]:
        """The figure of every remote server that has it."""

        def sample() -> list[tuple[tuple[str, ...], float]]:
            found = ((r.name, m.server.name, read(m)) for r in models.remotes.values() for m in r.members)
            return [((name, server), value) for name, server, value in found if value is not None]

        return sample

    def remaining() -> list[tuple[tuple[str, ...], float]]:
        return [
            ((remote.name, member.server.name, kind), float(left))
            for remote in models.remotes.values()
            for member in remote.members
            for kind, left in member.server.limits.remaining.items()
        ]

    registry.sampled(
        "gauge",
        "penstock_remote_up",
        "1 while a remote server is reachable.",
        labels,
        each(lambda member: float(member.reachable)),
    )
    registry.sampled(
        "gauge",
        "penstock_remote_requests_in_flight",
        "Requests in flight on a remote server.",
        labels,
        each(lambda member: member.server.in_flight),
        merge="sum",
    )
    registry.sampled(
        "gauge",
        "penstock_remote_requests_running",
        "Requests of all clients that a remote server runs, as it says.",
        labels,
        each(lambda member: None if member.server.load is None else member.server.load.running),
    )
    registry.sampled(
        "gauge",
        "penstock_remote_requests_waiting",
        "Requests of all clients that wait at a remote server, as it says.",
        labels,
        each(lambda member: member.waiting),
    )
    registry.sampled(
        "gauge",
        "penstock_remote_kv_cache_usage",
        "Share of a remote server's KV cache that is in use, as it says.",
        labels,
        each(lambda member: None if member.server.load is None else member.server.load.kv_usage),
    )
    registry.sampled(
        "gauge",
        "penstock_remote_limit_remaining",
        "What a provider's rate limit left with its last answer.",
        (*labels, "kind"),
        remaining,
    )
    registry.sampled(
        "gauge",
        "penstock_remote_limit_wait_seconds",
        "Seconds until a provider's rate limit allows the next request.",
        labels,
        each(lambda member: member.server.wait_s()),
    )


def _add_place_metrics(
    registry: MetricRegistry, models: Models, sets: Callable[[], Iterator[tuple[str, ReplicaSet]]]
) -> None:
    """Where replicas are. Labels of their own: metrics that others scrape keep theirs."""

    def places() -> Iterator[tuple[tuple[str, ...], float]]:
        for model, found in sets():
            for member in found.members:
                place = member.place
                if place.pool or place.region or place.machine:
                    yield (model, member.name, place.pool, place.region, place.zone, place.machine), 1.0
        for remote in models.remotes.values():
            for other in remote.members:
                if other.region:
                    yield (remote.name, other.server.name, "", other.region, "", ""), 1.0

    def round_trips() -> Iterator[tuple[tuple[str, str], float]]:
        for model, found in sets():
            for member in found.members:
                if (seconds := member.round_trip_s) is not None:
                    yield (model, member.name), seconds
        for remote in models.remotes.values():
            for other in remote.members:
                if (seconds := other.server.round_trip.seconds) is not None:
                    yield (remote.name, other.server.name), seconds

    registry.sampled(
        "gauge",
        "penstock_replica_info",
        "Pool, region, zone and machine of a replica; always 1.",
        ("model_name", "engine", "pool", "region", "zone", "machine"),
        lambda: list(places()),
    )
    registry.sampled(
        "gauge",
        "penstock_replica_round_trip_seconds",
        "Measured round trip to a replica on another machine, or to a remote server.",
        ("model_name", "engine"),
        lambda: list(round_trips()),
    )
    registry.sampled(
        "counter",
        "penstock_region_choices_total",
        "Choices between regions, by the region that was taken.",
        ("model_name", "region"),
        lambda: [
            ((model, region), count)
            for model, found in sets()
            for region, count in found.dispatcher.order.regions.chosen.items()
        ],
        merge="sum",
    )
