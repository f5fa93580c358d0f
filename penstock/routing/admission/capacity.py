"""How much a model's engines can run at one time, from the sizes and loads they report.

Engines that are down do not count, unless all are. An engine that has not reported its size makes the capacity
unlimited. When the queue belongs to this gateway alone, engines may also run requests of other gateways: whatever they
report beyond what this queue granted is subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.backends.base import Backend
from penstock.config.routing import AdmissionConfig
from penstock.routing.admission.queue import Capacity
from penstock.routing.replicas import ReplicaSet


class EngineCapacity:
    """Reads the capacity of one model's engines."""

    def __init__(
        self, backend: Backend, config: AdmissionConfig, held: Callable[[], tuple[int, int]] | None = None
    ) -> None:
        """`held`: slots and KV tokens granted by this gateway's own queue; None when gateways share the queue."""
        self._backend = backend
        self._config = config
        self._held = held

    def __call__(self) -> Capacity:
        replicas = self._replicas()
        slots = kv_tokens = reported = used = 0
        knows_slots = knows_memory = True
        for replica in replicas:
            info, load = replica.info, replica.load
            if info is None:
                return Capacity(replicas=len(replicas))
            size = self._config.slots or info.max_running
            slots += size + self._config.ahead
            reported += load.running + load.waiting
            kv_tokens += load.total_blocks * info.block_size
            used += load.used_blocks * info.block_size
            knows_slots = knows_slots and size > 0
            knows_memory = knows_memory and load.total_blocks > 0
        kv_tokens = int(kv_tokens * self._config.kv_share)
        if self._held is not None:
            held_slots, held_tokens = self._held()
            if reported > held_slots:
                slots -= reported - held_slots
            if used > held_tokens:
                kv_tokens -= used - held_tokens
        return Capacity(
            max(slots, 0) if knows_slots else None, max(kv_tokens, 0) if knows_memory else None, len(replicas)
        )

    def _replicas(self) -> Sequence[Backend]:
        if not isinstance(self._backend, ReplicaSet):
            return (self._backend,)
        replicas = self._backend.replicas
        up = [replica for replica in replicas if replica.ready]
        # Prefill replicas run whole requests only while no other replica is up.
        return [replica for replica in up if replica.info is None or replica.info.role != "prefill"] or up or replicas
