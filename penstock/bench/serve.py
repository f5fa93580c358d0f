"""`penstock bench serve`: load on any OpenAI-compatible server, and what its users would have seen of it.

A closed loop keeps a number of requests in flight, which finds capacity; an open loop sends them when they are due,
which shows what happens at a given rate, whatever the server can do.
"""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.bench import arrivals, page, report, stats
from penstock.bench.arrivals import Pattern, Planned
from penstock.bench.goodput import Objectives
from penstock.bench.load import LoadGenerator, Tally, find_model, run_loop
from penstock.bench.wire import Target
from penstock.bench.workloads import Workload
from penstock.errors import PenstockError


@dataclass(frozen=True, slots=True)
class ServeBenchSettings:
    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    """The first of `/v1/models` when not set."""
    concurrency: int = 16
    """In flight, of a closed loop."""
    requests: int | None = None
    """Four per slot of a closed loop, 30 seconds' worth at a rate, all of a trace when not set."""
    input_len: int = 128
    output_len: int = 128
    rate: float | None = None
    """Requests per second: an open loop."""
    pattern: Pattern = "poisson"
    burst: int = 8
    trace: Path | None = None
    """An open loop, too: arrivals and lengths as recorded."""
    speed: float = 1.0
    """Of the trace."""
    most_in_flight: int = 1024
    """Of an open loop; a request beyond waits, and its time runs."""
    objectives: Objectives = field(default_factory=Objectives)
    temperature: float = 0.0
    seed: int = 0
    warm_up: int | None = None
    """Short requests before the clock starts; as many as `concurrency` when not set."""
    timeout_s: float = 300.0
    vocab_size: int | None = None

    @property
    def open_loop(self) -> bool:
        return self.rate is not None or self.trace is not None

    def plan(self) -> list[Planned]:
        if self.trace is not None:
            return arrivals.from_trace(self.trace, self.requests, speed=self.speed)
        lengths = self.input_len, self.output_len
        if self.rate is None:
            return arrivals.closed(self.requests or 4 * self.concurrency, *lengths)
        count = self.requests or max(1, round(30 * self.rate))
        return arrivals.at_rate(self.rate, self.pattern, count, *lengths, burst=self.burst, seed=self.seed)

    def describe(self, plan: list[Planned]) -> str:
        count = f"{len(plan)} requests"
        if self.trace is not None:
            return f"{count} of {self.trace.name} in {plan[-1].at:,.0f} s"
        lengths = f"{self.input_len} in / {self.output_len} out"
        if self.rate is None:
            return f"{self.concurrency} in flight, {count}, {lengths}"
        how = f"bursts of {self.burst}" if self.pattern == "burst" else self.pattern
        return f"{self.rate:g} requests/s ({how}), {count}, {lengths}"


def of_workload(workload: Workload, rate: float | None, salt: str) -> tuple[ServeBenchSettings, list[Planned]]:
    """A workload on a server, at a rate or as it is. The salt decides the prompts: no two runs share prefixes."""
    settings = ServeBenchSettings(
        concurrency=workload.concurrency or workload.requests,
        temperature=workload.temperature,
        rate=rate,
        seed=zlib.crc32(f"{workload.name} {rate} {salt}".encode()),
        timeout_s=3600.0,
    )
    return settings, arrivals.with_lengths(list(workload.lengths()), rate)


async def measure(
    settings: ServeBenchSettings, api_key: str | None, console: Console, plan: list[Planned] | None = None
) -> tuple[str, Tally]:
    """Send what is planned, `settings.plan()` when not given: the model's name, and what became of it."""
    plan = plan or settings.plan()
    target = Target.parse(settings.url, api_key)
    found = await find_model(target, settings.model, settings.vocab_size)
    name = found.name
    load = LoadGenerator(target, name, found.vocab_size, temperature=settings.temperature, timeout_s=settings.timeout_s)
    warm_up = settings.concurrency if settings.warm_up is None else settings.warm_up
    requests = load.ready(plan, settings.seed)
    with report.progress_bar(console) as bar:
        if warm_up:
            shortest = min(planned.input_len for planned in plan)
            short = load.ready(arrivals.closed(warm_up, min(32, shortest), 8), settings.seed + 1_000_003)
            task = bar.add_task("warm-up", total=warm_up)
            before = await load.closed(short, settings.concurrency, lambda: bar.advance(task))
            if before.errors and not before.served:
                raise PenstockError(f"every warm-up request failed: {next(iter(before.errors))}")
            bar.remove_task(task)
        task = bar.add_task(f"{name}: {settings.describe(plan)}", total=len(plan))
        if settings.open_loop:
            return name, await load.open(requests, settings.most_in_flight, lambda: bar.advance(task))
        return name, await load.closed(requests, settings.concurrency, lambda: bar.advance(task))


