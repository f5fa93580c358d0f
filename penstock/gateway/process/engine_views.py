"""What the metrics show of engines and of requests that wait for one."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.backends.base import EngineClient
from penstock.routing.registry import ModelRegistry
from penstock.routing.replicas import ReplicaSet
from penstock.telemetry.metrics import EngineView


def engine_views(registry: ModelRegistry) -> Iterator[EngineView]:
    for model in registry:
        for backend in model.backend.replicas:
            awake = backend.state in ("awake", "drowsy")
            yield EngineView(
                model.name,
                backend.name,
                backend.ready,
                backend.info,
                backend.load,
                awake,
                model.cost_per_hour,
                backend.step_tokens if isinstance(backend, EngineClient) else None,
            )


def without_replica(registry: ModelRegistry) -> Iterator[tuple[str, int]]:
    """Admitted requests that no replica can take yet."""
    for model in registry:
        if isinstance(model.backend, ReplicaSet):
            held = 0 if model.backend.hold is None else model.backend.hold.waiting
            yield model.name, model.backend.dispatcher.parked + held
