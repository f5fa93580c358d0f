"""`penstock bench scrape`: what scraping `/metrics` costs a gateway under load, in tokens per second.

A synthetic engine behind the real protocol takes no time for a token, so the gateway limits the streams: with a real
model scraping costs a smaller share. Each round runs the same requests without a scraper, then with one (A B A B). The
scraper is a process of its own and reads whole answers as OpenMetrics, as Prometheus does. Requests name features in
turn, each of which is a series of its own: 1,000 is where `telemetry.most_series` ends.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from penstock.bench import arrivals, report
from penstock.bench.gateway.harness import MODEL, VOCABULARY, Gateway, cpu_seconds, gateway
from penstock.bench.gateway.scraper import ACCEPT
from penstock.bench.load import LoadGenerator, run_loop
from penstock.bench.stats import median, percentiles
from penstock.bench.wire import Target
from penstock.errors import PenstockError
from penstock.interpreter import module

LEAST_RATIO = 0.95
"""What must be left of the tokens per second."""
PROMPT = 32
SCRAPER = "penstock.bench.gateway.scraper"


@dataclass(frozen=True, slots=True)
class ScrapeBenchSettings:
    every: float = 0.05
    """Seconds between two scrapes."""
    streams: int = 64
    """Requests in flight."""
    tokens: int = 128
    """Of each request."""
    requests: int = 2048
    """Of each turn."""
    features: int = 10
    rounds: int = 3
    """Turns of each side."""
    workers: int = 1
    """Gateway processes."""


async def tokens_per_second(running: Gateway, settings: ScrapeBenchSettings, seed: int) -> float:
    load = LoadGenerator(Target.parse(running.url, None), MODEL, VOCABULARY)
    requests = [
        replace(ready, body=ready.body[:-1] + b',"metadata":{"feature":"f%d"}}' % (index % settings.features))
        for index, ready in enumerate(load.ready(arrivals.closed(settings.requests, PROMPT, settings.tokens), seed))
    ]
    tally = await load.closed(requests, settings.streams, lambda: None)
    if tally.errors:
        raise PenstockError(f"requests failed: {dict(tally.errors)}")
    return tally.output_tokens / tally.seconds


def measure(settings: ScrapeBenchSettings, console: Console) -> dict[str, Any]:
    without: list[float] = []
    scraped: list[float] = []
    times: list[float] = []
    busy, size = 0.0, 0
    with (
        tempfile.TemporaryDirectory(prefix="ps-") as name,
        gateway(Path(name), interval_s=0.0, workers=settings.workers, settings={}) as running,
    ):
        run_loop(tokens_per_second(running, settings, seed=0))  # warm-up; makes every series, too
        idle = cpu_seconds(running.workers)
        for _ in range(100):
            size = len(httpx.get(f"{running.url}/metrics", headers={"accept": ACCEPT}).content)
        busy = (cpu_seconds(running.workers) - idle) / 100
        for number in range(settings.rounds):
            without.append(run_loop(tokens_per_second(running, settings, seed=2 * number + 1)))
            command = [*module(SCRAPER), str(running.port), str(settings.every)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as scraper:
                assert scraper.stdout is not None
                scraper.stdout.readline()  # it is up: its start is not part of what is measured
                try:
                    scraped.append(run_loop(tokens_per_second(running, settings, seed=2 * number + 2)))
                finally:
                    scraper.terminate()
                lines = [json.loads(line) for line in scraper.communicate()[0].splitlines()]
            times += [line["ms"] for line in lines]
            if lines:  # a short round may end before the first scrape
                size = lines[-1]["bytes"]
            turn = f"round {number + 1}: {without[-1]:,.0f} tokens/s without, {scraped[-1]:,.0f}"
            console.print(f"{turn} with {len(lines)} scrapes", highlight=False)
    return {
        "tokens_per_s_without": median(without),
        "tokens_per_s_with": median(scraped),
        "ratio": median([b / a for a, b in zip(without, scraped, strict=True)]),
        "scrape_ms": found.as_dict() if (found := percentiles(times)) else None,
        "scrapes": len(times),
        "bytes": size,
        "gateway_cpu_ms_per_scrape": busy * 1000,
    }


def show(results: dict[str, Any], settings: ScrapeBenchSettings, console: Console) -> bool:
    table = Table(box=None, pad_edge=False)
    for column in ("", "tokens/s"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("not scraped", f"{results['tokens_per_s_without']:,.0f}")
    table.add_row(f"scraped every {settings.every * 1000:g} ms", f"{results['tokens_per_s_with']:,.0f}")
    console.print(table)
    took = results["scrape_ms"]
    times = "none was taken" if took is None else f"p50 {took['p50']:.1f} ms, p99 {took['p99']:.1f} ms"
    console.print(f"a scrape under load: {times}; {results['bytes']:,.0f} bytes", highlight=False)
    console.print(f"idle, it costs the gateway {results['gateway_cpu_ms_per_scrape']:.2f} ms of CPU", highlight=False)
    good = bool(results["ratio"] >= LEAST_RATIO)
    verdict = f"{'yes' if good else 'NO '}  at least {LEAST_RATIO:.0%} of the tokens per second are left"
    console.print(f"{verdict}: {results['ratio']:.1%}", highlight=False)
    return good


def main(settings: ScrapeBenchSettings, json_file: Path | None, console: Console) -> bool:
    """Measures, prints, and says whether enough tokens per second are left."""
    results = measure(settings, console)
    console.print(report.machine_line(), highlight=False)
    good = show(results, settings, console)
    if json_file is not None:
        report.write_json(json_file, "scrape", dataclasses.asdict(settings), results)
    return good
