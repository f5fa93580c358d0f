"""What the admission queue costs a gateway while nobody has to wait: CPU per request with it and without, in turn.

    python bench/admission_cost.py

Two gateways in front of synthetic engines that take no time, one with `admission.enabled: false`; each turn sends the
same short requests to one, then to the other (A B B A ...). CPU time of the gateway process, not of the client: on a
busy machine it says more than requests per second.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from gateway_harness import MODEL, Gateway, cpu_seconds, gateway
from rich.console import Console

from penstock.bench import report
from penstock.bench.serve import Load, Settings
from penstock.bench.stats import median
from penstock.bench.wire import Target

BYTES = 256


async def cpu_per_request(running: Gateway, options: argparse.Namespace, seed: int) -> float:
    """Seconds."""
    settings = Settings(url=running.url, concurrency=options.streams, output_len=1, input_len=options.prompt)
    load = Load(settings, Target.parse(running.url, None), MODEL, BYTES)
    bodies = list(load.bodies(options.requests, options.prompt, 1, seed))
    before = cpu_seconds(running.workers)
    tally = await load.run(bodies, 1, lambda: None)
    if tally.errors:
        raise SystemExit(f"requests failed: {dict(tally.errors)}")
    return (cpu_seconds(running.workers) - before) / options.requests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16, help="requests at one time")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--requests", type=int, default=1000, help="requests of each turn")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each side")
    options = parser.parse_args()
    console = Console()
    figures: dict[bool, list[float]] = {True: [], False: []}
    with (
        tempfile.TemporaryDirectory(prefix="ps-") as one,
        tempfile.TemporaryDirectory(prefix="ps-") as other,
        gateway(Path(one), interval_s=0.0, workers=1, settings={}) as queued,
        gateway(Path(other), interval_s=0.0, workers=1, settings={"admission": {"enabled": False}}) as bare,
    ):
        sides = {True: queued, False: bare}
        for side in sides.values():
            asyncio.run(cpu_per_request(side, options, seed=0))  # warm-up
        for number in range(options.rounds):
            for enabled in (True, False) if number % 2 == 0 else (False, True):
                figures[enabled].append(asyncio.run(cpu_per_request(sides[enabled], options, seed=number + 1)))
    ours, without = median(figures[True]), median(figures[False])
    assert ours is not None and without is not None
    console.print(report.machine_line(), highlight=False)
    console.print(
        f"CPU of the gateway per request: {ours * 1e6:,.0f} us with the queue, {without * 1e6:,.0f} us without"
    )
    console.print(f"ratio {ours / without:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
