"""What scraping `/metrics` every 50 ms costs a gateway under load: tokens per second with and without, in turn.

    python bench/scrape.py
    python bench/scrape.py --features 1000 --workers 2 --json scrape.json

A synthetic engine behind the real protocol takes no time for a token, so the gateway is what limits the streams: with a
real model the share is smaller. Each round runs the same requests without a scraper, then with one (A B A B); the
scraper is a process of its own and reads whole answers, as Prometheus does, as OpenMetrics. `--features` gives requests
that many features in turn, so that every one of them is a series of its own: 1,000 is where `telemetry.most_series`
ends.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
from gateway_harness import MODEL, Gateway, cpu_seconds, gateway
from rich.console import Console
from rich.table import Table

from penstock.bench import report
from penstock.bench.serve import Load, Settings
from penstock.bench.stats import median, percentiles
from penstock.bench.wire import Target

LEAST_RATIO = 0.95
"""What must be left of the tokens per second."""
ACCEPT = "application/openmetrics-text"
BYTES = 256


def scrape_for_ever(port: int, every_s: float) -> None:
    """The scraper: one line of JSON per scrape, until it is ended. A bare connection, to cost the machine little."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    due = time.monotonic()
    while True:
        begin = time.perf_counter()
        connection.request("GET", "/metrics", headers={"accept": ACCEPT})
        size = len(connection.getresponse().read())
        print(json.dumps({"ms": (time.perf_counter() - begin) * 1000, "bytes": size}), flush=True)
        due = max(due + every_s, time.monotonic() - every_s)
        time.sleep(max(0.0, due - time.monotonic()))


async def tokens_per_second(running: Gateway, options: argparse.Namespace, seed: int) -> float:
    settings = Settings(url=running.url, concurrency=options.streams, output_len=options.tokens, input_len=32)
    load = Load(settings, Target.parse(running.url, None), MODEL, BYTES)
    bodies = [
        body[:-1] + b',"metadata":{"feature":"f%d"}}' % (index % options.features)
        for index, body in enumerate(load.bodies(options.requests, 32, options.tokens, seed))
    ]
    tally = await load.run(bodies, options.tokens, lambda: None)
    if tally.errors:
        raise SystemExit(f"requests failed: {dict(tally.errors)}")
    return tally.output_tokens / tally.seconds


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    without: list[float] = []
    scraped: list[float] = []
    times: list[float] = []
    busy = size = 0.0
    with (
        tempfile.TemporaryDirectory(prefix="ps-") as name,
        gateway(Path(name), interval_s=0.0, workers=options.workers, settings={}) as running,
    ):
        asyncio.run(tokens_per_second(running, options, seed=0))  # warm-up; makes every series, too
        idle = cpu_seconds(running.workers)
        for _ in range(100):
            httpx.get(f"{running.url}/metrics", headers={"accept": ACCEPT})
        busy = (cpu_seconds(running.workers) - idle) / 100
        for number in range(options.rounds):
            without.append(asyncio.run(tokens_per_second(running, options, seed=2 * number + 1)))
            command = [sys.executable, __file__, "--scraper", str(running.port), "--every", str(options.every)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as scraper:
                assert scraper.stdout is not None
                scraper.stdout.readline()  # it is up: its start is not part of what is measured
                try:
                    scraped.append(asyncio.run(tokens_per_second(running, options, seed=2 * number + 2)))
                finally:
                    scraper.terminate()
                lines = [json.loads(line) for line in scraper.communicate()[0].splitlines()]
            times += [line["ms"] for line in lines]
            size = lines[-1]["bytes"]
            turn = f"round {number + 1}: {without[-1]:,.0f} tokens/s without, {scraped[-1]:,.0f}"
            console.print(f"{turn} with {len(lines)} scrapes", highlight=False)
    return {
        "tokens_per_s_without": median(without),
        "tokens_per_s_with": median(scraped),
        "ratio": median([b / a for a, b in zip(without, scraped, strict=True)]),
        "scrape_ms": msgspec.to_builtins(percentiles(times)),
        "scrapes": len(times),
        "bytes": size,
        "gateway_cpu_ms_per_scrape": busy * 1000,
    }


def show(results: dict[str, Any], options: argparse.Namespace, console: Console) -> bool:
    table = Table(box=None, pad_edge=False)
    for column in ("", "tokens/s"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("not scraped", f"{results['tokens_per_s_without']:,.0f}")
    table.add_row(f"scraped every {options.every * 1000:g} ms", f"{results['tokens_per_s_with']:,.0f}")
    console.print(table)
    took = results["scrape_ms"]
    times = f"p50 {took['p50']:.1f} ms, p99 {took['p99']:.1f} ms"
    console.print(f"a scrape under load: {times}; {results['bytes']:,.0f} bytes", highlight=False)
    console.print(f"idle, it costs the gateway {results['gateway_cpu_ms_per_scrape']:.2f} ms of CPU", highlight=False)
    good = bool(results["ratio"] >= LEAST_RATIO)
    verdict = f"{'yes' if good else 'NO '}  at least {LEAST_RATIO:.0%} of the tokens per second are left"
    console.print(f"{verdict}: {results['ratio']:.1%}", highlight=False)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=float, default=0.05, help="seconds between two scrapes")
    parser.add_argument("--streams", type=int, default=64, help="streams at one time")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each")
    parser.add_argument("--requests", type=int, default=2048, help="requests of each turn")
    parser.add_argument("--features", type=int, default=10, help="features, each a series of its own")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--workers", type=int, default=1, help="gateway processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--scraper", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scraper:
        scrape_for_ever(options.scraper, options.every)
    console = Console()
    results = measure(options, console)
    console.print(report.machine_line(), highlight=False)
    good = show(results, options, console)
    if options.json is not None:
        settings = {key: value for key, value in vars(options).items() if key not in ("json", "scraper")}
        report.write_json(options.json, "scrape", settings, results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
