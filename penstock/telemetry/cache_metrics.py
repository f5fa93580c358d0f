"""What the response caches did."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from penstock.telemetry.exposition import MetricRegistry


class CacheMetrics:
    """One per gateway process that has a cache."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._lookups = registry.counter(
            "penstock_cache_lookups_total", "Requests looked up in a response cache.", ("cache", "outcome")
        )
        self._refusals = registry.counter(
            "penstock_cache_refusals_total",
            "Near questions that the verifier of the semantic cache held to be different.",
            ("reason",),
        )
        self.gave_up = registry.counter(
            "penstock_cache_timeouts_total", "Lookups in the semantic cache that took too long."
        ).child()
        self.suspected = registry.counter(
            "penstock_cache_suspected_false_hits_total", "Semantic hits that a user did not like."
        ).child()
        self.saved_tokens = registry.counter(
            "penstock_cache_saved_tokens_total", "Completion tokens that were not generated again."
        ).child()

    def looked(self, cache: Literal["exact", "semantic"], *, hit: bool) -> None:
        self._lookups.child(cache, "hit" if hit else "miss").inc()

    def refused(self, reasons: Iterable[str]) -> None:
        for reason in reasons:
            self._refusals.child(reason).inc()
