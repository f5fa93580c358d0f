"""`x-slo-ttft-ms` where the engine cannot keep it: a real one whose process is stopped, in the midst of its work or not
(R-ENG-20)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.backends.native import NativeBackend
from penstock.bench.gateway.harness import cpu_seconds
from penstock.protocol.versions import BEGUN_SINCE
from penstock.routing.dispatch import Resilience
from penstock.routing.registry import ServedModel
from penstock.routing.replicas import ReplicaSet
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.engine.tiny import write_checkpoint
from tests.engine_host.client import connected
from tests.gateway.accounting.test_charges import settings, total
from tests.gateway.accounting.test_targets import PATHS
from tests.gateway.conftest import Running, Serving, eventually
from tests.scripted import ScriptedEngine, make_text

LIMIT_S = 0.3
IN_TIME_S = 5.0
"""On a busy machine; without a timer nothing would be answered before the engine goes on."""


def long_prompt(letter: str) -> str:
    """Takes a few tenths of a second, unless a test has sent it before."""
    return letter * 3000


@dataclass
class Engine:
    process: subprocess.Popen[bytes]
    endpoint: str

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """`penstock engine` with a model of bytes, whose prompts take their time."""
    folder = tmp_path_factory.mktemp("model")
    make_text(folder, context_length=4096)
    write_checkpoint("llama-gqa", folder, vocab_size=260, eos_token_id=256, max_position_embeddings=4096)
    endpoint, config = f"ipc://{folder}/engine", folder / "penstock.yaml"
    config.write_text(f"models: [{{name: tiny, source: {folder}, dtype: float32, threads: 1, token_budget: 16}}]\n")
    command = [sys.executable, "-m", "penstock", "engine", "tiny", "-c", str(config), "--endpoint", endpoint]
    process = subprocess.Popen(command)
    try:
        with connected(endpoint) as client:
            client.hello()
        yield Engine(process, endpoint)
    finally:
        process.kill()
        process.wait()


@dataclass
class World:
    it: Running
    engine: Engine
    replicas: ReplicaSet

    async def ask(
        self, path: str = "/v1/chat/completions", limit_s: float | None = LIMIT_S, **body: Any
    ) -> tuple[httpx.Response, float]:
        """A reply, and after how long it came."""
        headers = {} if limit_s is None else {"x-slo-ttft-ms": str(1000 * limit_s)}
        began = time.monotonic()
        reply = await self.it.client.post(path, json={**PATHS[path], **body}, headers=headers)
        return reply, time.monotonic() - began

    async def measured(self, letter: str) -> float:
        """Seconds that a long prompt takes, which the engine then knows too."""
        reply, seconds = await self.ask("/v1/completions", None, prompt=long_prompt(letter), max_tokens=2)
        assert reply.status_code == 200
        return seconds

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        self.engine.stop()
        try:
            yield
        finally:
            self.engine.go_on()

    async def nothing_is_left(self) -> None:
        """In the gateway, nor in the engine; and it answers."""
        backend = self.replicas.members[0].backend
        await eventually(lambda: backend.in_flight == 0 and not self.replicas.in_flight)
        assert (await self.it.complete(prompt="a", max_tokens=1)).status_code == 200
        await eventually(lambda: not (backend.load.running or backend.load.waiting or backend.load.used_blocks))


@pytest.fixture
async def world(serving: Serving, engine: Engine, tmp_path: Path) -> AsyncIterator[World]:
    replicas = ReplicaSet("tiny", [NativeBackend(engine.endpoint)], resilience=Resilience(stall_s=1e6))
    async with serving(backend=replicas, **settings(tmp_path)) as it:
        await replicas.wait_ready(60)
        yield World(it, engine, replicas)


def assert_refused(reply: httpx.Response, seconds: float) -> None:
    assert (reply.status_code, reply.headers["x-penstock-reason"]) == (503, "queue_timeout"), reply.text
    assert int(reply.headers["retry-after"]) >= 1
    assert LIMIT_S <= seconds < IN_TIME_S


async def test_an_engine_that_stands_still_holds_nobody_longer_than_the_client_allows(world: World) -> None:
    await world.nothing_is_left()
    before = await total(world.it)
    asks: list[dict[str, Any]] = [{"path": path, "stream": stream} for path in PATHS for stream in (False, True)]
    asks += [{"n": 3}, {"path": "/v1/completions", "prompt": ["x", "y"]}]
    async with world.stopped():
        for reply, seconds in await asyncio.gather(*(world.ask(**ask) for ask in asks)):
            assert_refused(reply, seconds)
        assert await world.it.metric('penstock_rejections_total{reason="queue_timeout"}') == len(asks)
        used = await total(world.it)
        assert (used["completion_tokens"], used["cost"]) == (before["completion_tokens"], before["cost"])
    await world.nothing_is_left()


async def test_a_prompt_that_has_begun_is_finished_however_late(world: World) -> None:
    (member,) = world.replicas.members
    limit_s = max(4 * await world.measured("a"), 1.0)
    sent = {"prompt": long_prompt("b"), "max_tokens": 2, "ignore_eos": True}
    asked = asyncio.create_task(world.ask("/v1/completions", limit_s, **sent))
    await eventually(lambda: any(leg.computing for leg in member.legs.values()))
    async with world.stopped():
        waiting = [asyncio.create_task(world.ask(stream=stream)) for stream in (False, True)]
        for reply, seconds in await asyncio.gather(*waiting):
            assert_refused(reply, seconds)
        await asyncio.sleep(limit_s)
        assert not asked.done(), "it was not stopped in the midst of it"
    reply, seconds = await asked
    assert reply.status_code == 200 and seconds > limit_s
    assert reply.json()["usage"] == {**reply.json()["usage"], "prompt_tokens": 3000, "completion_tokens": 2}
    await world.nothing_is_left()


async def test_a_stream_whose_status_is_out_ends_with_an_error(
    serving: Serving, engine: Engine, text: TextModel
) -> None:
    replicas = ReplicaSet("tiny", [NativeBackend(engine.endpoint)])
    async with serving(backend=replicas, hold_status_s=0.05) as it:
        await replicas.wait_ready(60)
        world = World(it, engine, replicas)
        async with world.stopped():
            reply, seconds = await world.ask(stream=True)
        assert reply.status_code == 200 and seconds < IN_TIME_S
        last = next(line for line in reversed(reply.text.splitlines()) if line)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "overloaded"
        await world.nothing_is_left()


async def test_a_fallback_answers_in_its_place(serving: Serving, engine: Engine, text: TextModel) -> None:
    smaller = ServedModel("smaller", text, ReplicaSet("smaller", [InProcessBackend(ScriptedEngine(text))]))
    replicas = ReplicaSet("tiny", [NativeBackend(engine.endpoint)])
    async with serving(backend=replicas, more=[smaller], served={"fallback": ("smaller",)}) as it:
        await replicas.wait_ready(60)
        world = World(it, engine, replicas)
        async with world.stopped():
            reply, seconds = await world.ask()
            assert reply.status_code == 200 and LIMIT_S <= seconds < IN_TIME_S
            assert reply.json()["choices"][0]["message"]["content"] == "Hello, world!"
        await world.nothing_is_left()


async def test_an_engine_of_an_older_release_keeps_the_time_alone(
    serving: Serving, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not say that it has begun: what it computes must not be refused."""
    monkeypatch.setattr("penstock.protocol.versions.PROTOCOL_VERSION", BEGUN_SINCE - 1)
    replicas = ReplicaSet("tiny", [NativeBackend(engine.endpoint)])
    async with serving(backend=replicas) as it:
        await replicas.wait_ready(60)
        (member,) = replicas.members
        assert isinstance(member.backend, NativeBackend) and member.backend.protocol == BEGUN_SINCE - 1
        world = World(it, engine, replicas)
        limit_s = max(4 * await world.measured("c"), 1.0)
        before = cpu_seconds([engine.process.pid])
        asked = asyncio.create_task(world.ask("/v1/completions", limit_s, prompt=long_prompt("d"), max_tokens=2))
        await eventually(lambda: cpu_seconds([engine.process.pid]) > before + 0.05)
        async with world.stopped():
            await asyncio.sleep(limit_s)
        reply, seconds = await asked
        assert reply.status_code == 200 and seconds > limit_s


async def test_a_prompt_that_takes_longer_than_its_client_allows_is_refused(world: World) -> None:
    limit_s = await world.measured("e") / 3
    before = await total(world.it)
    text, chat = {"prompt": long_prompt("f")}, {"messages": [{"role": "user", "content": long_prompt("g")}]}
    for path, sent in (("/v1/completions", text), ("/v1/chat/completions", {**chat, "stream": True})):
        reply, _ = await world.ask(path, limit_s, max_tokens=2, **sent)
        assert (reply.status_code, reply.headers["x-penstock-reason"]) == (503, "slo_ttft"), reply.text
        assert "longer than `x-slo-ttft-ms` leaves" in reply.json()["error"]["message"]
        assert int(reply.headers["retry-after"]) >= 1
    assert (await total(world.it))["completion_tokens"] == before["completion_tokens"]
    await world.nothing_is_left()
