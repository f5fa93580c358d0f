"""Our metrics beside prometheus_client."""

from __future__ import annotations

from penstock.bench.libraries.exposition import ExpositionBenchSettings, Ours, PrometheusClient, measure, samples


def test_both_libraries_are_measured_on_the_same_series() -> None:
    results = measure(ExpositionBenchSettings(series=20, updates=200, scrapes=2, rounds=1))
    assert set(results) == {"penstock", "prometheus_client"}
    assert all(figures["update_ns"][0] > 0 and figures["scrape_ms"][0] > 0 for figures in results.values())


def test_scrapes_are_compared_by_value() -> None:
    ours, theirs = Ours(2), PrometheusClient(2)
    for side in (ours, theirs):
        side.count[0]()
        side.observe[1](0.2)
    assert samples(ours.scrape()) == samples(theirs.scrape())
    ours.count[0]()
    assert samples(ours.scrape()) != samples(theirs.scrape())
