"""Acceptance 5: many streams, random departures, a killed engine; nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

import httpx
import pytest

from tests.e2e.conftest import MODEL, Server


def body(i: int, max_tokens: int) -> dict[str, object]:
    content = f"Story number {i}: tell me about " + "very " * (i % 7) + "big trees."
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "stream": True, "max_tokens": max_tokens, "ignore_eos": True}


async def read(client: httpx.AsyncClient, i: int, max_tokens: int, leave_after: float | None) -> str:
    """How the stream ended: `done`, `left`, or the code of an error."""
    try:
        async with asyncio.timeout(leave_after):
            async with client.stream("POST", "/v1/chat/completions", json=body(i, max_tokens)) as reply:
                text = (await reply.aread()).decode()
    except TimeoutError:
        return "left"
    if reply.status_code != 200:
        return str(reply.json()["error"]["code"])
    last = text.rstrip().rpartition("\n")[2]
    return "done" if last == "data: [DONE]" else "engine_lost" if "engine_lost" in last else last


def settled(server: Server, within: float = 120) -> None:
    """Nothing runs, nothing waits, and no block is held."""
    deadline = time.monotonic() + within
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "penstock_kv_blocks_used")
    while any(server.metric(name) for name in names):
        assert time.monotonic() < deadline, {name: server.metric(name) for name in names}
        time.sleep(0.1)
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def client(server: Server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits)


@pytest.mark.slow
async def test_64_streams_with_random_departures_leave_nothing_behind(server: Server) -> None:
    rng = random.Random(5)
    async with client(server) as http:
        ends = await asyncio.gather(
            *(read(http, i, 8, rng.choice([None, None, 0.05, 0.3, 1.0, 3.0])) for i in range(64))
        )
    assert set(ends) <= {"done", "left"}
    assert ends.count("done") >= 10
    settled(server)


@pytest.mark.slow
async def test_streams_of_a_killed_engine_go_on_when_it_is_back(server: Server) -> None:
    [engine] = server.children("smollm2-135m")
    async with client(server) as http:
        streams = [asyncio.create_task(read(http, i, 30, None)) for i in range(8)]
        while server.metric("vllm:num_requests_running") == 0:  # noqa: ASYNC110 - it is another process's state
            await asyncio.sleep(0.05)
        os.kill(engine, signal.SIGKILL)
        streams += [asyncio.create_task(read(http, i, 4, None)) for i in range(4)]  # nobody knows of it yet
        assert set(await asyncio.gather(*streams)) == {"done"}
    assert server.children("smollm2-135m") != [engine]
    settled(server)
