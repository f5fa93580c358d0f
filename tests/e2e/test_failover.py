"""Engines killed under live streams: every stream goes on elsewhere, token for token, and is billed once (R-RT-7)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_supervisor import Server
from tests.engine.tiny import write_checkpoint
from tests.engine_host.client import eventually
from tests.scripted import make_text

SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 80}},
    "required": ["items"],
    "additionalProperties": False,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9, "seed": 11},
    {"temperature": 0.8, "seed": 12, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 13, "min_tokens": 150, "ignore_eos": False},
    {"temperature": 1.0, "seed": 14, "stop": ["qz", "\u0000\u0001"]},
    {"temperature": 0.7, "seed": 15, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1.0, "seed": 16, "n": 3},
    {"seed": 17, "response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": SCHEMA}}},
]


def tiny_model(folder: Path) -> Path:
    """A random model of bytes: nothing to read, but fast, and different after every token."""
    make_text(folder)
    return write_checkpoint(
        "llama-gqa", folder, spread=0.5, vocab_size=260, eos_token_id=256, max_position_embeddings=2048
    )


@contextmanager
def replicated(model: Path, replicas: int, *settings: str) -> Iterator[Server]:
    server = Server(
        *(str(model), "--set", f"models.0.replicas={replicas}", "--set", "models.0.name=tiny"),
        *("--set", "models.0.deterministic=true", "--set", "models.0.threads=1"),
        *("--set", "models.0.kv_memory=64MiB", "--set", "models.0.max_running=128", "--set", "encoders=[]"),
        # In turn: prompts that begin alike would all go to the replica that has their beginning in its cache.
        *("--set", "generation.time_limit_s=600", "--set", "routing.policy=round_robin"),
        *settings,
        defaults=False,
    )
    try:
        server.wait_for("curl http")
        yield server
    finally:
        server.close()


@dataclass
class Heard:
    """What a client got."""

    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    done: bool = False
    chunks: int = 0


async def lines(reply: httpx.Response) -> AsyncIterator[bytes]:
    """Lines end with a newline only: the random model says every other kind of line break."""
    rest = b""
    async for part in reply.aiter_raw():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line


async def listen(http: httpx.AsyncClient, index: int, heard: Heard, tokens: int) -> Heard:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"Stream number {index}: say something long."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **KINDS[index % len(KINDS)],
    }
    async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in lines(reply):
            if line == b"data: [DONE]":
                heard.done = True
            elif line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                heard.chunks += 1
                heard.usage = chunk.get("usage") or heard.usage
                for choice in chunk["choices"]:
                    place = choice["index"]
                    heard.texts[place] = heard.texts.get(place, "") + (choice["delta"].get("content") or "")
                    for entry in (choice["logprobs"] or {}).get("content") or ():
                        heard.logprobs.append((entry["token"], entry["logprob"]))
                    if choice["finish_reason"] is not None:
                        heard.ends[place] = choice["finish_reason"]
    return heard


def kill(engine: int) -> None:
    os.kill(engine, signal.SIGKILL)


def freeze_and_kill(engine: int) -> None:
    """The engine is frozen before the streams begin, so that they cannot be over when it is killed."""
    os.kill(engine, signal.SIGKILL)


async def drill(server: Server, streams: int, tokens: int, harm: Callable[[int], None] | None) -> list[Heard]:
    """Run many streams; harm is done to one engine when the first of them have begun."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as http:
        heard = [Heard() for _ in range(streams)]
        victim = server.processes("engine", "tiny")[0]
        if harm is freeze_and_kill:
            os.kill(victim, signal.SIGSTOP)
        tasks = [asyncio.create_task(listen(http, i, heard[i], tokens)) for i in range(streams)]
        if harm is not None:
            while sum(stream.chunks > 3 for stream in heard) < 3:  # noqa: ASYNC110 - it is another process's doing
                await asyncio.sleep(0.005)
            harm(victim)
        return await asyncio.gather(*tasks)


def counter(server: Server, name: str) -> float:
    rows = [row for row in httpx.get(f"{server.url}/metrics").text.splitlines() if row.startswith(name)]
    return sum(float(row.rpartition(" ")[2]) for row in rows)


def billed(server: Server) -> tuple[int, int]:
    """Prompt and completion tokens in the ledger."""
    rows = httpx.get(f"{server.url}/v1/usage?by=model").json()["data"]
    return sum(row["prompt_tokens"] for row in rows), sum(row["completion_tokens"] for row in rows)


def same_after(
    harm: Callable[[int], None], server: Server, streams: int, tokens: int, least: int | None = None
) -> None:
    calm = asyncio.run(drill(server, streams, tokens, None))
    before = billed(server)
    shaken = asyncio.run(drill(server, streams, tokens, harm))
    after = billed(server)
    assert all(stream.done for stream in shaken)
    for index, (expected, found) in enumerate(zip(calm, shaken, strict=True)):
        assert found.texts == expected.texts, f"stream {index} says something else"
        assert (found.ends, found.logprobs) == (expected.ends, expected.logprobs)
        assert found.usage is not None and expected.usage is not None
        for part in ("prompt_tokens", "completion_tokens"):
            assert found.usage[part] == expected.usage[part]
    used = [stream.usage for stream in shaken if stream.usage is not None]
    assert after[0] - before[0] == sum(usage["prompt_tokens"] for usage in used)
    assert after[1] - before[1] == sum(usage["completion_tokens"] for usage in used)
    moved = counter(server, "penstock_failovers_total")
    assert moved >= (streams / 4 if least is None else least), "many were on that replica"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def single(model: Path) -> Iterator[Server]:
    settings = ("server.engine_wait_s=60", "resilience.resume_s=60", "resilience.frozen_s=3")
    with replicated(model, 1, *(word for setting in settings for word in ("--set", setting))) as running:
        yield running


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Server]:
    with replicated(model, 2) as running:
        yield running


