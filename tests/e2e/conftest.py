"""One real server for all these tests: `penstock serve` with the default model, as a person would start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port

MODEL = "smollm2-135m"


@dataclass(frozen=True)
class Server:
    url: str
    pid: int

    def metric(self, name: str) -> float:
        """The value of a metric, summed over its labels."""
        rows = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", httpx.get(f"{self.url}/metrics").text, re.M)
        assert rows, f"no metric {name}"
        return sum(map(float, rows))

    def wait_for(self, name: str, value: float, within: float = 120) -> None:
        """Engines tell how busy they are now and then, not with every answer."""
        deadline = time.monotonic() + within
        while (found := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {found}"
            time.sleep(0.05)

    def children(self, word: str) -> list[int]:
        """Processes of the server whose command line contains `word`."""
        pids = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(pid) for pid in pids if word in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]

    def wait_until_ready(self, within: float) -> None:
        deadline = time.monotonic() + within
        while True:
            try:
                if httpx.get(f"{self.url}/health/ready", timeout=180).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            assert time.monotonic() < deadline, "the server did not become ready"
            time.sleep(0.2)


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [
        *(sys.executable, "-m", "penstock", "serve", MODEL, "--port", str(port), "--max-model-len", "2048"),
        *("--set", "server.drain_s=5", "--set", "generation.time_limit_s=120", "--set", "server.engine_wait_s=60"),
        *("--set", "models.*.adapter_slots=4", "--set", "tools.networks=[127.0.0.0/8]"),
        *("--set", "cache.exact=asked", "--set", "cache.semantic=asked", "--set", "cache.lookup_s=10"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "2"})
    running = Server(f"http://127.0.0.1:{port}", process.pid)
    try:
        running.wait_until_ready(180)
        yield running
    except AssertionError:
        print(log.read_text())
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    assert code == 0, log.read_text()[-2000:]
