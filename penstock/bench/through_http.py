"""`penstock bench http`: how much of the offline speed is left through HTTP, and where the rest goes.

A server is started for the purpose and runs the workloads in turn with the offline engine, which is a process of its
own each time: both sides have the whole machine to themselves, the load generator included on the server's side. Beside
the ratio are the CPU seconds that engine, gateway and load generator spend per thousand tokens (on Linux), and what the
clients saw. With a shape the server gets a folder of random weights. Rates are open loops with a workload's lengths.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.bench import arrivals, report, serve, stats, workloads
from penstock.bench.arrivals import Planned
from penstock.bench.engine import BenchError
from penstock.bench.load import run_loop
from penstock.bench.wire import Connection, Target, WireError
from penstock.bench.workloads import Workload
from penstock.interpreter import module

ROLES = ("engine", "gateway")
_START_S = 300.0
_STOP_S = 45.0
_PAUSE_S = 0.1
_SETTLE_S = 5.0
"""An engine uses its first idle seconds to prepare further steps."""
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


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers."""

    url: str
    pid: int
    ready_s: float
    """From the start of its process until it was ready."""
    first_answer_s: float
    """The same until the first token of its first answer had come."""


@contextmanager
def _server(settings: ThroughHttpBenchSettings, model: str, folder: Path) -> Iterator[Running]:
    """A server that is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    log = folder / "log"
    command = [
        *(*module("penstock"), "serve", model, "--host", "127.0.0.1", "--port", str(port)),
        *("--device", settings.device, "--log-level", "warning", "--set", f"store.url=sqlite:///{folder}/store.db"),
        *("--set", "generation.time_limit_s=3600"),  # a slow machine must be able to finish its requests too
        *("--set", "server.console=false"),
        *(word for setting in settings.serve for word in ("--set", setting)),
    ]
    began = time.monotonic()
    with log.open("wb") as output:
        # In an empty folder: a configuration file in the current one must not be picked up.
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=_environment())
    try:
        if not asyncio.run(_becomes_ready(Target.parse(f"http://127.0.0.1:{port}", None), process)):
            raise BenchError(f"the server did not become ready:\n{log.read_text()[-2000:]}")
        ready_s, url = time.monotonic() - began, f"http://127.0.0.1:{port}"
        load = serve.ServeBenchSettings(url=url, concurrency=1, requests=1, input_len=16, output_len=1, warm_up=0)
        _, tally = run_loop(serve.measure(load, None, Console(stderr=True, quiet=True)))
        if tally.errors:
            raise BenchError(f"the server does not answer: {next(iter(tally.errors))}\n{log.read_text()[-2000:]}")
        answered_s = time.monotonic() - began
        time.sleep(_SETTLE_S)
        yield Running(url, process.pid, ready_s, answered_s)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    """Ours, and the same code where it was found through the current folder."""
    paths = [os.path.abspath(path) for path in sys.path if path or "penstock" in os.listdir()]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


async def _becomes_ready(target: Target, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        connection = Connection(target)
        try:
            await connection.request("GET", "/health/ready")
            return True
        except (WireError, OSError):
            await asyncio.sleep(_PAUSE_S)  # not yet
        finally:
            await connection.close()
    return False


def _offline(settings: ThroughHttpBenchSettings, workload: Workload, folder: Path) -> float:
    """Output tokens per second of the engine alone, in a process of its own."""
    found = folder / "offline.json"
    command = [
        *(*module("penstock"), "bench", "engine", "-w", workload.name, "--device", settings.device),
        *("--json", str(found)),
        *(("--shape", settings.shape) if settings.shape else ("--model", settings.model)),
    ]
    ended = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, check=False)
    if ended.returncode:
        raise BenchError(f"the offline engine failed:\n{ended.stdout[-1000:]}{ended.stderr[-1000:]}")
    (result,) = json.loads(found.read_text())["results"]
    return float(result["median"]["output_tps"])


def _through_http(
    workload: Workload, running: Running, turn: int, quiet: Console, offline: float | None, rate: float | None = None
) -> Turn:
    """What the server does, and CPU seconds per thousand tokens by role."""
    load = serve.ServeBenchSettings(
        url=running.url,
        concurrency=workload.concurrency or workload.requests,
        temperature=workload.temperature,
        rate=rate,
        seed=zlib.crc32(f"{workload.name} {rate} {turn}".encode()),  # no two runs share prefixes
        timeout_s=3600.0,
        warm_up=0 if turn else None,
    )
    before = _cpu_seconds(running.pid) | {"client": time.process_time()}
    _, tally = run_loop(serve.measure(load, None, quiet, _plan(workload, rate)))
    after = _cpu_seconds(running.pid) | {"client": time.process_time()}
    if tally.errors:
        raise BenchError(f"requests of workload {workload.name} failed: {next(iter(tally.errors))}")
    spent = {role: 1e3 * (after[role] - before[role]) / tally.output_tokens for role in after}
    ttft, gap = stats.percentiles(tally.ttft), stats.percentiles(tally.gaps)
    return Turn(offline, tally.output_tokens / tally.seconds, spent, ttft, gap)


def _plan(workload: Workload, rate: float | None) -> list[Planned]:
    lengths = list(workload.lengths())
    if rate is None:
        return [Planned(0.0, *ends) for ends in lengths]
    due = arrivals.at_rate(rate, "poisson", len(lengths), 1, 1)
    return [Planned(planned.at, *ends) for planned, ends in zip(due, lengths, strict=True)]


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
        model = settings.model if settings.shape is None else _random_model(settings.shape, folder, console)
        with _server(settings, model, folder) as running:
            console.print(f"[bold]{label}[/bold]: {report.machine_line()}")
            console.print(
                f"The server was ready after {running.ready_s:.1f} s, its first answer came after "
                f"{running.first_answer_s:.1f} s."
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
        start = {"ready_s": running.ready_s, "first_answer_s": running.first_answer_s}
        report.write_json(json_file, "http", dataclasses.asdict(settings) | {"start": start}, results)


def _random_model(shape: str, folder: Path, console: Console) -> str:
    """Write its folder."""
    from penstock.bench import random_model

    with report.progress_bar(console) as bar:
        task = bar.add_task(f"writing {shape} with random weights", total=None)
        random_model.write(folder / shape, shape, lambda done, total: bar.update(task, completed=done, total=total))
    return str(folder / shape)


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
