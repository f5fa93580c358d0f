"""A pipeline over two hosts (network namespaces), whose link is cut in the middle of a stream (R-ENG-10, R-REL-1)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.cli.command import penstock
from tests.e2e.test_supervisor import Server
from tests.engine_host.client import eventually
from tests.ports import free_port

TOKENS = 100


@dataclass(frozen=True)
class Hosts:
    """This machine, and a namespace behind a virtual cable."""

    folder: Path
    name: str
    here: str

    def link(self, state: str) -> None:
        run("ip", "-n", self.name, "link", "set", "eth0", state)

    def join(self, endpoint: str, model: Path, key: str = "host-b.key") -> subprocess.Popen[str]:
        keys = ("--curve-key", str(self.folder / key), "--curve-engine", str(self.folder / "head.pub"))
        command = (sys.executable, "-m", "penstock", "join", endpoint, "--as", "host-b", "--model", str(model), *keys)
        inside = ("ip", "netns", "exec", self.name, *command)
        return subprocess.Popen(inside, stderr=subprocess.PIPE, text=True)

    def configuration(self, name: str, model: Path, port: int) -> Path:
        file = self.folder / name
        file.write_text(
            f"models:\n  - {{name: m, source: {model}, device: cpu, pipeline_parallel: 2, kv_memory: 64MiB,\n"
            f"     max_model_len: 512, max_running: 4, threads: 1, placement: {{machines: [local, host-b],\n"
            f"     listen: 'tcp://{self.here}:{port}', curve_key: {self.folder / 'head.key'},\n"
            f"     curve_clients: {self.folder / 'machines.txt'}}}}}\n"
            "resilience: {resume_s: 240}\ngeneration: {time_limit_s: 600}\n"
        )
        return file


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command (iproute2)")
    name, cable = f"ps{os.getpid()}", f"ps{os.getpid()}v"
    try:
        run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    try:
        run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "addr", "add", "10.213.77.1/30", "dev", cable)
        run("ip", "-n", name, "addr", "add", "10.213.77.2/30", "dev", "eth0")
        for command in (("link", "set", cable, "up"), ("-n", name, "link", "set", "lo", "up")):
            run("ip", *command)
        found = Hosts(tmp_path, name, "10.213.77.1")
        found.link("up")
        (tmp_path / "head.pub").write_text(penstock("engine", "--make-curve-key", str(tmp_path / "head.key")).stdout)
        machine = penstock("engine", "--make-curve-key", str(tmp_path / "host-b.key")).stdout
        (tmp_path / "machines.txt").write_text(machine)
        penstock("engine", "--make-curve-key", str(tmp_path / "stranger.key"))
        yield found
    finally:
        run("ip", "netns", "del", name)


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[list[str]]:
    """Its log, while it runs."""
    lines: list[str] = []

    def read() -> None:
        assert process.stderr is not None
        lines.extend(iter(process.stderr.readline, ""))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield lines
    finally:
        process.terminate()
        assert process.wait(30) == 0
        reader.join(5)


def stream(url: str, under_way: threading.Event | None = None) -> tuple[str, int]:
    """The text and how many tokens it has; sets `under_way` after some of them."""
    body = {"model": "m", "prompt": "Once upon a time", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text, tokens, chunks = "", 0, 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"] if event["choices"] else ""
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                chunks += 1
                if chunks == 20 and under_way is not None:
                    under_way.set()
    return text, tokens


@pytest.mark.slow
def test_a_stream_goes_on_when_the_link_is_back_and_the_host_has_joined_again(
    hosts: Hosts, default_model: Path
) -> None:
    port = free_port()
    server = Server("m", "-c", str(hosts.configuration("penstock.yaml", default_model, port)), defaults=False)
    endpoint = f"tcp://{hosts.here}:{port}"
    try:
        server.wait_for("waiting for host-b with rank 1")
        stranger = hosts.join(endpoint, default_model, "stranger.key")
        assert stranger.wait(60) == 2
        assert stranger.stderr is not None and "is not among those that may join" in stranger.stderr.read()
        server.wait_for("refused a machine whose public key")
        with ended(hosts.join(endpoint, default_model)) as log:
            server.wait_for("curl http")
            expected = stream(server.url)
            assert expected[1] == TOKENS
            under_way = threading.Event()
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(stream, server.url, under_way)
                assert under_way.wait(60)
                hosts.link("down")
                cut = time.monotonic()
                server.wait_for("is gone (host-b: the connection is lost)", timeout_s=30)
                assert time.monotonic() - cut < 15, "a silent cut is noticed"
                assert eventually(lambda: any("the connection was lost" in line for line in log), 30)
                hosts.link("up")
                assert answer.result(300) == expected
            assert sum("joined as host-b" in line for line in log) == 2
    finally:
        server.close()


@pytest.mark.slow
def test_streams_move_to_another_replica_while_the_link_is_down(hosts: Hosts, default_model: Path) -> None:
    port = free_port()
    placed = hosts.configuration("placed.yaml", default_model, port)
    alone = hosts.folder / "alone.yaml"
    alone.write_text(
        f"models: [{{name: m, source: {default_model}, device: cpu, kv_memory: 64MiB, max_model_len: 512, "
        "max_running: 4, threads: 1}]\nresilience: {resume_s: 240}\ngeneration: {time_limit_s: 600}\n"
    )
    endpoints = [f"ipc://{hosts.folder}/{name}" for name in ("a", "b")]
    url = f"http://127.0.0.1:{free_port()}"
    command = (sys.executable, "-m", "penstock")
    with ExitStack() as stack:
        stack.enter_context(ended(hosts.join(f"tcp://{hosts.here}:{port}", default_model)))
        engines = [
            subprocess.Popen((*command, "engine", "m", "-c", str(file), "-e", endpoint))
            for file, endpoint in zip((placed, alone), endpoints, strict=True)
        ]
        both = [word for endpoint in endpoints for word in ("-e", f"m={endpoint}")]
        gateway = subprocess.Popen((*command, "gateway", *both, "-c", str(alone), "--port", url.rpartition(":")[2]))
        for process in (*engines, gateway):
            stack.callback(process.wait)
            stack.callback(process.kill)
        assert eventually(lambda: _up(url) == 2, 200), "both replicas are up"
        started = [threading.Event() for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(stream, url, event) for event in started]
            assert all(event.wait(120) for event in started)
            hosts.link("down")
            found = [answer.result(300) for answer in answers]
        assert len(set(found)) == 1 and found[0][1] == TOKENS, "the same text, whole"
        assert engines[0].wait(30) != 0 and engines[1].poll() is None


def _up(url: str) -> int:
    """Replicas that are ready."""
    try:
        text = httpx.get(f"{url}/metrics", timeout=180).text
    except httpx.HTTPError:
        return 0
    rows = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("penstock_engine_up")]
    return sum(map(int, map(float, rows)))
