"""A fallback never makes things worse: where nobody else can answer a request, it waits for its model (R-RT-9)."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from penstock.protocol.errors import EngineLost
from penstock.routing.registry import ServedModel
from penstock.routing.replicas import ReplicaSet
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving, eventually
from tests.gateway.generation.test_remotes import world
from tests.scripted import ScriptedEngine

BACK_S = 0.3
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "token ids": ("/v1/completions", {"prompt": [72, 105]}),
    "scores": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 1}),
}


class Restarting(InProcessBackend):
    """An engine that can be away."""

    def leave(self) -> None:
        self._went_down(EngineLost())

    def come_back(self) -> None:
        self._came_up(self._engine.info)


async def ask(it: Running, kind: str, **more: Any) -> tuple[int, str]:
    path, body = ASKS[kind]
    reply = await it.client.post(path, json={"model": "tiny", "max_tokens": 3, **body, **more})
    return reply.status_code, reply.headers.get("x-penstock-model", reply.text)


@pytest.mark.parametrize("down", [False, True])
async def test_what_nobody_else_can_answer_waits(serving: Serving, text: TextModel, down: bool) -> None:
    engine = ScriptedEngine(text)
    backend = Restarting(engine)
    options = {"served": {"fallback": ("far",)}, "backend": ReplicaSet("tiny", [backend]), "engine_wait_s": 60.0}
    async with world(serving, None, engine, **options) as it:
        assert await ask(it.front, "chat") == (200, "tiny")
        backend.leave()
        if down:
            it.behind.stop.set()
            await asyncio.sleep(0.3)
        waiting = {kind: asyncio.create_task(ask(it.front, kind)) for kind in ASKS}
        if not down:
            await asyncio.wait([waiting["chat"]])
        await asyncio.sleep(BACK_S)
        assert [kind for kind, task in waiting.items() if task.done()] == ([] if down else ["chat"])
        backend.come_back()
        found = {kind: await task for kind, task in waiting.items()}
        assert found == {kind: (200, "far" if kind == "chat" and not down else "tiny") for kind in ASKS}


async def test_the_first_of_several_that_is_back_answers(serving: Serving, text: TextModel) -> None:
    engines = [ScriptedEngine(text), ScriptedEngine(text, "Small talk.")]
    first, second = (Restarting(engine) for engine in engines)
    smaller = ServedModel("smaller", text, ReplicaSet("smaller", [second]))
    options = {"served": {"fallback": ("smaller",)}, "more": [smaller], "engine_wait_s": 60.0}
    async with serving(engines[0], backend=ReplicaSet("tiny", [first]), **options) as it:
        first.leave()
        second.leave()
        waiting = asyncio.create_task(ask(it, "chat"))
        await asyncio.sleep(BACK_S)
        assert not waiting.done()
        second.come_back()
        assert await waiting == (200, "smaller")
        second.leave()
        own = asyncio.create_task(ask(it, "token ids"))
        await asyncio.sleep(BACK_S)
        second.come_back()
        await asyncio.sleep(BACK_S)
        assert not own.done(), "its tokens are those of the model that was asked for"
        first.come_back()
        assert await own == (200, "tiny")


async def test_when_nobody_is_back_in_time_it_is_the_first_models_error(serving: Serving, text: TextModel) -> None:
    backend = Restarting(ScriptedEngine(text))
    async with AsyncExitStack() as stack:
        options = {"served": {"fallback": ("far",)}, "backend": ReplicaSet("tiny", [backend]), "engine_wait_s": 0.3}
        it = await stack.enter_async_context(world(serving, **options))
        backend.leave()
        path, body = ASKS["token ids"]
        reply = await it.front.client.post(path, json={"model": "tiny", **body})
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_unavailable"


@pytest.mark.parametrize("fallback", [(), ("smaller",)])
async def test_a_client_says_how_long_its_request_may_wait_for_an_engine(
    serving: Serving, text: TextModel, fallback: tuple[str, ...]
) -> None:
    """With `x-slo-ttft-ms`; an engine that is away is no reason to let it wait longer."""
    first, second = (Restarting(ScriptedEngine(text)) for _ in range(2))
    smaller = ServedModel("smaller", text, ReplicaSet("smaller", [second]))
    options = {"served": {"fallback": fallback}, "more": [smaller], "engine_wait_s": 5.0}
    async with serving(backend=ReplicaSet("tiny", [first]), **options) as it:
        first.leave()
        second.leave()
        others = ("/completion", {"prompt": ["a", 1, "b"]}), ("/api/generate", {})
        for path, body in (*ASKS.values(), *others):
            reply = await it.client.post(path, json={"model": "tiny", **body}, headers={"x-slo-ttft-ms": "100"})
            assert reply.status_code == 503 and reply.headers["x-penstock-reason"] == "queue_timeout"
            assert "waited 0." in reply.text or "waited 0 s" in reply.text, reply.text


async def test_a_stream_whose_status_is_out_waits_for_its_engine(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text)
    engine.hold = True
    backend = Restarting(engine)
    options = {"served": {"fallback": ("far",)}, "backend": ReplicaSet("tiny", [backend]), "hold_status_s": 0.05}
    async with world(serving, None, engine, **options) as it:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with it.front.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200
            await eventually(lambda: len(engine.seen) == 1)
            backend.leave()
            await asyncio.sleep(0.1)
            engine.hold = False
            backend.come_back()
            said = (await reply.aread()).decode()
        assert "[DONE]" in said and '"error"' not in said and not it.behind.engine.seen
