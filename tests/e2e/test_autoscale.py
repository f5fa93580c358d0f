"""R-OPS-4 live: replicas come with load and go without it, and no stream is lost; scale to zero and wake; a notice.

The configurations are those of examples/.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MODEL, Server
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENS = 48


@contextmanager
def started(name: str, log: Path) -> Iterator[Server]:
    port = free_port()
    command = [*(sys.executable, "-m", "penstock", "serve", "-c", str(EXAMPLES / name), "--port", str(port))]
    command += ["--set", "models.0.deterministic=true"]  # texts are compared, from batches of many sizes
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        server = Server(f"http://127.0.0.1:{port}", process.pid)
        server.wait_until_ready(180)
        yield server
    except BaseException:
        print(log.read_text()[-4000:])
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()[-2000:]


def state(server: Server) -> dict[str, Any]:
    found = httpx.get(f"{server.url}/v1/admin/autoscale", timeout=180).json()["data"]
    return dict(found[0]) if found else {"ready": -1}


def wait_for(condition: Callable[[], bool], within: float = 150.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "did not become true in time"
        time.sleep(0.25)


class Clients:
    """Streams one after the other in several threads; each must be the same text and whole."""

    def __init__(self, url: str, count: int, pause_s: float = 0.0) -> None:
        self._url = url
        self._pause_s = pause_s
        self._over = threading.Event()
        self.texts: list[str] = []
        self.problems: list[str] = []
        self.replicas: set[str] = set()
        self.shed = 0
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        with httpx.Client(timeout=300) as client:
            while not self._over.is_set():
                try:
                    self._stream(client)
                    self._over.wait(self._pause_s)
                except Exception as error:
                    self.problems.append(repr(error))

    def _stream(self, client: httpx.Client) -> None:
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 0, "stream": True}
        with client.stream("POST", f"{self._url}/v1/completions", json=body) as reply:
            # While a request waits, and where tokens are slow to come, there are comments between the events.
            lines = [line for line in reply.iter_lines() if line and not line.startswith(":")]
            if reply.status_code == 503 and reply.headers.get("x-penstock-reason") in ("load_shed", "queue_timeout"):
                self.shed += 1  # one replica is not enough for all: that is why more are started
                self._over.wait(0.5)
                return
            if "x-penstock-replica" not in reply.headers and lines:
                self.shed += 1  # it waited so long that the status was sent, and was refused in the stream
                return
            if reply.status_code != 200 or lines[-1] != "data: [DONE]":
                self.problems.append(f"{reply.status_code} {lines[-1:]}")
                return
            self.replicas.add(reply.headers["x-penstock-replica"])
            parts = (json.loads(line.removeprefix("data: ")) for line in lines[:-1])
            self.texts.append("".join(part["choices"][0]["text"] for part in parts if part["choices"]))

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def test_replicas_come_with_load_and_go_without_it(tmp_path: Path) -> None:
    with started("autoscale.yaml", tmp_path / "log") as server:
        clients = Clients(server.url, 8)
        try:
            wait_for(lambda: state(server)["ready"] >= 3)
            seen = len(clients.texts)
            wait_for(lambda: len(clients.replicas) >= 3 and len(clients.texts) >= seen + 20)
        finally:
            clients.stop()
        assert not clients.problems
        assert len(set(clients.texts)) == 1, "every stream was whole"
        assert server.metric("penstock_autoscale_desired_replicas") >= 3
        refused = httpx.post(f"{server.url}/v1/admin/models/{MODEL}/scale", json={"replicas": 2}, timeout=180)
        assert refused.status_code == 400 and "scaled automatically" in refused.text

        slow = Clients(server.url, 1, pause_s=4.0)
        try:
            wait_for(lambda: state(server)["ready"] == 1 and not state(server)["leaving"])
        finally:
            slow.stop()
        assert not slow.problems and set(slow.texts) == set(clients.texts), "draining cost no stream"
        assert len(server.children("engine")) == 1
        assert server.metric("penstock_autoscale_decisions_total") >= 2

        before = httpx.get(f"{server.url}/v1/admin/replicas").json()["data"][0]["instance"]
        during = Clients(server.url, 2)
        try:
            body = {"replica": "0", "seconds": 120}
            assert httpx.post(f"{server.url}/v1/admin/models/{MODEL}/notice", json=body, timeout=180).status_code == 200
            wait_for(
                lambda: (
                    before
                    not in [one["instance"] for one in httpx.get(f"{server.url}/v1/admin/replicas").json()["data"]]
                )
            )
        finally:
            during.stop()
        assert not during.problems and set(during.texts) == set(clients.texts)


def test_a_model_sleeps_while_idle_and_a_request_wakes_it(tmp_path: Path) -> None:
    with started("scale-to-zero.yaml", tmp_path / "log") as server:
        wait_for(lambda: state(server)["ready"] == 0 and not server.children("engine"))
        model = httpx.get(f"{server.url}/v1/models/{MODEL}").json()
        assert model["state"] == "asleep" and model["context_window"]
        assert httpx.get(f"{server.url}/health/ready").status_code == 200
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
        begin = time.monotonic()
        with httpx.Client(timeout=90) as client:
            reply = client.post(f"{server.url}/v1/completions", json=body)
        print(f"woken and answered in {time.monotonic() - begin:.1f} s")
        assert reply.status_code == 200, reply.text
        wait_for(lambda: state(server)["ready"] == 1, 10.0)  # gateways hear of it at the next decision
        for _ in range(8):  # health checks are no requests: it falls asleep again
            assert httpx.get(f"{server.url}/health/ready").status_code == 200
            time.sleep(0.5)
        wait_for(lambda: state(server)["ready"] == 0)
