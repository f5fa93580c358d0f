"""`penstock bench exposition`: our metrics beside `prometheus_client`, with the same series and the same values.

Two figures that a busy gateway pays: the time of one update of a known series, and the time of one scrape when some of
the series have changed since the last one. Both libraries take turns in one thread. Their output is compared by parsing
it, so that both are known to say the same. What it does not show: several threads that write, which only
`prometheus_client` supports.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from penstock.bench import report
from penstock.bench.stats import median
from penstock.errors import PenstockError
from penstock.telemetry.exposition import MetricRegistry

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LABELS = ("model", "tenant")


@dataclass(frozen=True, slots=True)
class ExpositionBenchSettings:
    series: int = 1000
    """Label combinations of one counter and one histogram."""
    changed: float = 0.05
    """The part of them that changes between two scrapes."""
    updates: int = 100_000
    scrapes: int = 20
    rounds: int = 5


class Side(Protocol):
    """A counter and a histogram in one library, with an update of each by label combination."""

    @property
    def count(self) -> Sequence[Callable[[], None]]: ...

    @property
    def observe(self) -> Sequence[Callable[[float], None]]: ...

    def scrape(self) -> bytes: ...


class Ours:
    def __init__(self, series: int) -> None:
        self._registry = MetricRegistry()
        counter = self._registry.counter("bench_requests_total", "Requests.", LABELS)
        histogram = self._registry.histogram("bench_seconds", "Seconds.", BOUNDS, LABELS)
        self.count = [counter.child("m", f"t{number}").inc for number in range(series)]
        self.observe = [histogram.child("m", f"t{number}").observe for number in range(series)]

    def scrape(self) -> bytes:
        return self._registry.render()


class PrometheusClient:
    def __init__(self, series: int) -> None:
        import prometheus_client as library
        from prometheus_client import exposition

        self._registry = library.CollectorRegistry()
        self._render = exposition.generate_latest
        counter = library.Counter("bench_requests", "Requests.", LABELS, registry=self._registry)
        histogram = library.Histogram("bench_seconds", "Seconds.", LABELS, buckets=BOUNDS, registry=self._registry)
        self.count = [counter.labels("m", f"t{number}").inc for number in range(series)]
        self.observe = [histogram.labels("m", f"t{number}").observe for number in range(series)]

    def scrape(self) -> bytes:
        return self._render(self._registry)


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What a scrape says, without when series were created."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def update(side: Side, updates: int) -> float:
    """Nanoseconds of one update: half of them counts, half observations."""
    counts, observations = side.count, side.observe
    size = len(counts)
    begin = time.perf_counter()
    for number in range(updates // 2):
        counts[number % size]()
        observations[number % size](0.03)
    return (time.perf_counter() - begin) / (updates // 2 * 2) * 1e9


def scrape(side: Side, scrapes: int, changed: int) -> float:
    """Milliseconds of one scrape."""
    spent, size = 0.0, len(side.count)
    for turn in range(scrapes):
        for number in range(changed):
            side.count[(turn * changed + number) % size]()
            side.observe[(turn * changed + number) % size](0.2)
        begin = time.perf_counter()
        side.scrape()
        spent += time.perf_counter() - begin
    return spent / scrapes * 1e3


def measure(settings: ExpositionBenchSettings) -> dict[str, dict[str, list[float]]]:
    sides: dict[str, Side] = {"penstock": Ours(settings.series), "prometheus_client": PrometheusClient(settings.series)}
    results = {name: {"update_ns": list[float](), "scrape_ms": list[float]()} for name in sides}
    changed = max(1, round(settings.series * settings.changed))
    for turn in range(settings.rounds + 1):  # the first is a warm-up and not counted
        for name, side in sides.items():
            figures = update(side, settings.updates), scrape(side, settings.scrapes, changed)
            if turn:
                results[name]["update_ns"].append(figures[0])
                results[name]["scrape_ms"].append(figures[1])
    ours, theirs = (samples(side.scrape()) for side in sides.values())
    if ours.keys() != theirs.keys() or any(abs(ours[key] - theirs[key]) > 1e-6 * abs(ours[key]) for key in ours):
        raise PenstockError("the two libraries do not say the same")
    return results


def main(settings: ExpositionBenchSettings, json_file: Path | None, console: Console) -> None:
    results = measure(settings)
    console.print(report.machine_line(), highlight=False)
    combinations = f"{settings.series:,} label combinations"
    title = f"A counter and a histogram, {combinations}, {settings.changed:.0%} change per scrape"
    table = report.table(title, "", "ns per update", "/ ours", "ms per scrape", "/ ours")
    medians: dict[str, Any] = {
        name: (median(figures["update_ns"]) or 0.0, median(figures["scrape_ms"]) or 0.0)
        for name, figures in results.items()
    }
    update_ns, scrape_ms = medians["penstock"]
    for name, (theirs_ns, theirs_ms) in medians.items():
        row = report.number(theirs_ns, 0), report.number(theirs_ns / update_ns, 1)
        table.add_row(name, *row, report.number(theirs_ms, 2), report.number(theirs_ms / scrape_ms, 1))
    console.print(table)
    if json_file is not None:
        report.write_json(json_file, "exposition", dataclasses.asdict(settings), results)
