"""Real processes for the gateway benchmarks: a synthetic engine, gateways in front of it, and their memory and CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from penstock.errors import PenstockError
from penstock.interpreter import module

MODEL = "synthetic"
VOCABULARY = 256
"""Token ids of the synthetic engine that prompts may use: one per byte."""
_TICKS = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(command: Sequence[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `command` inside the context; its output goes to `log`."""
    with log.open("ab") as output:
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, **options)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(45)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def wait_for(url: str, running: subprocess.Popen[bytes], log: Path, within: float = 120.0) -> None:
    """Until `url` answers 200; shows the log when it does not."""
    deadline = time.monotonic() + within
    while True:
        try:
            if httpx.get(url, timeout=10).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if running.poll() is not None or time.monotonic() > deadline:
            raise PenstockError(f"{url} does not answer:\n{log.read_text()[-4000:]}")
        time.sleep(0.1)


@dataclass(frozen=True, slots=True)
class Gateway:
    url: str
    port: int
    pid: int
    engine_pid: int

    @property
    def workers(self) -> list[int]:
        """Process ids of the gateways themselves, without their supervisor."""
        return children(self.pid) or [self.pid]

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return sum(float(row.rpartition(" ")[2]) for row in text.splitlines() if row.startswith(name))


@contextmanager
def gateway(folder: Path, *, interval_s: float, workers: int, settings: dict[str, Any]) -> Iterator[Gateway]:
    """`penstock gateway` with its defaults (store, ledger, request log), in front of a synthetic engine."""
    endpoint, model, log = f"ipc://{folder}/engine", folder / "model", folder / "log"
    engine = [*module("penstock.testing.synthetic_engine"), endpoint, str(model), "--with-parent"]
    port = free_port()
    config = {
        "server": {"port": port, "workers": workers},
        "store": {"url": f"sqlite:///{folder}/store.db"},
        "models": [{"name": MODEL, "source": str(model), "max_waiting": 100_000}],
        "logging": {"level": "warning"},
        **settings,
    }
    (folder / "penstock.yaml").write_text(json.dumps(config))
    command = [*module("penstock"), "gateway", "-c", str(folder / "penstock.yaml")]
    with process([*engine, "--interval", str(interval_s)], log) as engine_process:
        while not (model / "tokenizer_config.json").exists():
            time.sleep(0.05)
        with process([*command, "-e", f"{MODEL}={endpoint}"], log) as running:
            url = f"http://127.0.0.1:{port}"
            wait_for(f"{url}/health/ready", running, log)
            found = Gateway(url, port, running.pid, engine_process.pid)
            while found.metric("penstock_gateway_workers") < workers:
                time.sleep(0.1)
            yield found


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def memory(pids: Sequence[int]) -> int:
    """Resident bytes, pages shared between them counted once."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


def cpu_seconds(pids: Sequence[int]) -> float:
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS
