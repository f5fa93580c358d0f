"""Several machines as one server (R-OPS-4): `penstock serve` and machines that join it, as processes with ports of
their own and a real Valkey. Machines are killed under streams, leave, come back; the controller moves; load scales the
fleet."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.command import penstock
from tests.e2e.test_failover import Heard, listen, tiny_model
from tests.ports import free_port
from tests.services import valkey

__all__ = ["valkey"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOM = 10
"""Ports of each machine."""
STREAMS, TOKENS = 12, 300


class FleetOfProcesses:
    """A serving machine called `a`, and others that join."""

    def __init__(self, folder: Path, redis_url: str, model: str, settings: str = "") -> None:
        self.folder = folder
        self.redis_url = redis_url
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = 20_000 + free_port() % 10_000
        self.secret = folder / "fleet.secret"
        penstock("fleet", "secret", str(self.secret))
        (folder / "model").mkdir()
        tiny_model(folder / "model")
        self.config = folder / "penstock.yaml"
        self.config.write_text(
            f"models:\n  - {{name: tiny, source: {folder / 'model'}, deterministic: true, threads: 1, "
            f"kv_memory: 64MiB, max_running: 64, {model}}}\n"
            f"encoders: []\nstore: {{url: 'sqlite:///{folder / 'ledger.db'}'}}\n"
            "routing: {policy: round_robin}\ngeneration: {time_limit_s: 600}\n"
            f"server: {{port: {self.port}, drain_s: 5, engine_wait_s: 60, console: false}}\n"
            f"fleet: {{url: '{redis_url}', secret_file: {self.secret}, lease_s: 4}}\n{settings}"
        )

    def start(self, name: str, *arguments: str) -> None:
        first = self._ports = self._ports + ROOM
        ports = f"fleet.ports={first}-{first + ROOM - 1}"
        command = [sys.executable, "-m", "penstock", *arguments, "-c", str(self.config), "--set", ports]
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=self.folder
            )

    def serve(self) -> None:
        self.start("a", "serve", "--set", "fleet.machine=a")

    def join(self, name: str, *arguments: str) -> None:
        self.start(name, "join", self.redis_url, "--as", name, "--engines", "3", *arguments)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes.pop(name).wait()

    def state(self) -> dict[str, Any]:
        try:
            return dict(httpx.get(f"{self.url}/v1/admin/fleet", timeout=180).json())
        except (httpx.HTTPError, ValueError):
            return {"machines": [], "engines": [], "models": [], "controller": ""}

    def machines(self) -> set[str]:
        return {one["name"] for one in self.state()["machines"]}

    def ready(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for engine in self.state()["engines"]:
            if engine["state"] == "ready":
                found[engine["machine"]] = found.get(engine["machine"], 0) + 1
        return found

    def has(self, count: int, without: str = "") -> bool:
        """Whether so many replicas are ready, and none on a machine that was lost."""
        ready = self.ready()
        return sum(ready.values()) == count and without not in ready

    def wait_for(self, condition: Callable[[], bool], within: float = 180.0) -> None:
        deadline = time.monotonic() + within
        while not condition():
            assert time.monotonic() < deadline, (self.state(), *(self.tail(name) for name in self.processes))
            time.sleep(0.25)

    def stays(self, condition: Callable[[], bool], seconds: float = 6.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert condition(), (self.state(), *(self.tail(name) for name in self.processes))
            time.sleep(0.25)

    def tail(self, name: str) -> str:
        return f"--- {name}\n{self.log(name).read_text()[-2500:]}"

    def wait_until_ready(self) -> None:
        self.wait_for(lambda: _answers(f"{self.url}/health/ready"))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=180).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def fleet(folder: Path, valkey: Any, model: str) -> Iterator[FleetOfProcesses]:
    joining = ("b", "c")
    running = FleetOfProcesses(folder, f"redis://127.0.0.1:{valkey.port}", model)
    try:
        running.serve()
        for name in joining:
            running.join(name)
        running.wait_until_ready()
        running.wait_for(lambda: running.machines() == {"a", *joining})
        yield running
    finally:
        running.close()


async def streams(url: str, harm: Callable[[], None] | None, count: int = STREAMS) -> list[Heard]:
    """Many streams at once; harm is done when most of them have begun."""
    heard = [Heard() for _ in range(count)]
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as http:
        tasks = [asyncio.create_task(listen(http, index * 8, heard[index], TOKENS)) for index in range(count)]
        if harm is not None:
            while sum(one.chunks > 3 for one in heard) < count * 3 // 4:
                assert not any(task.done() for task in tasks), "too fast to be harmed"
                await asyncio.sleep(0.01)
            harm()
        await asyncio.gather(*tasks)
    return heard


def test_a_machine_is_killed_under_streams_and_the_fleet_goes_on(tmp_path: Path, valkey: Any) -> None:
    with fleet(tmp_path, valkey, "replicas: 3") as running:
        running.wait_for(lambda: sum(running.ready().values()) == 3)
        # All three began on the first machine if it was alone then; spread them.
        if running.ready() != {"a": 1, "b": 1, "c": 1}:
            for count in (1, 3):
                body = {"replicas": count}
                answer = httpx.post(f"{running.url}/v1/admin/models/tiny/scale", json=body, timeout=300)
                assert answer.status_code == 200, answer.text
        assert running.ready() == {"a": 1, "b": 1, "c": 1}
        quiet = asyncio.run(streams(running.url, None))
        begin = time.monotonic()
        heard = asyncio.run(streams(running.url, lambda: running.kill("b")))
        assert all(one.done and one.usage is not None for one in heard), "every stream ended whole"
        assert [one.texts for one in heard] == [one.texts for one in quiet], "token for token"
        running.wait_for(lambda: running.has(3, without="b"))
        print(f"3 replicas again {time.monotonic() - begin:.1f} s after the streams began")
        replicas = httpx.get(f"{running.url}/v1/admin/replicas", timeout=180).json()["data"]
        assert {one["replica"].partition(".")[0] for one in replicas if one["ready"]} == {"a", "c"}

        # It comes back under its name and is not doubled.
        running.join("b")
        running.wait_for(lambda: running.machines() == {"a", "b", "c"})
        running.stays(lambda: sum(running.ready().values()) == 3)

        # The machine of the controller dies: another takes over, and replaces it.
        before = running.state()["controller"]
        victim = before if before != "a" else "c"
        running.kill(victim)
        running.wait_for(lambda: running.has(3, without=victim))
        if before != "a":
            running.wait_for(lambda: running.state()["controller"] not in ("", before))
        restarted = httpx.post(f"{running.url}/v1/admin/models/tiny/restart", json={}, timeout=300)
        assert restarted.status_code == 200, restarted.text
        told = [one.usage["completion_tokens"] for one in (*quiet, *heard) if one.usage is not None]
        usage = penstock("usage", "--by", "model", "-o", "json", "-c", str(running.config)).stdout
        (row,) = json.loads(usage)
        assert row["completion_tokens"] == sum(told) == 2 * STREAMS * TOKENS, "the ledger has what clients were told"


def test_a_controller_that_dies_is_succeeded(tmp_path: Path, valkey: Any) -> None:
    """The first machine to be up leads; here it is one that only joins."""
    running = FleetOfProcesses(tmp_path, f"redis://127.0.0.1:{valkey.port}", "replicas: 2")
    status = ("fleet", "status", "-o", "json", "-c", str(running.config))

    def read() -> Any:
        return json.loads(penstock(*status).stdout)

    try:
        running.join("b")
        running.wait_for(lambda: read()["controller"] == "b")
        running.serve()
        running.join("c")
        running.wait_until_ready()
        running.wait_for(lambda: running.machines() == {"a", "b", "c"} and sum(running.ready().values()) == 2)
        assert running.state()["controller"] == "b"
        term = running.state()["term"]
        running.kill("b")
        running.wait_for(lambda: running.state()["controller"] in ("a", "c"))
        assert running.state()["term"] > term
        running.wait_for(lambda: running.has(2, without="b"))

        # Through a gateway that has no supervisor.
        port = free_port()
        running.start("gateway", "gateway", "--port", str(port))
        lone = f"http://127.0.0.1:{port}"
        running.wait_for(lambda: _answers(f"{lone}/health/ready"))
        answer = httpx.post(f"{lone}/v1/admin/models/tiny/scale", json={"replicas": 3}, timeout=300)
        assert answer.status_code == 200, answer.text
        shown = httpx.get(f"{lone}/v1/admin/fleet", timeout=180).json()
        assert shown["models"][0]["wanted"] == 3 and len(shown["gateways"]) == 2
        assert penstock("top", "--once", "--url", lone).stdout.count("ready") >= 2

        # A machine leaves for maintenance: replaced first, and no stream is lost.
        def leave() -> None:
            penstock("drain", "--machine", "c", "--url", running.url)

        running.wait_for(lambda: running.ready().get("c", 0) > 0)
        heard = asyncio.run(streams(running.url, leave))
        assert all(one.done for one in heard)
        assert running.processes["c"].wait(120) == 0, running.tail("c")
        running.wait_for(lambda: running.ready() == {"a": 3})

        # A wrong secret is refused with a sentence, and so is a name that is taken.
        wrong = tmp_path / "wrong.secret"
        penstock("fleet", "secret", str(wrong))
        refused = penstock("join", running.redis_url, "--as", "x", "--secret-file", str(wrong))
        assert refused.returncode != 0 and "secret" in refused.stderr, refused.stderr
        taken = penstock("join", running.redis_url, "--as", "a", "-c", str(running.config))
        assert taken.returncode != 0 and "already" in taken.stderr, taken.stderr
        shown = penstock("fleet", "status", "-c", str(running.config)).stdout
        assert "controller: a" in shown and "tiny/a.0" in shown
        running.processes["a"].send_signal(signal.SIGTERM)
        assert running.processes["a"].wait(90) == 0, running.tail("a")
    finally:
        running.close()


def test_load_scales_the_fleet_over_machines(tmp_path: Path, valkey: Any) -> None:
    pace = "scale_up_cooldown_s: 1, stabilisation_s: 8, scale_down_cooldown_s: 2"
    with fleet(tmp_path, valkey, f"autoscale: {{min: 1, max: 3, concurrency: 2, {pace}}}") as running:
        running.wait_for(lambda: sum(running.ready().values()) == 1)

        async def burst() -> None:
            async with httpx.AsyncClient(base_url=running.url, timeout=300) as http:

                async def client(index: int) -> None:
                    while sum(running.ready().values()) < 3:
                        heard = await listen(http, index * 8, Heard(), TOKENS)
                        assert heard.done

                async with asyncio.timeout(300):
                    await asyncio.gather(*(client(index) for index in range(10)))

        asyncio.run(burst())
        assert len(running.ready()) >= 2, "on several machines"
        scaling = httpx.get(f"{running.url}/v1/admin/autoscale", timeout=180).json()["data"]
        assert scaling and scaling[0]["desired"] == 3
        running.wait_for(lambda: sum(running.ready().values()) == 1)


def test_the_registry_is_away_for_longer_than_a_lease_and_comes_back_empty(tmp_path: Path, valkey: Any) -> None:
    with fleet(tmp_path, valkey, "replicas: 2") as running:
        running.wait_for(lambda: running.has(2))
        before = running.ready()
        valkey.stop()
        heard = asyncio.run(streams(running.url, None))
        time.sleep(6.0)
        heard += asyncio.run(streams(running.url, None))
        assert all(one.done for one in heard), "everything goes on"
        valkey.start()
        running.wait_for(lambda: running.state()["controller"] != "" and running.machines() == {"a", "b", "c"})
        running.stays(lambda: running.ready() == before, 10.0)
        assert [one["name"] for one in running.state()["models"]] == ["tiny"], "the models were published again"
        running.kill(next(name for name in ("b", "c") if name in before) if len(before) > 1 else "b")
        running.wait_for(lambda: running.has(2))
