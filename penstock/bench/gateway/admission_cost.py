"""`penstock bench admission-cost`: what the admission queue costs a gateway while nobody has to wait.

Two gateways in front of synthetic engines that take no time, one with `admission.enabled: false`; each turn sends the
same short requests to one, then to the other (A B B A ...). What is compared is the CPU time of the gateway process:
on a busy machine it says more than requests per second.
"""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from penstock.bench import arrivals, report
from penstock.bench.gateway.harness import MODEL, VOCABULARY, Gateway, cpu_seconds, gateway
from penstock.bench.load import LoadGenerator, run_loop
from penstock.bench.stats import median
from penstock.bench.wire import Target
from penstock.errors import PenstockError


@dataclass(frozen=True, slots=True)
class AdmissionCostBenchSettings:
    streams: int = 16
    """Requests in flight."""
    prompt: int = 256
    """Tokens of each prompt."""
    requests: int = 1000
    """Of each turn."""
    rounds: int = 4
    """Turns of each side."""


async def cpu_per_request(running: Gateway, settings: AdmissionCostBenchSettings, seed: int) -> float:
    """Seconds."""
    load = LoadGenerator(Target.parse(running.url, None), MODEL, VOCABULARY)
    requests = load.ready(arrivals.closed(settings.requests, settings.prompt, 1), seed)
    before = cpu_seconds(running.workers)
    tally = await load.closed(requests, settings.streams, lambda: None)
    if tally.errors:
        raise PenstockError(f"requests failed: {dict(tally.errors)}")
    return (cpu_seconds(running.workers) - before) / settings.requests


def measure(settings: AdmissionCostBenchSettings) -> dict[str, list[float]]:
    """CPU seconds per request of every turn, with the queue and without."""
    figures: dict[str, list[float]] = {"queue": [], "no queue": []}
    with (
        tempfile.TemporaryDirectory(prefix="ps-") as one,
        tempfile.TemporaryDirectory(prefix="ps-") as other,
        gateway(Path(one), interval_s=0.0, workers=1, settings={}) as queued,
        gateway(Path(other), interval_s=0.0, workers=1, settings={"admission": {"enabled": False}}) as bare,
    ):
        sides = {"queue": queued, "no queue": bare}
        for side in sides.values():
            run_loop(cpu_per_request(side, settings, seed=0))  # warm-up
        for number in range(settings.rounds):
            for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
                figures[name].append(run_loop(cpu_per_request(sides[name], settings, seed=number + 1)))
    return figures


def main(settings: AdmissionCostBenchSettings, json_file: Path | None, console: Console) -> None:
    figures = measure(settings)
    queued, bare = median(figures["queue"]), median(figures["no queue"])
    assert queued is not None and bare is not None
    console.print(report.machine_line(), highlight=False)
    console.print(
        f"CPU of the gateway per request: {queued * 1e6:,.0f} us with the queue, {bare * 1e6:,.0f} us without; "
        f"ratio {queued / bare:.3f}",
        highlight=False,
    )
    if json_file is not None:
        report.write_json(json_file, "admission-cost", dataclasses.asdict(settings), figures)
