"""Two regions, 2 ms and 80 ms away, in network namespaces: the near one is used, a busy one spills over, a lost one
loses no stream and is returned to, and a data rule holds throughout (R-RT-11)."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from penstock.testing.synthetic_engine import text_of
from tests.engine_host.client import eventually
from tests.ports import free_port

ROUND_TRIP_MS = {"eu": 2, "us": 80}
SLOTS = 16
TOKENS = 200


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Region:
    """A network namespace behind a virtual cable, with an engine in it."""

    def __init__(self, name: str, number: int, folder: Path) -> None:
        self.namespace = f"ps{os.getpid()}{name}"
        self.cable = f"v{os.getpid()}{name}"
        self.here, self.there = f"10.213.{80 + number}.1", f"10.213.{80 + number}.2"
        self.name, self.folder = name, folder
        self.endpoint = f"tcp://{self.there}:5555"

    def link(self, state: str) -> None:
        run("ip", "-n", self.namespace, "link", "set", "eth0", state)

    @contextmanager
    def up(self) -> Iterator[Region]:
        run("ip", "netns", "add", self.namespace)
        try:
            run("ip", "link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
            run("ip", "addr", "add", f"{self.here}/30", "dev", self.cable)
            run("ip", "-n", self.namespace, "addr", "add", f"{self.there}/30", "dev", "eth0")
            run("ip", "link", "set", self.cable, "up")
            run("ip", "-n", self.namespace, "link", "set", "lo", "up")
            self.link("up")
            half_ms = ROUND_TRIP_MS[self.name] / 2
            with ExitStack() as stack:
                engine = ("-m", "penstock.testing.synthetic_engine", "tcp://127.0.0.1:5556", str(self.folder))
                stack.enter_context(self._inside(*engine, "--interval", "0.02", "--max-running", str(SLOTS)))
                relay = ("-m", "tests.e2e.delay_relay", self.there, "5555", "5556", str(half_ms))
                stack.enter_context(self._inside(*relay))
                yield self
        finally:
            run("ip", "netns", "del", self.namespace)

    @contextmanager
    def _inside(self, *arguments: str) -> Iterator[None]:
        command = ("ip", "netns", "exec", self.namespace, sys.executable, *arguments)
        with process(command):
            yield


@contextmanager
def process(command: tuple[str, ...]) -> Iterator[None]:
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        started.terminate()
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[dict[str, Region]]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command (iproute2)")
    with ExitStack() as stack:
        made = {}
        for number, name in enumerate(ROUND_TRIP_MS):
            try:
                made[name] = stack.enter_context(Region(name, number, tmp_path / "tokenizer").up())
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        assert eventually(lambda: (tmp_path / "tokenizer" / "tokenizer.json").exists(), 120)
        yield made


@contextmanager
def gateway(regions: dict[str, Region], folder: Path, routing: str, *, labels: bool = True) -> Iterator[str]:
    """The URL of a gateway in Europe."""
    port = free_port()
    file = folder / f"{port}.yaml"
    file.write_text(
        f"models: [{{name: m, source: {folder / 'tokenizer'}, watchdog_s: 5}}]\n"
        "encoders: []\nadmission: {wait_s: 120}\ngeneration: {time_limit_s: 600}\n"
        f"resilience: {{stall_s: 2, resume_s: 120}}\nrouting: {{region_return_s: 5, {routing}}}\n"
        f"fleet: {{region: eu}}\nstore: {{url: 'sqlite:///{folder / f'{port}.db'}'}}\n"
        "server: {console: false, engine_wait_s: 3}\n"
    )
    command = [sys.executable, "-m", "penstock", "gateway", "-c", str(file), "--port", str(port)]
    for name, region in regions.items():
        command += ["-e", f"m={region.endpoint}" + (f"?region={name}" if labels else "")]
    with process(tuple(command)):
        url = f"http://127.0.0.1:{port}"
        assert eventually(lambda: sum(bool(one["ready"]) for one in replicas(url)) == len(regions), 180)
        yield url


def replicas(url: str) -> list[dict[str, object]]:
    try:
        found: list[dict[str, object]] = httpx.get(f"{url}/v1/admin/replicas", timeout=180).json()["data"]
    except httpx.HTTPError:
        return []
    return found


def ask(url: str, number: int, tokens: int, client: httpx.Client | None = None) -> tuple[str, str, float]:
    """The region and the text of a stream, and the seconds to its first token."""
    if client is None:
        with httpx.Client(timeout=300) as client:
            return ask(url, number, tokens, client)
    body = {"model": "m", "prompt": "x", "max_tokens": tokens, "seed": number, "stream": True, "ignore_eos": True}
    began, first, text = time.monotonic(), 0.0, ""
    with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            return str(reply.status_code), reply.read().decode(), 0.0
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                piece = choices[0]["text"] if choices else ""
                first = first or (time.monotonic() - began if piece else 0.0)
                text += piece
        return reply.headers.get("x-penstock-region", ""), text, first


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_nearest_region_answers_and_losing_it_loses_nothing(
    regions: dict[str, Region], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pinned = "regions: [{regions: [eu]}]"
    with (
        gateway(regions, tmp_path, "policy: predicted") as url,
        gateway(regions, tmp_path, "policy: random", labels=False) as blind,
        gateway(regions, tmp_path, pinned) as strict,
        ThreadPoolExecutor(64) as pool,
    ):
        assert eventually(lambda: all(one["round_trip_ms"] is not None for one in replicas(url)), 60)
        trips = {str(one["region"]): float(str(one["round_trip_ms"])) for one in replicas(url)}
        assert trips["us"] >= 80 and trips["us"] > trips["eu"]

        with httpx.Client(timeout=300) as client:
            both = [(ask(url, n, 4, client), ask(blind, n, 4, client)) for n in range(40)]
        near, anywhere = ([found[index] for found in both[10:]] for index in (0, 1))
        assert {region for region, _, _ in near} == {"eu"}
        medians = [statistics.median(first for _, _, first in found) for found in (near, anywhere)]
        means = [statistics.mean(first for _, _, first in found) for found in (near, anywhere)]
        with capsys.disabled():
            print(
                f"\nround trips {trips} ms; TTFT p50: nearest {medians[0] * 1000:.0f} ms, random "
                f"{medians[1] * 1000:.0f} ms ({medians[1] / medians[0]:.1f} times); mean {means[0] * 1000:.0f} ms, "
                f"random {means[1] * 1000:.0f} ms"
            )

        # More than the near region runs at one time: the far one helps.
        busy = list(pool.map(lambda number: ask(url, number, 60), range(4 * SLOTS)))
        wrong = [found for number, found in enumerate(busy) if found[1] != text_of(number, 0, 60)]
        assert not wrong
        used = {region for region, _, _ in busy}
        assert used == {"eu", "us"}

        # The region is cut off under streams: no packet says so.
        streams = [pool.submit(ask, url, number, TOKENS) for number in range(SLOTS)]
        assert eventually(lambda: any(one["running"] for one in replicas(url) if one["region"] == "eu"), 60)
        regions["eu"].link("down")
        for number, stream in enumerate(streams):
            assert stream.result(240)[1] == text_of(number, 0, TOKENS), "each token once, in order"
        assert ask(url, 1, 4)[0] == "us"
        assert ask(strict, 1, 4)[0] == "503", "its data stays where it must"

        regions["eu"].link("up")
        assert eventually(lambda: ask(url, 1, 4)[0] == "eu", 180), "and back, once it has settled"
        assert ask(strict, 1, 4)[0] == "eu"
