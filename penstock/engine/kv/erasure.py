"""Erasing what the requests of one owner, usually a tenant, have left in the KV caches.

All of it is dropped at once: nothing that was cached for the owner before is found again, on the device, on the host or
on disk. What lies on disk is then overwritten, beside the steps, and synced. Memory is not: it is overwritten as it is
used again, and gone with the process. Sequences that run keep their blocks and may leave further ones.

Invariant: used by the thread that steps the engine.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.engine.kv.block_hash import owner_tag
from penstock.engine.kv.pool import BlockPool

Guard = Callable[[Callable[[], None]], None]
"""Calls what it is given, if that is possible now."""


class Erasure:
    """One erasure, from the moment when it begins."""

    def __init__(self, pool: BlockPool, owner: str, guard: Guard = lambda land: land()) -> None:
        """`owner`: the part of a salt before its first NUL; empty: of those who share their prefixes. `guard`: for what
        needs all ranks."""
        self._guard = guard
        tag = owner_tag(owner)
        self.blocks = pool.count(tag)
        """Blocks, and states of recurrent layers, that were dropped."""
        self._tiers = pool.erase(tag)
        self._failed_before = self._unerased
        self._over = False

    def advance(self) -> bool:
        """Whether it is over."""
        if not self._over:
            self._guard(self._land)
        return self._over

    def _land(self) -> None:
        for tier in self._tiers:
            if tier.disk is not None:
                tier.land()
        self._over = not any(tier.erasing for tier in self._tiers)

    @property
    def failed(self) -> int:
        """Blocks on disk that could not be overwritten. They are not found again, but their bytes are there."""
        return self._unerased - self._failed_before

    @property
    def _unerased(self) -> int:
        return sum(tier.disk.unerased for tier in self._tiers if tier.disk is not None)
