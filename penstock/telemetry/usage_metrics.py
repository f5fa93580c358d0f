"""Tokens and cost by tenant, model, adapter and feature, in a bounded number of series.

Clients choose features, there may be many tenants, and every combination is a series for the life of the process. So
the number is limited to `most`: beyond it, a new combination loses its adapter and feature (`other`), and beyond twice
`most` its tenant too. Sums over a label stay correct.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.telemetry.exposition import OTHER, MetricRegistry, Value

LABELS = ("tenant", "model_name", "adapter", "feature")
KINDS = ("prompt", "cached", "completion")
NANOS = 1e9


@dataclass(slots=True)
class _Series:
    requests: Value
    prompt: Value
    cached: Value
    completion: Value
    cost: Value
    reasoning: Value


class UsageMetrics:
    """Counts what the ledger settles."""

    def __init__(self, registry: MetricRegistry, most: int) -> None:
        self._most = most
        self._series: dict[tuple[str, str, str, str], _Series] = {}
        self._requests = registry.counter("penstock_usage_requests_total", "Requests settled in the ledger.", LABELS)
        self._tokens = registry.counter(
            "penstock_usage_tokens_total", "Tokens settled in the ledger; prompt includes cached.", (*LABELS, "kind")
        )
        # No further kind of the counter above: a sum over its kinds would count these tokens twice.
        self._reasoning = registry.counter(
            "penstock_usage_reasoning_tokens_total",
            "Completion tokens settled in the ledger that are thoughts.",
            LABELS,
        )
        self._cost = registry.counter("penstock_usage_cost_dollars_total", "Cost of settled requests.", LABELS)

    def settled(
        self,
        tenant: str,
        model: str,
        adapter: str,
        feature: str,
        *,
        prompt: int,
        cached: int,
        completion: int,
        nanodollars: int,
        reasoning: int = 0,
    ) -> None:
        series = self._series.get((tenant, model, adapter, feature)) or self._find(tenant, model, adapter, feature)
        series.requests.inc()
        series.prompt.inc(prompt)
        series.cached.inc(cached)
        series.completion.inc(completion)
        series.reasoning.inc(reasoning)
        series.cost.inc(nanodollars / NANOS)

    def _find(self, tenant: str, model: str, adapter: str, feature: str) -> _Series:
        key = (tenant, model, adapter, feature)
        if len(self._series) >= self._most:
            key = (tenant, model, OTHER, OTHER)
            if key not in self._series and len(self._series) >= 2 * self._most:
                key = (OTHER, model, OTHER, OTHER)
        found = self._series.get(key)
        if found is None:
            prompt, cached, completion = (self._tokens.child(*key, kind) for kind in KINDS)
            found = _Series(
                self._requests.child(*key),
                prompt,
                cached,
                completion,
                self._cost.child(*key),
                self._reasoning.child(*key),
            )
            self._series[key] = found
        return found
