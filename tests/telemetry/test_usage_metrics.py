"""Usage by tenant, model, adapter and feature: complete sums in a bounded number of series."""

from __future__ import annotations

from penstock.telemetry.exposition import MetricRegistry
from penstock.telemetry.usage_metrics import UsageMetrics
from tests.telemetry.test_exposition import parse


def settle(usage: UsageMetrics, tenant: str, feature: str = "") -> None:
    usage.settled(tenant, "m", "", feature, prompt=10, cached=4, completion=5, nanodollars=2_000_000)


def test_tokens_and_money_of_each_combination() -> None:
    registry = MetricRegistry()
    usage = UsageMetrics(registry, most=10)
    settle(usage, "acme", "search")
    settle(usage, "acme", "search")
    settle(usage, "umbrella")
    found = parse(registry)
    key = ("acme", "m", "", "search")
    assert found["penstock_usage_requests_total"][key] == 2
    kinds = {kind: found["penstock_usage_tokens_total"][(*key, kind)] for kind in ("prompt", "cached", "completion")}
    assert kinds == {"prompt": 20, "cached": 8, "completion": 10}
    assert found["penstock_usage_cost_dollars_total"][key] == 0.004
    assert found["penstock_usage_requests_total"]["umbrella", "m", "", ""] == 1


def test_a_client_that_invents_features_costs_others_nothing() -> None:
    registry = MetricRegistry()
    usage = UsageMetrics(registry, most=10)
    for i in range(1000):
        settle(usage, "noisy", f"feature-{i}")
    settle(usage, "quiet")
    found = parse(registry)["penstock_usage_requests_total"]
    assert len(found) == 12
    assert found["noisy", "m", "other", "other"] == 990
    assert found["quiet", "m", "other", "other"] == 1, "a tenant keeps its name when features ran out"


def test_even_tenants_without_number_are_bounded() -> None:
    registry = MetricRegistry()
    usage = UsageMetrics(registry, most=10)
    for i in range(1000):
        settle(usage, f"tenant-{i}")
    found = parse(registry)["penstock_usage_requests_total"]
    assert len(found) == 21
    assert sum(found.values()) == 1000
