"""How much a model's engines can take at one time, from what they say of themselves.

An engine that is not up counts for nothing unless none is; one that has not told its size makes the room unlimited.
Where the queue is this gateway's own, engines may also run what others sent: what they report beyond what was granted
here is taken off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.backends.base import Backend
from penstock.config.routing import AdmissionConfig
from penstock.routing.admission.queue import Capacity
from penstock.routing.replicas import ReplicaSet


class EngineCapacity:
    """The room in front of one model."""

    def __init__(
        self, backend: Backend, config: AdmissionConfig, held: Callable[[], tuple[int, int]] | None = None
    ) -> None:
        """`held`: slots and KV tokens that this gateway's own queue has granted; None when the queue is everybody's."""
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
        # Those for prefill run requests of their own only while there is no other.
        return [replica for replica in up if replica.info is None or replica.info.role != "prefill"] or up or replicas
