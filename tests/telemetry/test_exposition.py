"""Our metrics text is what Prometheus reads."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.telemetry.exposition import Registry


def parse(registry: Registry) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(registry.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_counters_gauges_and_label_escaping() -> None:
    registry = Registry()
    registry.counter("a_total", "Help.", ("what",)).child('quote " slash \\ line\n').inc(2)
    registry.gauge("b", "Help.").child().set(1.5)
    registry.sampled("gauge", "c", "Help.", ("x",), lambda: [(("1",), 0.25), (("2",), 1e9)])
    found = parse(registry)
    assert found["a_total"] == {('quote " slash \\ line\n',): 2}
    assert found["b"] == {(): 1.5}
    assert found["c"] == {("1",): 0.25, ("2",): 1e9}


def test_histogram_buckets_are_cumulative_and_bounds_are_inclusive() -> None:
    registry = Registry()
    child = registry.histogram("h", "Help.", (0.1, 1.0), ("m",)).child("x")
    child.observe(0.1)
    child.observe(0.5, 2)
    child.observe(7.0)
    found = parse(registry)
    assert found["h_bucket"] == {("x", "0.1"): 1, ("x", "1"): 3, ("x", "+Inf"): 4}
    assert found["h_count"] == {("x",): 4}
    assert found["h_sum"] == {("x",): pytest.approx(8.1)}


def test_a_name_is_registered_once() -> None:
    registry = Registry()
    registry.gauge("a", "Help.")
    with pytest.raises(ValueError, match="twice"):
        registry.gauge("a", "Help.")
