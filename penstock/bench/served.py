"""A server of our own that a benchmark starts, loads and stops again.

It runs in processes of its own with a store of its own; whatever ends the benchmark also stops it, but for
SIGKILL.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from penstock.bench import report, serve
from penstock.bench.engine import BenchError
from penstock.bench.load import run_loop
from penstock.bench.wire import Connection, Target, WireError
from penstock.interpreter import module

_START_S = 300.0
_STOP_S = 45.0
_PAUSE_S = 0.02
SETTLE_S = 5.0
"""An engine uses its first idle seconds to prepare further steps; about so long on a GPU."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers."""

    url: str
    pid: int
    ready_s: float
    """From the start of its process until it was ready."""
    first_answer_s: float
    """The same until the first token of its first answer had come."""
    phases: dict[str, float] = field(default_factory=dict)
    """Of the engine's start."""
    moments: dict[str, float] = field(default_factory=dict)
    """When each process was started and ready, in seconds after the supervisor's."""

    @property
    def start(self) -> dict[str, Any]:
        return {
            "ready_s": self.ready_s,
            "first_answer_s": self.first_answer_s,
            "engine_phases_s": self.phases,
            "moments_s": self.moments,
        }


@contextmanager
def server(
    model: str, folder: Path, *, device: str = "auto", settings: Sequence[str] = (), settle_s: float | None = None
) -> Iterator[Running]:
    """`penstock serve` of a model, ready and settled. `folder` gets its files, `settings` are `key=value`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    if os.sep in model and os.path.exists(model):
        model = os.path.abspath(model)  # the server's current folder is another one
    log = folder / "log"
    command = [
        *(*module("penstock"), "serve", model, "--host", "127.0.0.1", "--port", str(port)),
        *("--device", device, "--log-level", "warning", "--set", f"store.url=sqlite:///{folder}/store.db"),
        # A slow machine must be able to finish its requests too.
        *("--set", "generation.time_limit_s=3600", "--set", "admission.wait_s=3600"),
        *("--set", "server.console=false", "--set", "logging.format=json"),
        *(word for setting in settings for word in ("--set", setting)),
    ]
    with _process(command, folder, log) as (process, began):
        if not asyncio.run(_becomes_ready(Target.parse(f"http://127.0.0.1:{port}", None), process)):
            raise BenchError(f"the server did not become ready:\n{log.read_text()[-2000:]}")
        ready_s, url = time.monotonic() - began, f"http://127.0.0.1:{port}"
        load = serve.ServeBenchSettings(url=url, concurrency=1, requests=1, input_len=16, output_len=1, warm_up=0)
        _, tally = run_loop(serve.measure(load, None, Console(stderr=True, quiet=True)))
        if tally.errors:
            raise BenchError(f"the server does not answer: {next(iter(tally.errors))}\n{log.read_text()[-2000:]}")
        answered_s = time.monotonic() - began
        device, phases = asyncio.run(_startup(Target.parse(url, None)))
        time.sleep(settle_s if settle_s is not None else SETTLE_S if device.startswith("cuda") else 0.0)
        yield Running(url, process.pid, ready_s, answered_s, phases, _moments(log))


@contextmanager
def _process(command: list[str], folder: Path, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """A process in `folder`, and when it was started."""
    began = time.monotonic()
    with log.open("wb") as output:
        # In an empty folder: a configuration file in the current one must not be picked up.
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment())
    try:
        yield process, began
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def environment() -> dict[str, str]:
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


def _moments(log: Path) -> dict[str, float]:
    """What the supervisor said of its start; empty if it has not yet."""
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{") and '"children"' in line:
            said = msgspec.json.decode(line)
            moments = {"supervisor: configuration read, models found": said["prepared_s"]}
            for name, child in said["children"].items():
                role = name.partition(" ")[0]
                moments.setdefault(f"{role}: process started", child["spawned_s"])
                moments[f"{role}: ready"] = child["ready_s"]
            return moments
    return {}


async def _startup(target: Target) -> tuple[str, dict[str, float]]:
    """The engine's device, and the phases of its start in seconds."""
    connection = Connection(target)
    try:
        replicas = msgspec.json.decode(await connection.request("GET", "/v1/admin/replicas"))["data"]
    finally:
        await connection.close()
    return str(replicas[0]["device"]), dict(replicas[0]["startup_s"] or {})


def random_model(shape: str, folder: Path, console: Console) -> str:
    """Write a folder with random weights and a tokenizer: its path, of which the server makes the model's name."""
    from penstock.bench import random_model as checkpoint

    path = folder / shape.replace(":", "-")
    with report.progress_bar(console) as bar:
        task = bar.add_task(f"writing {shape} with random weights", total=None)
        checkpoint.write(path, shape, lambda done, total: bar.update(task, completed=done, total=total))
    return str(path)
