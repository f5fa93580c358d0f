"""Metrics of experiments, by experiment and arm: both are names of the configuration, so the series are few."""

from __future__ import annotations

from typing import Literal

from penstock.telemetry.exposition import MetricRegistry

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GRADES = (0.0, 0.25, 0.5, 0.75, 1.0)
ARM = ("experiment", "arm")


class ExperimentMetrics:
    def __init__(self, registry: MetricRegistry) -> None:
        self._requests = registry.counter(
            "penstock_experiment_requests_total", "Requests in experiments, by arm and outcome.", (*ARM, "outcome")
        )
        self._ttft = registry.histogram(
            "penstock_experiment_ttft_seconds", "Time to first token in experiments.", SECONDS, ARM
        )
        self._latency = registry.histogram(
            "penstock_experiment_latency_seconds", "Whole latency in experiments.", SECONDS, ARM
        )
        self._tokens = registry.counter("penstock_experiment_tokens_total", "Completion tokens in experiments.", ARM)
        self._cost = registry.counter(
            "penstock_experiment_cost_dollars_total", "Cost of the requests in experiments.", ARM
        )
        self._votes = registry.counter(
            "penstock_experiment_votes_total", "Votes on answers in experiments.", (*ARM, "rating")
        )
        self._grades = registry.histogram(
            "penstock_experiment_grade", "Grades of the judge in experiments, 0 to 1.", GRADES, ARM
        )
        self._shares = registry.gauge(
            "penstock_experiment_share", "Share of the requests that an arm gets.", ARM, merge="max"
        )
        self._changes = registry.counter(
            "penstock_experiment_changes_total", "Promotions and rollbacks, by who made them.", (*ARM, "change", "by")
        )
        self._shadow = registry.counter(
            "penstock_experiment_shadow_requests_total", "Requests that were also sent to a shadow, by outcome.",
            (*ARM, "outcome"),
        )  # fmt: skip

    def ended(self, experiment: str, arm: str, outcome: str) -> None:
        self._requests.child(experiment, arm, outcome).inc()

    def answered(
        self, experiment: str, arm: str, ttft_s: float | None, latency_s: float, tokens: int, dollars: float
    ) -> None:
        if ttft_s is not None:
            self._ttft.child(experiment, arm).observe(ttft_s)
        self._latency.child(experiment, arm).observe(latency_s)
        self._tokens.child(experiment, arm).inc(tokens)
        self._cost.child(experiment, arm).inc(dollars)

    def voted(self, experiment: str, arm: str, rating: str) -> None:
        self._votes.child(experiment, arm, rating).inc()

    def graded(self, experiment: str, arm: str, grade: float) -> None:
        self._grades.child(experiment, arm).observe(grade)

    def share(self, experiment: str, arm: str, share: float) -> None:
        self._shares.child(experiment, arm).set(share)

    def changed(self, experiment: str, arm: str, change: Literal["promoted", "rolled back"], by: str) -> None:
        self._changes.child(experiment, arm, change, by).inc()

    def shadowed(self, experiment: str, arm: str, outcome: Literal["answered", "failed", "dropped"]) -> None:
        self._shadow.child(experiment, arm, outcome).inc()
