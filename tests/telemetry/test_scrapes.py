"""Rates, resets and percentiles between two scrapes."""

from __future__ import annotations

import pytest

from penstock.telemetry.exposition import MetricRegistry
from penstock.telemetry.scrapes import Interval, Scrape


def scrape(registry: MetricRegistry, at: float) -> Scrape:
    return Scrape(registry.render().decode(), at)


def test_rates_by_label_and_over_all() -> None:
    registry = MetricRegistry()
    family = registry.counter("a_total", "Help.", ("who",))
    family.child("x").inc(5)
    before = scrape(registry, 10.0)
    family.child("x").inc(6)
    family.child("y").inc(2)
    interval = Interval(before, scrape(registry, 12.0))
    assert interval.rate("a_total") == 4
    assert interval.rate("a_total", who="x") == 3
    assert interval.rates("a_total", "who") == {"x": 3, "y": 1}
    assert interval.rate("missing_total") == 0


def test_a_restarted_process_counts_from_zero() -> None:
    old, new = MetricRegistry(), MetricRegistry()
    old.counter("a_total", "Help.").child().inc(1000)
    new.counter("a_total", "Help.").child().inc(10)
    assert Interval(scrape(old, 0.0), scrape(new, 1.0)).rate("a_total") == 10


def test_percentiles_are_of_the_interval_alone() -> None:
    registry = MetricRegistry()
    child = registry.histogram("h", "Help.", (0.1, 0.2, 0.4), ("m",)).child("x")
    child.observe(9.0, 1000)
    before = scrape(registry, 0.0)
    child.observe(0.15, 100)
    interval = Interval(before, scrape(registry, 1.0))
    assert interval.quantile(0.5, "h") == pytest.approx(0.15)
    assert interval.quantile(0.5, "h", m="other") is None
    child.observe(9.0, 1000)
    assert Interval(before, scrape(registry, 2.0)).quantile(0.99, "h") == 0.4, "the last bound that is known"


def test_nothing_observed_is_nothing_known() -> None:
    registry = MetricRegistry()
    registry.histogram("h", "Help.", (1.0,)).child()
    interval = Interval(scrape(registry, 0.0), scrape(registry, 1.0))
    assert interval.quantile(0.5, "h") is None
    assert interval.ratio("a_total", "b_total") is None
    assert interval.after.most("missing") is None
