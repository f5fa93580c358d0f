"""A server is upgraded process by process: engines and gateways of the last release and of this one work together, in
either order, and no stream is lost (R-OPS-3)."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.e2e.release import Tree, last_release, this_release
from tests.e2e.test_failover import tiny_model
from tests.engine_host.client import eventually
from tests.ports import free_port

TOKENS = 80
CLIENTS = 4


@dataclass
class Rollout:
    """Two engines at fixed endpoints, and gateways for them; each process can be replaced by one of another release."""

    folder: Path
    stack: ExitStack
    endpoints: list[str] = field(default_factory=lambda: [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)])
    engines: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_engine(self, tree: Tree, index: int) -> None:
        arguments = ("engine", "tiny", "-c", str(self.folder / "penstock.yaml"), "-e", self.endpoints[index])
        self.engines[index] = self._started(tree, *arguments)

    def stop_engine(self, index: int) -> None:
        self.engines[index].send_signal(signal.SIGTERM)
        assert self.engines[index].wait(60) == 0

    def start_gateway(self, tree: Tree) -> tuple[subprocess.Popen[bytes], str]:
        port = free_port()
        engines = [word for endpoint in self.endpoints for word in ("-e", f"tiny={endpoint}")]
        config = ("-c", str(self.folder / "penstock.yaml"), "--port", str(port), "--log-level", "warning")
        config += (
            "--set",
            "server.console=false",
        )  # that of the last release needs a package which is no longer installed
        return self._started(tree, "gateway", *engines, *config), f"http://127.0.0.1:{port}"

    def _started(self, tree: Tree, *arguments: str) -> subprocess.Popen[bytes]:
        process = tree.start(*arguments)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process


@contextmanager
def rollout(folder: Path) -> Iterator[Rollout]:
    (folder / "model").mkdir()
    model = tiny_model(folder / "model")
    (folder / "penstock.yaml").write_text(
        f"models: [{{name: tiny, source: {model}, deterministic: true, threads: 1, kv_memory: 64MiB,\n"
        "  dtype: float32, weights: dense, max_running: 32}]\n"  # rounding may differ between releases
        "encoders: []\nserver: {drain_s: 60, engine_wait_s: 120}\nresilience: {resume_s: 120, attempts: 8}\n"
        "generation: {time_limit_s: 600}\nrouting: {policy: round_robin}\n"
    )
    with ExitStack() as stack:
        yield Rollout(folder, stack)


def stream(url: str) -> tuple[str, int]:
    """The text of an answer, and its tokens as they were counted."""
    body = {"model": "tiny", "prompt": "Once", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text, tokens = "", 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        if response.status_code == 503:
            raise httpx.ConnectError(f"refused: {response.read().decode()}")
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"] if event["choices"] else ""
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return text, tokens


def up(url: str) -> int:
    """Engines that the gateway is connected to."""
    try:
        text = httpx.get(f"{url}/metrics", timeout=180).text
    except httpx.HTTPError:
        return 0
    rows = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("penstock_engine_up{")]
    return sum(map(int, map(float, rows)))


class Load:
    """Clients that stream without a pause, always from the current gateway."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[tuple[str, int]] = []
        self.failures: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(300)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.answers.append(stream(self.url))
            except httpx.ConnectError:
                time.sleep(0.05)  # nothing has begun: the gateway drains, and a balancer asks another one
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                time.sleep(0.1)

    def some_more(self) -> None:
        enough = len(self.answers) + 2 * CLIENTS
        assert eventually(lambda: len(self.answers) >= enough or self.failures, 300)
        assert not self.failures


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", ["gateways", "engines"])
def test_a_server_is_upgraded_while_streams_run(first: str, tmp_path: Path) -> None:
    old, new = last_release(tmp_path / "release"), this_release()
    with rollout(tmp_path) as running:
        for index in range(2):
            running.start_engine(old, index)
        gateway, url = running.start_gateway(old)
        assert eventually(lambda: up(url) == 2, 300), "the last release works by itself"
        with Load(url) as load:
            load.some_more()
            steps = ["gateways", "engines"]
            for step in steps if first == "gateways" else reversed(steps):
                if step == "engines":
                    for index in range(2):
                        running.stop_engine(index)
                        running.start_engine(new, index)
                        assert eventually(lambda: up(load.url) == 2, 300), f"engine {index} is back, upgraded"
                        load.some_more()
                else:
                    url = running.start_gateway(new)[1]
                    assert eventually(lambda url=url: up(url) == 2, 300), "this gateway speaks with both engines"
                    load.url = url  # as a balancer does before the old one drains
                    gateway.send_signal(signal.SIGTERM)
                    assert gateway.wait(120) == 0
                    load.some_more()
        assert not load.failures
        assert len(set(load.answers)) == 1 and load.answers[0][1] == TOKENS, "every stream whole, and the same"