def figures(settings: ServeBenchSettings, tally: Tally) -> dict[str, Any]:
    """The figures of a run. Latencies in seconds."""
    rows = {
        "TTFT": stats.percentiles(tally.ttft),
        "ITL": stats.percentiles(tally.gaps),
        "TPOT": stats.percentiles(tally.per_token),
        "E2E": stats.percentiles(tally.latency),
    }
    succeeded, failed = len(tally.served), sum(tally.errors.values())
    results: dict[str, Any] = {
        "seconds": tally.seconds,
        "requests_per_s": succeeded / tally.seconds,
        "output_tps": tally.output_tokens / tally.seconds,
        "total_tps": (tally.prompt_tokens + tally.output_tokens) / tally.seconds,
        "succeeded": succeeded,
        "failed": failed,
        "late": tally.late,
        "cached_tokens": tally.cached_tokens,
        "errors": dict(tally.errors),
        "latency_s": {label: values.as_dict() if values else None for label, values in rows.items()},
    }
    if settings.objectives:
        met = settings.objectives.met(tally.served)
        results["goodput"] = {
            "objectives": str(settings.objectives),
            "requests_per_s": met / tally.seconds,
            "share": met / max(1, succeeded + failed),
        }
    return results


def main(
    settings: ServeBenchSettings, api_key: str | None, json_file: Path | None, html_file: Path | None, console: Console
) -> bool:
    """Runs, prints, and says whether every request succeeded."""
    plan = settings.plan()
    name, tally = run_loop(measure(settings, api_key, console, plan))
    results, notes = figures(settings, tally), warnings(settings, tally)
    title = f"{name} at {settings.url}: {settings.describe(plan)}"
    console.print(title, style="bold", highlight=False)
    console.print(_latencies(results))
    console.print(
        f"{report.number(results['output_tps'])} output tok/s, {report.number(results['total_tps'])} total tok/s, "
        f"{report.number(results['requests_per_s'], 2)} requests/s"
    )
    if "goodput" in results:
        good = results["goodput"]
        console.print(
            f"Goodput {report.number(good['requests_per_s'], 2)} requests/s: {report.share(good['share'])} of all "
            f"within {good['objectives']}"
        )
    console.print(f"{results['succeeded']} succeeded, {results['failed']} failed in {tally.seconds:.1f} s")
    for what, count in tally.errors.most_common(5):
        console.print(f"{count} x {what}", style="red", markup=False)
    for note in notes:
        console.print(note, style="yellow")
    facts = dataclasses.asdict(settings) | {"model": name, "trace": str(settings.trace) if settings.trace else None}
    if json_file is not None:
        report.write_json(json_file, "serve", facts, results)
    if html_file is not None:
        report.write_text(html_file, page.render(title, results, tally, notes))
        console.print(f"Report: {html_file}", highlight=False)
    return not tally.errors


def warnings(settings: ServeBenchSettings, tally: Tally) -> list[str]:
    """What a reader of the figures must know."""
    found = []
    if tally.late:
        found.append(
            f"{tally.late} requests were due while {settings.most_in_flight} were in flight and had to wait for one to "
            "end: the load was lower than asked for, their times count from when they were due."
        )
    if tally.cached_tokens:
        found.append(
            f"{tally.cached_tokens} prompt tokens came from the server's prefix cache (an earlier run with the "
            "same seed?): TTFT is flattered. Pass another --seed."
        )
    return found


def _latencies(results: dict[str, Any]) -> Any:
    latencies = report.table("", "ms", "p50", "p90", "p99", "mean", "max")
    for label, values in results["latency_s"].items():
        columns = ("p50", "p90", "p99", "mean", "largest")
        shown = [None if values is None else 1e3 * values[column] for column in columns]
        latencies.add_row(label, *(report.number(figure) for figure in shown))
    return latencies
