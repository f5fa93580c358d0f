"""A fallback never makes things worse: an engine is killed, requests of every kind are sent at once, and all succeed,
whether the fallback can answer them, cannot, may not, or is down itself (R-RT-9, R-GW-9)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_failover import replicated, tiny_model
from tests.e2e.test_hybrid import Elsewhere, elsewhere
from tests.e2e.test_supervisor import Server

HOME = {"x-penstock-require": "external=false"}
SAID = [{"role": "user", "content": "hi"}]
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "chat": ("/v1/chat/completions", {"messages": SAID}, {}),
    "stream": ("/v1/chat/completions", {"messages": SAID, "stream": True}, {}),
    "messages": ("/v1/messages", {"messages": SAID}, {}),
    "completion": ("/v1/completions", {"prompt": "Once"}, {}),
    "token ids": ("/v1/completions", {"prompt": [79, 110, 99, 101]}, {}),
    "echo": ("/v1/completions", {"prompt": "Once", "echo": True, "logprobs": 1}, {}),
    "prompt logprobs": ("/v1/chat/completions", {"messages": SAID, "prompt_logprobs": 1}, {}),
    "bias": ("/v1/chat/completions", {"messages": SAID, "logit_bias": {"65": -10}}, {}),
    "token stops": ("/v1/chat/completions", {"messages": SAID, "stop_token_ids": [66]}, {}),
    "not permitted": ("/v1/chat/completions", {"messages": SAID}, HOME),
    "not permitted, streamed": ("/v1/chat/completions", {"messages": SAID, "stream": True}, HOME),
    "not permitted, completion": ("/v1/completions", {"prompt": "Once"}, HOME),
}
ONLY_HERE = {"token ids", "prompt logprobs", "bias", "token stops", *(name for name in KINDS if "permitted" in name)}
"""What the fallback cannot answer, or may not get."""


@pytest.fixture(scope="module")
def there() -> Iterator[Elsewhere]:
    with elsewhere() as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, there: Elsewhere) -> Iterator[Server]:
    model = tiny_model(tmp_path_factory.mktemp("model"))
    far = f"remotes=[{{name: far, model: m, urls: ['{there.wire.url}'], check_s: 3600}}]"
    settings = (far, "models.0.fallback=[far]", "server.engine_wait_s=180", "resilience.resume_s=60")
    with replicated(model, 1, *(word for setting in settings for word in ("--set", setting))) as running:
        yield running


async def ask(http: httpx.AsyncClient, name: str) -> tuple[int, str, str]:
    """Status, the model that answered, and the body."""
    path, body, headers = KINDS[name]
    sent = {"model": "tiny", "max_tokens": 4, **body}
    reply = await http.post(path, json=sent, headers=headers)
    return reply.status_code, reply.headers.get("x-penstock-model", ""), reply.text


async def ask_all(server: Server) -> dict[str, tuple[int, str, str]]:
    """Kill the engine and ask at once, in every way."""
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as http:
        (engine,) = server.processes("engine", "tiny")
        os.kill(engine, signal.SIGKILL)
        found = await asyncio.gather(*(ask(http, name) for name in KINDS))
    return dict(zip(KINDS, found, strict=True))


def check(found: dict[str, tuple[int, str, str]]) -> None:
    failed = {name: answer for name, answer in found.items() if answer[0] != 200 or '"error"' in answer[2]}
    assert not failed


@pytest.mark.slow
def test_all_succeed_while_the_engine_restarts(server: Server, there: Elsewhere) -> None:
    del there.wire.asked[:]
    found = asyncio.run(ask_all(server))
    check(found)
    assert {name for name, (_, model, _) in found.items() if model == "tiny"} >= ONLY_HERE
    assert found["chat"][1] == found["messages"][1] == "far", "what another can answer does not wait"
    assert len(there.wire.asked) <= len(KINDS) - len(ONLY_HERE), "nothing of the others was sent there"


@pytest.mark.slow
def test_all_succeed_while_the_fallback_is_down_too(server: Server, there: Elsewhere) -> None:
    there.stop()
    try:
        found = asyncio.run(ask_all(server))
    finally:
        there.start()
    check(found)
    assert {model for _, model, _ in found.values()} == {"tiny"}


@pytest.mark.slow
def test_a_stream_that_has_begun_waits_for_its_engine(server: Server, there: Elsewhere, tmp_path: Path) -> None:
    async def run() -> str:
        async with httpx.AsyncClient(base_url=server.url, timeout=240) as http:
            body = {"model": "tiny", "messages": SAID, "max_tokens": 400, "ignore_eos": True, "stream": True}
            text = ""
            async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                async for part in reply.aiter_text():
                    if not text:
                        (engine,) = server.processes("engine", "tiny")
                        os.kill(engine, signal.SIGKILL)
                    text += part
            return text

    text = asyncio.run(run())
    assert "[DONE]" in text and '"error"' not in text
