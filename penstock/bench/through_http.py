"""`penstock bench http`: how much of the offline speed is left through HTTP, and where the rest goes.

A server is started for the purpose and runs the workloads in turn with the offline engine, which is a process of its
own each time: both sides have the whole machine to themselves, the load generator included on the server's side. Beside
the ratio are the CPU seconds that engine, gateway and load generator spend per thousand tokens (on Linux).
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.bench import report, serve, stats, workloads
from penstock.bench.engine import BenchError
from penstock.bench.load import run_loop
from penstock.bench.wire import Connection, Target, WireError
from penstock.bench.workloads import Workload
from penstock.interpreter import module

ROLES = ("engine", "gateway")
_START_S = 300.0
_STOP_S = 45.0
_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True)
class ThroughHttpBenchSettings:
    model: str = "smollm2-135m"
    device: str = "auto"
    repeat: int = 3


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of a workload on each side."""

    offline_tps: float
    http_tps: float
    cpu_s: dict[str, float]
    """By role, and of the load generator, per thousand output tokens."""

    @property
    def ratio(self) -> float:
        return self.http_tps / self.offline_tps


@contextmanager
def _server(settings: ThroughHttpBenchSettings, folder: Path) -> Iterator[tuple[str, int]]:
    """Address and process id of a server that is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    log = folder / "log"
    command = [
        *(*module("penstock"), "serve", settings.model, "--host", "127.0.0.1", "--port", str(port)),
        *("--device", settings.device, "--log-level", "warning", "--set", f"store.url=sqlite:///{folder}/store.db"),
        *("--set", "generation.time_limit_s=3600"),  # a slow machine must be able to finish its requests too
    ]
    with log.open("wb") as output:
        # In an empty folder: a configuration file in the current one must not be picked up.
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=_environment())
    try:
        if not asyncio.run(_becomes_ready(Target.parse(f"http://127.0.0.1:{port}", None), process)):
            raise BenchError(f"the server did not become ready:\n{log.read_text()[-2000:]}")
        yield f"http://127.0.0.1:{port}", process.pid
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
        *(*module("penstock"), "bench", "engine", "-w", workload.name, "--model", settings.model),
        *("--device", settings.device, "--json", str(found)),
    ]
    ended = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, check=False)
    if ended.returncode:
        raise BenchError(f"the offline engine failed:\n{ended.stdout[-1000:]}{ended.stderr[-1000:]}")
    (result,) = json.loads(found.read_text())["results"]
    return float(result["median"]["output_tps"])


def _through_http(
    workload: Workload, url: str, server: int, turn: int, quiet: Console
) -> tuple[float, dict[str, float]]:
    """Output tokens per second of the server, and CPU seconds per thousand tokens by role."""
    assert workload.concurrency is not None
    load = serve.ServeBenchSettings(
        url=url,
        concurrency=workload.concurrency,
        requests=workload.requests,
        input_len=workload.input_len[0],
        output_len=workload.output_len[0],
        temperature=workload.temperature,
        seed=1 + turn,
        timeout_s=3600.0,
    )
    before = _cpu_seconds(server) | {"client": time.process_time()}
    _, tally = run_loop(serve.measure(load, None, quiet))
    after = _cpu_seconds(server) | {"client": time.process_time()}
    if tally.errors:
        raise BenchError(f"requests of workload {workload.name} failed: {next(iter(tally.errors))}")
    spent = {role: 1e3 * (after[role] - before[role]) / tally.output_tokens for role in after}
    return tally.output_tokens / tally.seconds, spent


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
    for workload in chosen:
        if workload.concurrency is None:
            raise BenchError(f"workload {workload.name} is not a closed loop; c1, c8, c16, c32 and c64 are")
    turns: dict[str, list[Turn]] = {workload.name: [] for workload in chosen}
    quiet = Console(stderr=True, quiet=True)
    with tempfile.TemporaryDirectory() as name, _server(settings, Path(name)) as (url, pid):
        console.print(f"[bold]{settings.model}[/bold]: {report.machine_line()}")
        for turn in range(settings.repeat):
            for workload in chosen:
                with console.status(f"{workload.name}: turn {turn + 1} of {settings.repeat}, offline"):
                    offline = _offline(settings, workload, Path(name))
                with console.status(f"{workload.name}: turn {turn + 1} of {settings.repeat}, through HTTP"):
                    turns[workload.name].append(Turn(offline, *_through_http(workload, url, pid, turn, quiet)))
    _show(turns, settings, console)
    if json_file is not None:
        results: list[dict[str, Any]] = [
            {"workload": name, "turns": [dataclasses.asdict(turn) for turn in of_it]} for name, of_it in turns.items()
        ]
        report.write_json(json_file, "http", dataclasses.asdict(settings), results)


def _show(turns: dict[str, list[Turn]], settings: ThroughHttpBenchSettings, console: Console) -> None:
    runs = f"medians of {settings.repeat} turns" if settings.repeat > 1 else "one turn"
    roles = (*ROLES, "client")
    columns = ("workload", "offline tok/s", "HTTP tok/s", "HTTP/offline", *(f"{role} CPU ms/token" for role in roles))
    rows = report.table(f"Offline and through HTTP, {runs}", *columns)
    for name, of_it in turns.items():
        costs = [stats.median(turn.cpu_s[role] for turn in of_it if role in turn.cpu_s) for role in roles]
        rows.add_row(
            name,
            report.number(stats.median(turn.offline_tps for turn in of_it)),
            report.number(stats.median(turn.http_tps for turn in of_it)),
            report.share(stats.median(turn.ratio for turn in of_it)),
            *(report.number(cost, 3) for cost in costs),
        )
    console.print(rows)
    console.print(
        "The load generator shares the machine with the server, and its CPU time is part of what HTTP costs here.",
        style="dim",
    )