@pytest.fixture(scope="module")
def trio(model: Path) -> Iterator[Server]:
    with replicated(model, 3) as running:
        yield running


def command(server: Server, *words: str) -> str:
    """What `penstock` says to a command about the running server."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words, "--url", server.url], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def replicas(server: Server) -> dict[str, dict[str, Any]]:
    found = httpx.get(f"{server.url}/v1/admin/replicas").json()["data"]
    return {entry["replica"]: entry for entry in found}


class Traffic:
    """Short streams, all the time, on a thread of its own; every one must end well."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.answered = 0
        self.failures: list[str] = []
        self._stop = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join(60)
        assert not self.failures, self.failures[:3]

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=self._server.url, timeout=180) as http:
            await asyncio.gather(*(self._client(http, number) for number in range(3)))

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        while not self._stop:
            try:
                heard = await listen(http, number, Heard(), 40)
                assert heard.done, "a stream broke off"
                self.answered += 1
                await asyncio.sleep(0.05)
            except (AssertionError, httpx.HTTPError) as error:
                self.failures.append(repr(error))
                return


@pytest.mark.slow
def test_streams_of_a_killed_engine_go_on_and_say_what_they_would_have_said(pair: Server) -> None:
    same_after(
        kill, pair, streams=10, tokens=200, least=0
    )  # on a busy machine they may be over before a client sees it
    pair.wait_for("died (killed by SIGKILL)")
    same_after(freeze_and_kill, pair, streams=10, tokens=200, least=3)
    pair.wait_for("died (killed by SIGKILL)")


@pytest.mark.slow
def test_what_cannot_be_done_is_said(pair: Server) -> None:
    admin = f"{pair.url}/v1/admin/models/tiny"
    for path, body, says in (
        ("scale", {"replicas": 0}, "replicas"),
        ("restart", {"replica": "seven"}, "has no replica"),
        ("drain", {}, "replica"),
    ):
        refusal = httpx.post(f"{admin}/{path}", json=body)
        assert refusal.status_code == 400 and says in refusal.json()["error"]["message"]


@pytest.mark.slow
def test_streams_of_a_single_engine_go_on_when_it_has_been_restarted(single: Server) -> None:
    same_after(kill, single, streams=24, tokens=300)


@pytest.mark.slow
def test_streams_of_a_single_engine_that_freezes_go_on_when_it_has_been_killed_and_restarted(single: Server) -> None:
    same_after(lambda engine: os.kill(engine, signal.SIGSTOP), single, streams=4, tokens=200)
    single.wait_for("died (frozen: no heartbeat for")


@pytest.mark.slow
def test_no_request_sent_around_the_death_of_a_single_engine_is_lost(single: Server) -> None:
    async def ask_throughout() -> list[Heard]:
        async with httpx.AsyncClient(base_url=single.url, timeout=300) as http:
            asked = []
            for number in range(60):
                asked.append(asyncio.create_task(listen(http, number % 3, Heard(), 20)))
                if number == 20:
                    os.kill(single.processes("engine", "tiny")[0], signal.SIGKILL)
                await asyncio.sleep(0.01)
            return await asyncio.gather(*asked)

    assert all(heard.done for heard in asyncio.run(ask_throughout()))


@pytest.mark.slow
def test_a_rolling_restart_under_load_fails_no_request(trio: Server) -> None:
    before = {name: entry["instance"] for name, entry in replicas(trio).items()}
    with Traffic(trio) as traffic:
        assert "done after" in command(trio, "restart", "tiny")
        answered = traffic.answered
        assert eventually(lambda: traffic.answered > answered + 6, 30)
    after = {name: entry["instance"] for name, entry in replicas(trio).items()}
    assert before.keys() == after.keys() and not set(before.values()) & set(after.values()), "each is a new process"


@pytest.mark.slow
def test_replicas_come_and_go_at_run_time(trio: Server) -> None:
    with Traffic(trio):
        command(trio, "scale", "tiny", "2")
        assert eventually(lambda: set(replicas(trio)) == {"0", "1"}, 20)
        assert len(trio.processes("engine", "tiny")) == 2
        command(trio, "drain", "tiny", "--replica", "0")
        assert not replicas(trio)["0"]["ready"] and len(trio.processes("engine", "tiny")) == 1
        command(trio, "restart", "tiny", "--replica", "0")
        command(trio, "scale", "tiny", "3")
        assert eventually(lambda: sum(entry["ready"] for entry in replicas(trio).values()) == 3, 20)


@pytest.mark.slow
def test_a_hundred_streams_survive_the_death_of_their_engine(trio: Server) -> None:
    same_after(kill, trio, streams=100, tokens=600)
