"""A second Penstock behind the gateway, asked in every dialect that it answers itself (R-RT-8, R-RT-9)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.backends.remote.server import RemoteServer
from penstock.backends.remote.upstream import DialectName, Upstream
from penstock.engine.request import Request
from penstock.routing.remotes import RemoteModel
from penstock.text import TextModel
from tests.backends.remote.scripted_server import TOOLS
from tests.gateway.conftest import Running, Serving, events, eventually
from tests.scripted import ScriptedEngine

SPOKEN = [
    *("penstock", "anthropic", "ollama"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("openai", "vllm", "sglang", "llama.cpp", "tensorrt-llm")),
]
"""Dialects for which a Penstock has the endpoints."""


@asynccontextmanager
async def pair(
    serving: Serving, dialect: DialectName, engine: ScriptedEngine | None = None
) -> AsyncIterator[tuple[Running, Running]]:
    """A gateway with the remote model `far`, and the one behind it."""
    async with serving(engine, time_limit_s=None) as behind:
        upstream = Upstream(
            f"http://127.0.0.1:{behind.port}/v1", "tiny", timeout_s=60.0, dialect=dialect, max_tokens=64
        )
        far = RemoteModel("far", [RemoteServer("0", upstream)], metrics_s=0.2)
        async with serving(others=[far]) as front:
            yield front, behind


@pytest.mark.parametrize("dialect", SPOKEN)
async def test_a_chat(serving: Serving, dialect: DialectName) -> None:
    async with pair(serving, dialect) as (front, behind):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
        reply = await front.chat(model="far", messages=messages, temperature=0.5, top_p=0.9, stop=["!"], max_tokens=40)
        answer = reply.json()
        assert reply.status_code == 200, answer
        assert answer["choices"][0]["message"]["content"] == "Hello, world"
        assert answer["choices"][0]["finish_reason"] == "stop"
        asked = behind.engine.seen[-1]
        assert (asked.params.temperature, asked.params.top_p, asked.params.max_tokens) == (0.5, 0.9, 40)
        spoken = behind.parts.registry.route("tiny").model.text.decode(asked.prompt)
        assert "Be brief." in spoken and "hi" in spoken
        assert answer["usage"]["prompt_tokens"] == len(asked.prompt)
        assert answer["usage"]["completion_tokens"] == 13

        # As our own answers have it, and as SDKs send it.
        history = [*messages, {**answer["choices"][0]["message"], "annotations": []}, messages[1]]
        again = await front.chat(model="far", messages=history, modalities=["text"], audio=None)
        assert again.status_code == 200, again.text

        cut = (await front.chat(model="far", max_tokens=3)).json()
        assert cut["choices"][0]["finish_reason"] == "length" and cut["choices"][0]["message"]["content"] == "Hel"

        streamed = await front.chat(model="far", stream=True)
        chunks = [json.loads(data) for data in events(streamed.text)[:-1]]
        assert "".join(c["delta"].get("content") or "" for k in chunks for c in k["choices"]) == "Hello, world!"


@pytest.mark.parametrize("dialect", SPOKEN)
async def test_parallel_calls(serving: Serving, text: TextModel, dialect: DialectName) -> None:
    called = (
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
        '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    )

    def script(request: Request) -> list[int]:
        return [*text.encode(called), text.eos_token_ids[0]]

    async with pair(serving, dialect, ScriptedEngine(text, script, max_model_len=2048)) as (front, behind):
        reply = (await front.chat(model="far", tools=TOOLS, max_tokens=400)).json()
        calls = reply["choices"][0]["message"]["tool_calls"]
        made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
        assert made == [("weather", {"city": "Rome"}), ("clock", {})]
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
        assert len({call["id"] for call in calls}) == 2

        said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": calls}]
        said += [{"role": "tool", "tool_call_id": call["id"], "content": f"r{n}"} for n, call in enumerate(calls)]
        again = await front.chat(model="far", messages=said, tools=TOOLS, max_tokens=400)
        assert again.status_code == 200, again.text
        prompt = behind.parts.registry.route("tiny").model.text.decode(behind.engine.seen[-1].prompt)
        assert "r0" in prompt and "r1" in prompt and "Rome" in prompt


@pytest.mark.parametrize("dialect", ["anthropic", "ollama"])
async def test_what_a_dialect_has_not_is_refused_or_named(serving: Serving, dialect: DialectName) -> None:
    async with pair(serving, dialect) as (front, _):
        refused = await front.chat(model="far", logit_bias={"5": 1})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "logit_bias"
        assert refused.json()["error"]["code"] == "unsupported_parameter" and dialect in refused.text
        named = await front.chat(model="far", ignore_eos=False, chat_template_kwargs={})
        assert named.status_code == 200 and "ignore_eos" in named.headers["x-penstock-ignored"]
        plain = await front.client.post("/v1/responses", json={"model": "far", "input": "hi", "store": False})
        assert plain.status_code == 200 and "x-penstock-ignored" not in plain.headers


@pytest.mark.parametrize("dialect", ["penstock"])
async def test_its_load_is_shown(serving: Serving, text: TextModel, dialect: DialectName) -> None:
    engine = ScriptedEngine(text, lambda request: [65] * 400, step_s=0.01)
    async with pair(serving, dialect, engine) as (front, behind):
        far = front.parts.registry.remotes["far"]
        await eventually(lambda: far.members[0].server.load is not None)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "stream": True}
        async with behind.client.stream("POST", "/v1/chat/completions", json=body):
            await eventually(lambda: (load := far.members[0].server.load) is not None and load.running == 1)
            found = (await front.client.get("/v1/admin/replicas")).json()["data"]
            [there] = [entry for entry in found if entry["remote"]]
            assert there["running"] == 1 and there["in_flight"] == 0 and there["dialect"] == dialect
            shown = (await front.client.get("/metrics")).text
            assert 'penstock_remote_requests_running{model_name="far",engine="0"} 1' in shown
        listed = (await front.client.get("/v1/models/far")).json()
        assert listed["saturated"] is False and listed["capabilities"]["logprobs"] is True
