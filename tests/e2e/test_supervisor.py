"""`penstock serve` with the default model: ready, healing, draining, leaving nothing behind (R-OPS-1, R-OPS-2)."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.engine_host.client import eventually
from tests.ports import free_port
from tests.supervisor.test_supervisor import alive

START_S = 200.0
"""Includes compiling the native kernels, the first time on a machine."""
SERVE = [sys.executable, "-m", "penstock", "serve"]
SETTINGS = ["--max-model-len", "1024", "--set", "models.0.kv_memory=64MiB", "--set", "models.0.max_running=8"]


class Server:
    """A `penstock serve` in a process of its own."""

    def __init__(self, *settings: str, defaults: bool = True) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "penstock",
                "serve",
                "--port",
                str(self.port),
                *(SETTINGS if defaults else ()),
                *settings,
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def said(self, text: str) -> int:
        return sum(text in line for line in self.lines)

    def wait_for(self, text: str, times: int = 1, timeout_s: float = START_S) -> None:
        found = eventually(lambda: self.said(text) >= times or self.process.poll() is not None, timeout_s)
        assert found and self.said(text) >= times, f"no {text!r} in:\n" + "\n".join(self.lines)

    def children(self) -> dict[str, int]:
        """Process ids of the children, by the subcommand that they run."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
                command = (stat.parent / "cmdline").read_text().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == self.process.pid and "penstock" in command:
                found[command[command.index("penstock") + 1]] = int(stat.parent.name)
        return found

    def processes(self, *words: str) -> list[int]:
        """Process ids of the children whose command line has all these words."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in children}
        return [pid for pid, line in lines.items() if set(words) <= set(line)]

    def ask(self, *, timeout_s: float = 180, **options: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        body |= {"model": "smollm2-135m", "max_tokens": 12, **options}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=timeout_s)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(60)
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def started() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with started() as server:
        server.wait_for("curl http")
        yield server


def test_it_becomes_ready_says_how_to_use_it_and_answers(server: Server) -> None:
    banner = "\n".join(server.lines)
    assert f"{server.url}/v1" in banner and "curl " in banner and "weights" in banner
    assert httpx.get(f"{server.url}/health/ready").status_code == 200
    reply = server.ask()
    assert reply.status_code == 200
    assert "Paris" in reply.json()["choices"][0]["message"]["content"]
    assert reply.json()["usage"]["completion_tokens"] > 1


def test_the_command_line_client_talks_to_it(server: Server) -> None:
    command = [sys.executable, "-m", "penstock", "chat", "--url", server.url, "-t", "0", "--max-tokens", "12"]
    result = subprocess.run([*command, "What is the capital of France?"], capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == server.ask().json()["choices"][0]["message"]["content"].strip()
    assert "first token" in result.stderr and " out" in result.stderr  # a rate only if it came in several pieces


def test_a_killed_engine_comes_back_by_itself_and_the_gateway_stays(server: Server) -> None:
    before = server.children()
    os.kill(before["engine"], signal.SIGKILL)
    server.wait_for("died (killed by SIGKILL)")
    server.wait_for("engine smollm2-135m: up on", times=2)
    assert eventually(lambda: server.ask().status_code == 200, 180)
    after = server.children()
    assert after["gateway"] == before["gateway"]
    assert after["engine"] != before["engine"]


@pytest.mark.slow
def test_a_killed_gateway_comes_back_by_itself_and_the_engine_stays(server: Server) -> None:
    before = server.children()
    os.kill(before["gateway"], signal.SIGKILL)
    assert eventually(lambda: server.children().get("gateway", before["gateway"]) != before["gateway"], 180)
    assert eventually(lambda: _answers(server), 180)
    assert server.children()["engine"] == before["engine"]


def _answers(server: Server) -> bool:
    try:
        return server.ask().status_code == 200
    except httpx.HTTPError:
        return False


def test_a_second_server_on_the_port_is_refused_before_anything_is_loaded(server: Server) -> None:
    command = [sys.executable, "-m", "penstock", "serve", "--port", str(server.port)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert result.returncode == 2
    assert f"port {server.port} on 127.0.0.1 is in use" in result.stderr
    assert "Traceback" not in result.stderr


def test_sigterm_lets_a_running_stream_finish_and_then_everything_ends(server: Server) -> None:
    children = server.children()
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Tell me a long story."}],
        "stream": True,
        "max_tokens": 60,
        "ignore_eos": True,
        "seed": 1,
    }
    chunks = []
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=180) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if not line.startswith("data:"):
                continue
            if not chunks:
                server.process.send_signal(signal.SIGTERM)
            chunks.append(line[5:].strip())
    assert chunks[-1] == "[DONE]"
    reasons = [choice["finish_reason"] for chunk in chunks[:-1] for choice in json.loads(chunk)["choices"]]
    assert reasons[-1] == "length"
    assert server.process.wait(180) == 0
    assert not any(alive(pid) for pid in children.values())


@pytest.mark.slow
def test_no_orphan_survives_a_kill_of_the_supervisor_while_it_starts() -> None:
    with started() as server:
        server.wait_for("engine smollm2-135m: weights")
        children = server.children()
        assert set(children) == {"engine", "gateway"}
        os.kill(server.process.pid, signal.SIGKILL)
        assert eventually(lambda: not any(alive(pid) for pid in children.values()))
