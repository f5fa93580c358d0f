"""How much a model's engines can run at one time, from the sizes and loads they report.

Engines that are down do not count, unless all are. An engine that has not reported its size makes the capacity
unlimited. When the queue belongs to this gateway alone, engines may also run requests of other gateways: whatever they
report beyond what this queue granted is subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.backends.base import Backend
from penstock.config.routing import AdmissionConfig
from penstock.engine.request import EngineInfo, EngineLoad
from penstock.routing.admission.queue import Capacity
from penstock.routing.replicas import ReplicaSet


@dataclass(slots=True)
class EngineTotals:
    """Sizes and loads of engines, added up."""

    replicas: int = 0
    slots: int = 0
    """Sequences that they run at one time."""
    present: int = 0
    """Requests that they have, running or waiting."""
    kv_tokens: int = 0
    used_tokens: int = 0
    knows_slots: bool = True
    knows_memory: bool = True

    def add(self, info: EngineInfo, load: EngineLoad) -> None:
        self.slots += info.max_running
        self.present += load.running + load.waiting
        self.kv_tokens += load.total_blocks * info.block_size
        self.used_tokens += load.used_blocks * info.block_size
        self.knows_slots = self.knows_slots and info.max_running > 0
        self.knows_memory = self.knows_memory and load.total_blocks > 0


def capacity_of(engines: EngineTotals, config: AdmissionConfig, held: tuple[int, int] | None) -> Capacity:
    """`held`: slots and KV tokens granted by this gateway's own queue; None when gateways share the queue."""
    slots = engines.slots if config.slots is None else config.slots * engines.replicas
    slots += config.ahead * engines.replicas
    kv_tokens = int(engines.kv_tokens * config.kv_share)
    if held is not None:
        slots -= max(engines.present - held[0], 0)
        kv_tokens -= max(engines.used_tokens - held[1], 0)
    return Capacity(
        max(slots, 0) if engines.knows_slots or config.slots is not None else None,
        max(kv_tokens, 0) if engines.knows_memory else None,
        engines.replicas,
    )


class EngineCapacity:
    """Reads the capacity of one model's engines."""

    def __init__(
        self,
        backend: Backend,
        config: AdmissionConfig,
        held: Callable[[], tuple[int, int]] | None = None,
        pool: str | None = None,
    ) -> None:
        """`held`: slots and KV tokens granted by this gateway's own queue; None when gateways share the queue. `pool`:
        only the engines of this pool."""
        self._backend = backend
        self._pool = pool
        self._config = config
        self._held = held

    def __call__(self) -> Capacity:
        replicas = self._replicas()
        engines = EngineTotals(len(replicas))
        for replica in replicas:
            info, load = replica.info, replica.load
            if info is None:
                return Capacity(replicas=len(replicas))
            engines.add(info, load)
        return capacity_of(engines, self._config, None if self._held is None else self._held())

    def _replicas(self) -> Sequence[Backend]:
        if not isinstance(self._backend, ReplicaSet):
            return (self._backend,)
        replicas = [
            member.backend for member in self._backend.members if self._pool is None or member.place.pool == self._pool
        ]
        up = [replica for replica in replicas if replica.ready]
        # Prefill replicas run whole requests only while no other replica is up.
        return [replica for replica in up if replica.info is None or replica.info.role != "prefill"] or up or replicas
