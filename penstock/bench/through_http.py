"""`penstock bench http`: how much of the offline speed is left through HTTP, and where the rest goes.

A server is started for the purpose and runs the workloads in turn with the offline engine, which is a process of its
own each time: both sides have the whole machine to themselves, the load generator included on the server's side. Beside
the ratio are the CPU seconds that engine, gateway and load generator spend per thousand tokens (on Linux), and what the
clients saw. With a shape the server gets a folder of random weights. Rates are open loops with a workload's lengths.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.bench import report, serve, stats, workloads
from penstock.bench.engine import BenchError
from penstock.bench.load import run_loop
from penstock.bench.served import Running, environment, random_model, server
from penstock.bench.workloads import Workload
from penstock.interpreter import module

ROLES = ("engine", "gateway")
_SHOWN = ("p50", "p99")


@dataclass(frozen=True, slots=True)
class ThroughHttpBenchSettings:
    model: str = "smollm2-135m"
    device: str = "auto"
    repeat: int = 3
    shape: str | None = None
    """Random weights instead of a model."""
    offline: bool = True
    """Run the engine alone, too."""
    rates: tuple[float, ...] = ()
    """Open loops, requests per second."""
    lengths: str = "mix"
    """The workload whose lengths they have."""
    serve: tuple[str, ...] = ()
    """Further settings of the server, `key=value`."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of a workload on each side."""

    offline_tps: float | None
    """None: not run."""
    http_tps: float
    cpu_s: dict[str, float]
    """By role, and of the load generator, per thousand output tokens."""
    ttft: stats.Percentiles | None = None
    gap: stats.Percentiles | None = None
    """Seconds, as the clients saw them."""

    @property
    def ratio(self) -> float | None:
        return None if self.offline_tps is None else self.http_tps / self.offline_tps


def _offline(settings: ThroughHttpBenchSettings, workload: Workload, folder: Path) -> float:
    """Output tokens per second of the engine alone, in a process of its own."""
    found = folder / "offline.json"
    command = [
        *(*module("penstock"), "bench", "engine", "-w", workload.name, "--device", settings.device),
        *("--json", str(found)),
        *(("--shape", settings.shape) if settings.shape else ("--model", settings.model)),
    ]
    ended = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    if ended.returncode:
        raise BenchError(f"the offline engine failed:\n{ended.stdout[-1000:]}{ended.stderr[-1000:]}")
    (result,) = json.loads(found.read_text())["results"]
    return float(result["median"]["output_tps"])


def _through_http(
    workload: Workload, running: Running, turn: int, quiet: Console, offline: float | None, rate: float | None = None
) -> Turn:
    """What the server does, and CPU seconds per thousand tokens by role."""
    load, plan = serve.of_workload(workload, rate, str(turn))
    load = dataclasses.replace(load, url=running.url, warm_up=0 if turn else None)
    before = _cpu_seconds(running.pid) | {"client": time.process_time()}
    _, tally = run_loop(serve.measure(load, None, quiet, plan))
    after = _cpu_seconds(running.pid) | {"client": time.process_time()}
    if tally.errors:
        raise BenchError(f"requests of workload {workload.name} failed: {next(iter(tally.errors))}")
    spent = {role: 1e3 * (after[role] - before[role]) / tally.output_tokens for role in after}
    ttft, gap = stats.percentiles(tally.ttft), stats.percentiles(tally.gaps)
    return Turn(offline, tally.output_tokens / tally.seconds, spent, ttft, gap)


def _cpu_seconds(server: int) -> dict[str, float]:
    """Spent so far by the server's processes, by role; empty where the system does not tell."""
    spent: dict[str, float] = {}
    listing = Path(f"/proc/{server}/task/{server}/children")
    if not listing.exists():
        return spent
    for child in listing.read_text().split():
        arguments = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        for role in ROLES:
            if role.encode() in arguments:
                seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                spent[role] = spent.get(role, 0.0) + seconds
    return spent


def main(settings: ThroughHttpBenchSettings, names: Sequence[str], json_file: Path | None, console: Console) -> None:
    chosen = [workloads.named(name) for name in names]
    open_loops = {f"{rate:g}/s": (workloads.named(settings.lengths), rate) for rate in settings.rates}
    turns: dict[str, list[Turn]] = {name: [] for name in (*names, *open_loops)}
    quiet = Console(stderr=True, quiet=True)
    label = settings.model if settings.shape is None else f"{settings.shape} (random weights)"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = settings.model if settings.shape is None else random_model(settings.shape, folder, console)
        with server(model, folder, device=settings.device, settings=settings.serve) as running:
            console.print(f"[bold]{label}[/bold]: {report.machine_line()}")
            console.print(
                f"The server was ready after {running.ready_s:.1f} s, its first answer came after "
                f"{running.first_answer_s:.1f} s. The engine's part: "
                + ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in running.phases.items()),
                highlight=False,
            )
            for turn in range(settings.repeat):
                where = f"turn {turn + 1} of {settings.repeat}"
                for workload in chosen:
                    offline = None
                    if settings.offline:
                        with console.status(f"{workload.name}: {where}, offline"):
                            offline = _offline(settings, workload, folder)
                    with console.status(f"{workload.name}: {where}, through HTTP"):
                        turns[workload.name].append(_through_http(workload, running, turn, quiet, offline))
                for loop, (workload, rate) in open_loops.items():
                    with console.status(f"{loop}: {where}"):
                        turns[loop].append(_through_http(workload, running, turn, quiet, None, rate))
    _show(turns, settings, console)
    if json_file is not None:
        results: list[dict[str, Any]] = [
            {"workload": name, "turns": [dataclasses.asdict(turn) for turn in of_it]} for name, of_it in turns.items()
        ]
        report.write_json(json_file, "http", dataclasses.asdict(settings) | {"start": running.start}, results)


def _show(turns: dict[str, list[Turn]], settings: ThroughHttpBenchSettings, console: Console) -> None:
    runs = f"medians of {settings.repeat} turns" if settings.repeat > 1 else "one turn"
    roles = (*ROLES, "client")
    columns = ("workload", "offline tok/s", "HTTP tok/s", "HTTP/offline", *(f"{role} CPU ms/token" for role in roles))
    rows = report.table(f"Offline and through HTTP, {runs}", *columns)
    seen = report.table("What clients saw, ms", "workload", "TTFT p50", "TTFT p99", "gap p50", "gap p99")
    for name, of_it in turns.items():
        costs = [stats.median(turn.cpu_s[role] for turn in of_it if role in turn.cpu_s) for role in roles]
        rows.add_row(
            name,
            report.number(stats.median(turn.offline_tps for turn in of_it if turn.offline_tps is not None)),
            report.number(stats.median(turn.http_tps for turn in of_it)),
            report.share(stats.median(turn.ratio for turn in of_it if turn.ratio is not None)),
            *(report.number(cost, 3) for cost in costs),
        )
        ttft = [turn.ttft for turn in of_it if turn.ttft is not None]
        gap = [turn.gap for turn in of_it if turn.gap is not None]
        shown = [stats.median(1e3 * getattr(one, at) for one in of_kind) for of_kind in (ttft, gap) for at in _SHOWN]
        seen.add_row(name, *(report.number(value) for value in shown))
    console.print(rows)
    console.print(seen)
    console.print(
        "The load generator shares the machine with the server, and its CPU time is part of what HTTP costs here.",
        style="dim",
    )
