"""A server that can be killed at any instant: a real gateway process, and an engine process that keeps a diary."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.ports import free_port
from tests.scripted import make_text


@dataclass
class Drill:
    """The processes and where they keep things. Every engine process has a diary of its own."""

    folder: Path
    port: int = field(default_factory=free_port)
    engines: int = 0
    engine: subprocess.Popen[bytes] | None = None
    gateway: subprocess.Popen[bytes] | None = None
    deaths: dict[int, float] = field(default_factory=dict)
    """When which engine process was killed."""
    noted: dict[str, int] = field(default_factory=dict)
    """What the ledger said of charges that were open when their gateway was killed."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def store(self) -> str:
        return f"sqlite:///{self.folder / 'ledger.db'}"

    def diary(self, number: int) -> Path:
        return self.folder / f"diary-{number}"

    def start_engine(self) -> None:
        self.engines += 1
        endpoint, log = f"ipc://{self.folder / 'engine'}", self.diary(self.engines)
        log.touch()
        command = (sys.executable, "-m", "tests.e2e.diary", endpoint, str(self.folder / "model"), str(log))
        self.engine = subprocess.Popen(command)

    def start_gateway(self) -> None:
        command = (
            *(sys.executable, "-m", "penstock", "gateway", "-e", f"tiny=ipc://{self.folder / 'engine'}"),
            *("--config", str(self.folder / "penstock.yaml"), "--port", str(self.port), "--log-level", "error"),
        )
        self.gateway = subprocess.Popen(command)

    def ready(self, within: float = 180.0) -> None:
        deadline = time.monotonic() + within
        with httpx.Client(timeout=5, verify=False) as client:
            while True:
                try:
                    if client.get(f"{self.url}/health/ready").status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                assert time.monotonic() < deadline, "the gateway did not become ready"
                time.sleep(0.1)

    def kill_gateway(self) -> None:
        self._end_gateway()
        self.start_gateway()

    def kill_engine(self) -> None:
        self._end_engine()
        self.start_engine()

    def kill_both(self) -> None:
        self._end_engine()
        self._end_gateway()
        self.start_engine()
        self.start_gateway()

    def read_notes(self) -> dict[str, int]:
        """Completion tokens by charge, of those that are open, as the ledger has them."""
        with closing(sqlite3.connect(self.folder / "ledger.db", timeout=180)) as database:
            return dict(database.execute("SELECT id, completion_tokens FROM charges_progress").fetchall())

    def _end_gateway(self) -> None:
        assert self.gateway is not None
        self.gateway.send_signal(signal.SIGKILL)
        self.gateway.wait()
        self.noted |= self.read_notes()

    def _end_engine(self) -> None:
        assert self.engine is not None
        self.deaths[self.engines] = time.time()
        self.engine.send_signal(signal.SIGKILL)
        self.engine.wait()


@contextmanager
def drill(folder: Path, settings: str = "") -> Iterator[Drill]:
    """A gateway and an engine, up."""
    (folder / "model").mkdir()
    make_text(folder / "model")
    running = Drill(folder)
    (folder / "penstock.yaml").write_text(
        f"models: [{{name: tiny, source: {folder / 'model'}, input_price: 1.0, output_price: 2.0}}]\n"
        f"store: {{url: '{running.store}', gateway_timeout_s: 1.0}}\n"
        f"server: {{drain_s: 0.2}}\n{settings}"
    )
    try:
        running.start_engine()
        running.start_gateway()
        running.ready()
        yield running
    finally:
        for process in (running.gateway, running.engine):
            if process is not None:
                process.kill()
                process.wait()
