"""Requests that wait, wherever they do: in an engine, in the gateway's admission queue, or for a replica that can take
them.

Autoscalers read `vllm:num_requests_waiting` per engine, so what waits in the gateway is divided among the engines of
its model. Several gateway processes see the same engines, but each has its own queue (unless they share one in Redis):
the former are merged by maximum, the latter added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from penstock.telemetry.engine_metrics import ENGINE_LABELS, Engines, EngineView
from penstock.telemetry.exposition import MetricRegistry

WaitReason = Literal["capacity", "deferred"]
"""capacity: for room in a batch or in memory. deferred: for something else first, such as a replica that starts."""
Depths = Callable[[], Iterable[tuple[str, int]]]
"""Waiting requests by model."""
NO_ENGINE = "gateway"
"""The engine's name for requests to a model without any."""


class _Queue(NamedTuple):
    depths: Depths
    reason: WaitReason
    shared: bool


class WaitingMetrics:
    """Counts the requests that wait."""

    def __init__(self, registry: MetricRegistry, engines: Engines) -> None:
        self._engines = registry.once(engines)
        self._queues: list[_Queue] = []
        self._own = registry.once(lambda: list(self._spread(shared=False)))
        self._shared = registry.once(lambda: list(self._spread(shared=True)))
        registry.sampled(
            "gauge",
            "vllm:num_requests_waiting",
            "Requests waiting, in the engine or in the gateway.",
            ENGINE_LABELS,
            lambda: _summed((found[:2], found[3]) for found in (*self._waiting(), *self._shared())),
            own=lambda: _summed((found[:2], found[3]) for found in self._own()),
        )
        registry.sampled(
            "gauge",
            "vllm:num_requests_waiting_by_reason",
            "Requests waiting, by what they wait for.",
            (*ENGINE_LABELS, "reason"),
            lambda: _summed((found[:3], found[3]) for found in (*self._waiting(), *self._shared())),
            own=lambda: _summed((found[:3], found[3]) for found in self._own()),
        )

    def add(self, depths: Depths, reason: WaitReason, *, shared: bool = False) -> None:
        """Counts a queue of the gateway too. `shared`: all gateway processes have the same one."""
        self._queues.append(_Queue(depths, reason, shared))

    def _waiting(self) -> Iterator[tuple[str, str, WaitReason, int]]:
        """Inside the engines."""
        for view in self._engines():
            deferred = 0 if view.load.handover is None else min(view.load.handover.waiting, view.load.waiting)
            yield view.model, view.engine, "capacity", view.load.waiting - deferred
            yield view.model, view.engine, "deferred", deferred

    def _spread(self, *, shared: bool) -> Iterator[tuple[str, str, WaitReason, int]]:
        """In the gateway, divided among engines."""
        by_model: defaultdict[str, list[EngineView]] = defaultdict(list)
        for view in self._engines():
            by_model[view.model].append(view)
        for queue in self._queues:
            if queue.shared != shared:
                continue
            for model, count in queue.depths():
                if not count:
                    continue
                views = by_model[model]
                names = [view.engine for view in views if view.ready] or [view.engine for view in views] or [NO_ENGINE]
                for engine, share in zip(names, divided(count, len(names)), strict=True):
                    yield model, engine, queue.reason, share


def divided(count: int, parts: int) -> Sequence[int]:
    """`count` in whole numbers that differ by one at most."""
    each, more = divmod(count, parts)
    return [each + (part < more) for part in range(parts)]


def _summed(samples: Iterable[tuple[tuple[str, ...], int]]) -> Iterable[tuple[tuple[str, ...], float]]:
    found: dict[tuple[str, ...], float] = {}
    for labels, count in samples:
        found[labels] = found.get(labels, 0) + count
    return found.items()
