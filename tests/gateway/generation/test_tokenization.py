"""Long texts: nobody waits for another's, the work counts, and nothing of a refused request stays in memory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import TierConfig
from tests.gateway.accounting.test_quotas import settings, sign_in
from tests.gateway.conftest import Running, Serving, garbage

LONG = "The quick brown fox, aged 13, jumps over lazy dogs; isn't that so?\n" * 40_000
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": LONG})}}
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": LONG, "parameters": {"type": "object"}}}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "content": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "arguments": ("/v1/chat/completions", {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}),
    "tools": ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL]}),
    "prompt": ("/v1/completions", {"prompt": LONG}),
    "ids": ("/v1/completions", {"prompt": [1] * 400_000}),
    "responses": ("/v1/responses", {"input": LONG, "store": False}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
    "tokenize": ("/v1/tokenize", {"prompt": LONG}),
    "tokenize chat": ("/v1/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
    "detokenize": ("/v1/detokenize", {"tokens": [1] * 400_000}),
}


@asynccontextmanager
async def stalls() -> AsyncIterator[list[float]]:
    """CPU seconds that this process, in which the gateway runs, takes between two turns of its event loop: many when
    a callback works for long, or a thread holds the interpreter lock. A busy machine does not count."""
    found: list[float] = []

    async def watch() -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(0.001)
            found.append(time.process_time() - before)

    task = asyncio.create_task(watch())
    try:
        yield found
    finally:
        task.cancel()


@pytest.mark.parametrize("name", REFUSED)
async def test_text_that_cannot_fit_stops_nobody(serving: Serving, name: str) -> None:
    path, body = REFUSED[name]
    sent = json.dumps({"model": "tiny", **body}).encode()
    async with serving() as running, stalls() as found:
        reply = await running.client.post(path, content=sent, headers=JSON)
        assert reply.status_code == 400 and "token" in reply.text, reply.text[:500]
    assert max(found) < 0.5, sorted(found)[-5:]


async def test_nothing_of_a_refused_request_stays_in_memory(serving: Serving) -> None:
    async with serving() as running:
        await running.chat(messages=[{"role": "user", "content": LONG}])
        with garbage() as left:
            for _ in range(3):
                reply = await running.chat(messages=[{"role": "user", "content": LONG}])
                assert reply.status_code == 400
        assert not left, left


async def test_refused_prompts_count(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path, TierConfig(name="free", requests_per_minute=3))) as running:
        await sign_in(running)
        for text in (LONG, "a" * 3000):  # refused by its size, and by its tokens
            reply = await running.chat(messages=[{"role": "user", "content": text}])
            assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"
        assert (await running.chat()).headers["x-ratelimit-remaining-requests"] == "0"
        reply = await running.chat(messages=[{"role": "user", "content": LONG}])
        assert reply.status_code == 429, "before any work"


async def test_the_tokens_of_a_refused_prompt_count(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path, TierConfig(name="free", tokens_per_minute=5000))) as running:
        await sign_in(running)
        reply = await running.complete(prompt=LONG)
        assert reply.status_code == 400 and "at least" in reply.json()["error"]["message"]
        reply = await running.complete(prompt=LONG)
        assert reply.status_code == 429 and reply.json()["error"]["code"] == "rate_limit_exceeded"


async def test_counting_tokens_has_limits_of_its_own(serving: Serving, tmp_path: Path) -> None:
    async def ask(running: Running, path: str, **body: Any) -> int:
        return (await running.client.post(path, json={"model": "tiny", **body})).status_code

    async with serving(**settings(tmp_path, TierConfig(name="free", requests_per_minute=3))) as running:
        await sign_in(running)
        asked = [
            await ask(running, "/v1/tokenize", prompt="abc"),
            await ask(running, "/v1/detokenize", tokens=[1, 2]),
            await ask(running, "/v1/messages/count_tokens", messages=[USER]),
            await ask(running, "/v1/tokenize", prompt="abc"),
        ]
        assert asked == [200, 200, 200, 429]
        assert (await running.chat()).headers["x-ratelimit-remaining-requests"] == "2", "requests have theirs"


async def test_a_body_of_many_small_values_is_refused_before_it_is_decoded(serving: Serving) -> None:
    async with serving() as running:
        body = b'{"model": "tiny", "messages": [{"role": "user", "content": [' + b"{}," * 600_000 + b"{}]}]}"
        reply = await running.client.post("/v1/chat/completions", content=body, headers=JSON)
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "body_too_complex", reply.text[:300]
