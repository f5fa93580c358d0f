"""Metrics of model selection: the decisions of routes, by rule."""

from __future__ import annotations

from penstock.telemetry.exposition import MetricRegistry


class RouteMetrics:
    def __init__(self, registry: MetricRegistry) -> None:
        self._decisions = registry.counter(
            "penstock_route_decisions_total",
            "Requests that named a route, by the model chosen and the rule that chose it.",
            ("route", "model_name", "rule"),
        )

    def decided(self, route: str, model: str, rule: str) -> None:
        self._decisions.child(route, model, rule).inc()
