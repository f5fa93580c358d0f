"""Metrics of the response caches."""

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
            "Similar questions that the verifier of the semantic cache rejected.",
            ("reason",),
        )
        self.gave_up = registry.counter(
            "penstock_cache_timeouts_total", "Semantic cache lookups that timed out."
        ).child()
        self.suspected = registry.counter(
            "penstock_cache_suspected_false_hits_total", "Semantic cache hits with negative user feedback."
        ).child()
        self.saved_tokens = registry.counter(
            "penstock_cache_saved_tokens_total", "Completion tokens served from the cache."
        ).child()

    def looked(self, cache: Literal["exact", "semantic"], *, hit: bool) -> None:
        self._lookups.child(cache, "hit" if hit else "miss").inc()

    def refused(self, reasons: Iterable[str]) -> None:
        for reason in reasons:
            self._refusals.child(reason).inc()
