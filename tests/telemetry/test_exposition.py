"""Our metrics text is what Prometheus reads."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from penstock.telemetry.exposition import MOST_CHILDREN, MetricRegistry, render


def parse(registry: MetricRegistry) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(registry.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_counters_gauges_and_label_escaping() -> None:
    registry = MetricRegistry()
    registry.counter("a_total", "Help.", ("what",)).child('quote " slash \\ line\n').inc(2)
    registry.gauge("b", "Help.").child().set(1.5)
    registry.sampled("gauge", "c", "Help.", ("x",), lambda: [(("1",), 0.25), (("2",), 1e9)])
    found = parse(registry)
    assert found["a_total"] == {('quote " slash \\ line\n',): 2}
    assert found["b"] == {(): 1.5}
    assert found["c"] == {("1",): 0.25, ("2",): 1e9}


def test_histogram_buckets_are_cumulative_and_bounds_are_inclusive() -> None:
    registry = MetricRegistry()
    child = registry.histogram("h", "Help.", (0.1, 1.0), ("m",)).child("x")
    child.observe(0.1)
    child.observe(0.5, 2)
    child.observe(7.0)
    found = parse(registry)
    assert found["h_bucket"] == {("x", "0.1"): 1, ("x", "1.0"): 3, ("x", "+Inf"): 4}
    assert found["h_count"] == {("x",): 4}
    assert found["h_sum"] == {("x",): pytest.approx(8.1)}


def test_a_scrape_sees_what_was_observed_since_the_last_one() -> None:
    registry = MetricRegistry()
    child = registry.histogram("h", "Help.", (1.0,)).child()
    for count in range(1, 4):
        child.observe(0.5)
        assert registry.render() == registry.render()
        assert parse(registry)["h_count"] == {(): count}


def test_openmetrics_names_a_trace_per_bucket() -> None:
    registry = MetricRegistry()
    registry.counter("a_total", "Help.").child().inc(3)
    child = registry.histogram("h", "Help.", (0.1, 1.0), ("m",)).child("x")
    child.observe(0.05)
    child.observe(0.5, trace="4bf92f3577b34da6a3ce929d0e0e4736")
    families = {family.name: family for family in openmetrics(registry.render(openmetrics=True).decode())}
    assert [(s.name, s.value) for s in families["a"].samples] == [("a_total", 3)]
    exemplars = {s.labels["le"]: s.exemplar for s in families["h"].samples if s.name == "h_bucket"}
    assert exemplars["0.1"] is None
    assert exemplars["1.0"].labels == {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}
    assert exemplars["1.0"].value == 0.5
    assert "trace_id" not in registry.render().decode()


def test_labels_that_never_end_do_not_fill_the_memory() -> None:
    registry = MetricRegistry()
    family = registry.counter("a_total", "Help.", ("who",))
    for i in range(2 * MOST_CHILDREN):
        family.child(str(i)).inc()
    found = parse(registry)["a_total"]
    assert len(found) == MOST_CHILDREN + 1
    assert found["other",] == MOST_CHILDREN
    assert sum(found.values()) == 2 * MOST_CHILDREN


def test_readings_are_what_a_scrape_would_show() -> None:
    registry = MetricRegistry()
    registry.counter("a_total", "Help.", ("x",)).child("1").inc(2)
    registry.histogram("h", "Help.", (1.0,)).child().observe(3.0)
    registry.sampled("gauge", "g", "Help.", (), lambda: [((), 7)])
    readings = registry.readings()
    assert render(readings) == registry.render()
    registry.histogram("i", "Help.", (1.0,)).child().observe(0.5, trace="4bf92f3577b34da6a3ce929d0e0e4736")
    assert render(registry.readings(), openmetrics=True) == registry.render(openmetrics=True)
    assert [family.merge for family in readings] == ["sum", "sum", "max"]


def test_a_name_is_registered_once() -> None:
    registry = MetricRegistry()
    registry.gauge("a", "Help.")
    with pytest.raises(ValueError, match="twice"):
        registry.gauge("a", "Help.")
