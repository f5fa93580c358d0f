"""A real server with a real model, asked in every dialect that it answers itself: all get the same text (R-RT-8)."""

from __future__ import annotations

import asyncio

import pytest

from penstock.backends.remote.server import RemoteServer
from penstock.backends.remote.upstream import DialectName, Upstream
from tests.backends.remote.scripted_server import Answer, ask
from tests.e2e.conftest import MODEL, Server

pytestmark = pytest.mark.slow
QUESTION = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]


async def asked(server: Server, dialect: DialectName) -> tuple[Answer, Answer | None]:
    url = f"{server.url}/v1" if dialect == "openai" else server.url
    there = RemoteServer("0", Upstream(url, MODEL, dialect=dialect))
    await there.start()
    try:
        await there.check()
        await there.look()
        if dialect in ("vllm", "penstock"):
            assert there.load is not None and there.load.running is not None and there.load.kv_usage is not None
        if dialect == "ollama":
            assert there.load is not None and there.load.loaded
        chat = await ask(there, messages=QUESTION, temperature=0, max_tokens=24)
        text = None
        if there.supports("completions"):
            text = await ask(there, "completions", prompt="The capital of France is", temperature=0, max_tokens=4)
        if there.supports("tokenize_chat"):
            assert chat.usage is not None
            assert (await there.count({"messages": QUESTION}, "r")).count == chat.usage[0]
        assert there.in_flight == 0
        return chat, text
    finally:
        await there.close()


async def test_all_get_the_same_answer(server: Server) -> None:
    dialects: list[DialectName] = ["openai", "penstock", "vllm", "sglang", "llama.cpp", "anthropic", "ollama"]
    found = [await asked(server, dialect) for dialect in dialects]
    assert {chat.text for chat, _ in found} == {found[0][0].text} and "Paris" in found[0][0].text
    assert {(chat.usage or (0, 0))[:2] for chat, _ in found} == {(found[0][0].usage or (0, 0))[:2]}
    assert {chat.reason for chat, _ in found} == {"stop"}
    [text] = {text.text for _, text in found if text is not None}
    assert "Paris" in text


async def test_leaving_stops_it(server: Server) -> None:
    for dialect in ("anthropic", "ollama"):
        there = RemoteServer("0", Upstream(server.url, MODEL, dialect=dialect))  # type: ignore[arg-type]
        await there.start()
        try:
            body = {"messages": [{"role": "user", "content": "Count to a thousand."}], "max_tokens": 1500}
            chunks = there.stream(body, "r")
            async for _ in chunks:
                break
            await chunks.aclose()
            assert there.in_flight == 0
            await asyncio.to_thread(server.wait_for, "vllm:num_requests_running", 0)
        finally:
            await there.close()
