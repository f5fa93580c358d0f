"""Models that other servers run: a second gateway on a real port stands for any of them (R-RT-7, R-RT-8)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.backends.remote.server import RemoteServer
from penstock.backends.remote.upstream import Upstream
from penstock.config.guardrails import GuardrailConfig
from penstock.config.remotes import RemoteConfig
from penstock.errors import ConfigError
from penstock.routing.breaker import BreakerPolicy
from penstock.routing.registry import ServedModel
from penstock.routing.remotes import RemoteModel
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving, events, eventually
from tests.ports import free_port
from tests.scripted import ScriptedEngine

HELLO = [{"role": "user", "content": "hi"}]


@dataclass
class World:
    """A gateway in front of another one."""

    front: Running
    behind: Running

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.front.chat(model="far", **body)


def far(*ports: int, **options: Any) -> RemoteModel:
    upstreams = [Upstream(f"http://127.0.0.1:{port}/v1", "tiny", timeout_s=60.0) for port in ports]
    servers = [RemoteServer(str(index), upstream) for index, upstream in enumerate(upstreams)]
    return RemoteModel("far", servers, aliases=("distant",), input_price=3.0, output_price=4.0, **options)


@asynccontextmanager
async def world(
    serving: Serving, behind: ScriptedEngine | None = None, front: ScriptedEngine | None = None, **settings: Any
) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        second = await stack.enter_async_context(serving(behind, time_limit_s=None))
        remote = far(second.port, breaker=BreakerPolicy(failures=100), **settings.pop("remote", {}))
        first = await stack.enter_async_context(serving(front, others=[remote], **settings))
        yield World(first, second)


async def test_it_answers_like_a_model_that_runs_here(serving: Serving) -> None:
    async with world(serving) as it:
        reply = await it.chat(max_tokens=5)
        answer = reply.json()
        assert reply.status_code == 200, answer
        assert answer["model"] == "far" and answer["choices"][0]["message"]["content"] == "Hello"
        assert answer["choices"][0]["finish_reason"] == "length"
        there = (await it.behind.chat(max_tokens=5)).json()["usage"]
        assert answer["usage"] == there, "what the other server counted"
        assert reply.headers["x-penstock-model"] == "far" and reply.headers["x-penstock-route"] == "direct"
        assert (await it.front.chat(model="distant")).headers["x-penstock-route"] == "alias"

        streamed = await it.chat(stream=True, stream_options={"include_usage": True})
        chunks = [json.loads(data) for data in events(streamed.text)[:-1]]
        assert events(streamed.text)[-1] == "[DONE]"
        assert "".join(c["delta"].get("content") or "" for k in chunks for c in k["choices"]) == "Hello, world!"
        assert chunks[-1]["usage"]["completion_tokens"] == 14 and chunks[-2]["choices"][0]["finish_reason"] == "stop"

        many = (await it.chat(n=3, max_tokens=2)).json()
        assert [choice["message"]["content"] for choice in many["choices"]] == ["He"] * 3

        listed = {model["id"]: model for model in (await it.front.client.get("/v1/models")).json()["data"]}
        assert listed["far"]["ready"]


async def test_a_trace_goes_on_there(serving: Serving) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with world(serving) as it:
        it.front.client.headers["traceparent"] = f"00-{trace}-00f067aa0ba902b7-01"
        here = (await it.chat(max_tokens=5)).headers["x-request-id"]
        [there] = (await it.behind.client.get("/v1/traces")).json()["data"]
        assert there["trace_id"] == trace
        found = (await it.front.client.get(f"/v1/traces/{here}")).json()
        names = [phase["name"] for phase in found["phases"]]
        assert names[-3:] == ["engine", "decode", "reply"] and "prefill" not in names, "it does not tell its phases"


async def test_every_family_of_conversations_reaches_it(serving: Serving) -> None:
    async with world(serving) as it:
        body = {"model": "far", "messages": HELLO, "max_tokens": 50}
        message = (await it.front.client.post("/v1/messages", json=body)).json()
        assert message["content"][0]["text"] == "Hello, world!" and message["usage"]["output_tokens"] == 14
        response = (
            await it.front.client.post("/v1/responses", json={"model": "far", "input": "hi", "store": False})
        ).json()
        assert response["output"][0]["content"][0]["text"] == "Hello, world!"


async def test_a_conversation_goes_on_with_it_and_is_cut_by_estimate(serving: Serving, tmp_path: Path) -> None:
    async with world(serving, remote={"context_window": 200}, store_url=f"sqlite:///{tmp_path / 'x.db'}") as it:
        for turn in range(12):
            words = [{"role": "user", "content": f"this is turn {turn:2}"}]
            reply = await it.chat(messages=words, conversation="s", max_tokens=50)
            report = reply.json()["conversation"]
            spoken = it.behind.parts.registry.route("tiny").model.text.decode(it.behind.engine.seen[-1].prompt)
            assert report["turns"] == turn + 1 and spoken.count("this is turn") == turn + 1 - report["dropped_turns"]
        assert report["dropped_turns"] > 3
        here = await it.front.chat(messages=[{"role": "user", "content": "and now?"}], conversation="s")
        assert here.json()["conversation"]["turns"] == 13, "whoever answers, it is the same conversation"


async def test_parameters_pass_and_what_cannot_be_honoured_is_refused(serving: Serving) -> None:
    async with world(serving) as it:
        await it.chat(temperature=0.3, top_p=0.5, seed=4, stop=["!"], frequency_penalty=0.5, top_k=7, max_tokens=9)
        asked = it.behind.engine.seen[-1].params
        assert (asked.temperature, asked.top_p, asked.seed, asked.top_k) == (0.3, 0.5, 4, 7)
        assert (asked.frequency_penalty, asked.max_tokens) == (0.5, 9)
        await it.chat(logit_bias={"5": 1}, stop_token_ids=[3])
        asked = it.behind.engine.seen[-1].params
        assert asked.logit_bias == {5: 1.0} and 3 in asked.stop_token_ids
        refusal = await it.chat(prompt_logprobs=1)
        assert refusal.status_code == 400 and refusal.json()["error"]["param"] == "prompt_logprobs"
        # What the other server finds wrong is said in its words.
        wrong = await it.chat(min_tokens=50, max_tokens=5)
        assert wrong.status_code == 400 and "min_tokens" in wrong.json()["error"]["message"]


async def test_leaving_stops_it_there_too(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, lambda request: [65] * 400, step_s=0.01)
    async with world(serving, engine) as it:
        body = {"model": "far", "messages": HELLO, "stream": True, "max_tokens": 400}
        async with it.front.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for _ in reply.aiter_lines():
                break
        await eventually(lambda: len(engine.aborted) == 1)
        await eventually(lambda: it.front.parts.registry.remotes["far"].in_flight == 0)


async def test_usage_and_cost_are_in_the_ledger(serving: Serving, tmp_path: Path) -> None:
    prices = RemoteConfig(name="far", model="tiny", input_price=3.0, output_price=4.0)
    store = f"sqlite:///{tmp_path}/store.db"
    async with AsyncExitStack() as stack:
        behind = await stack.enter_async_context(serving())
        front = await stack.enter_async_context(serving(others=[far(behind.port)], remotes=(prices,), store_url=store))
        used = (await front.chat(model="far")).json()["usage"]
        (row,) = (await front.client.get("/v1/usage?by=model")).json()["data"]
        assert row["model"] == "far" and row["prompt_tokens"] == used["prompt_tokens"]
        assert row["completion_tokens"] == used["completion_tokens"]
        cached = used["prompt_tokens_details"]["cached_tokens"]
        nanos = (used["prompt_tokens"] - cached) * 3000 + cached * 1500 + used["completion_tokens"] * 4000
        assert float(row["cost"]) == pytest.approx(nanos / 1e9)
        pricing = (await front.client.get("/v1/models/far")).json()["pricing"]
        assert pricing == {"input_per_million": 3.0, "cached_input_per_million": 1.5, "output_per_million": 4.0}


async def test_a_server_that_is_away_is_a_503_and_another_one_is_tried_first(serving: Serving) -> None:
    async with AsyncExitStack() as stack:
        behind = await stack.enter_async_context(serving())
        # Once it is open it stays so, however long the rest of the test takes.
        alone = far(free_port(), breaker=BreakerPolicy(open_s=600.0))
        pair = far(free_port(), behind.port, retry_share=1.0)
        pair.name = "pair"
        pair.aliases = ()
        front = await stack.enter_async_context(serving(others=[alone, pair]))
        for _ in range(4):
            refusal = await front.chat(model="far")
            assert refusal.status_code == 503 and refusal.json()["error"]["code"] == "engine_unavailable"
            assert int(refusal.headers["retry-after"]) >= 1
        assert alone.members[0].breaker.state == "open", "nobody waits for it in vain any more"
        assert await front.metric('penstock_replica_breaker{model_name="far",engine="0"}') == 2
        servers = {entry["id"]: entry for entry in (await front.client.get("/v1/admin/replicas")).json()["data"]}
        assert servers["far/0"]["breaker"] == "open" and servers["pair/1"]["ready"]
        for _ in range(3):
            assert (await front.chat(model="pair")).json()["choices"][0]["message"]["content"] == "Hello, world!"


async def test_a_break_in_the_middle_is_an_error_in_the_stream(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text, lambda request: [65] * 400, step_s=0.01)
    async with world(serving, engine) as it:
        streaming = asyncio.create_task(it.chat(stream=True, max_tokens=400))
        await eventually(lambda: bool(engine._generated > 20))
        engine.hold = True
        it.behind.stop.set()
        last = events((await streaming).text)[-1]
        assert json.loads(last)["error"]["code"] == "engine_lost"


async def test_output_rules_hold_for_what_others_say(serving: Serving) -> None:
    rule = GuardrailConfig(name="no worlds", stage="output", words=("world",))
    async with world(serving, guardrails=(rule,)) as it:
        choice = (await it.chat()).json()["choices"][0]
        assert choice["finish_reason"] == "content_filter" and "world" not in choice["message"]["content"]


async def test_a_model_that_cannot_answer_is_stood_in_for(serving: Serving, text: TextModel) -> None:
    async with world(serving, served={"fallback": ("far",)}, engine_wait_s=0.5) as it:
        assert (await it.front.chat()).headers["x-penstock-route"] == "direct"
        model = it.front.parts.registry.route("tiny").model
        await model.backend.close()
        for stream in (False, True):
            reply = await it.front.chat(stream=stream)
            assert reply.status_code == 200 and ("[DONE]" if stream else "Hello, world!") in reply.text
            assert reply.headers["x-penstock-route"] == "fallback" and reply.headers["x-penstock-model"] == "far"
            assert reply.headers.get_list("x-penstock-model") == ["far"]
        # A request that the stand-in cannot do right gets the first model's error.
        refusal = await it.front.chat(prompt_logprobs=1)
        assert refusal.status_code == 503
        assert (
            await it.front.metric('penstock_fallbacks_total{model_name="tiny",to="far",code="engine_unavailable"}') == 3
        )


async def test_a_smaller_model_comes_before_somebody_elses(serving: Serving, text: TextModel) -> None:
    smaller = ServedModel("smaller", text, InProcessBackend(ScriptedEngine(text, "Small talk.")))
    async with world(serving, served={"fallback": ("smaller", "far")}, more=[smaller]) as it:
        registry = it.front.parts.registry
        answered = []
        for _ in range(3):
            reply = await it.front.chat()
            answered.append((reply.headers["x-penstock-model"], reply.json()["choices"][0]["message"]["content"]))
            plain = await it.front.complete()
            assert plain.status_code == 200 and plain.headers["x-penstock-model"] == answered[-1][0]
            await registry.route(("tiny", "smaller")[min(len(answered) - 1, 1)]).model.backend.close()
        assert answered == [("tiny", "Hello, world!"), ("smaller", "Small talk."), ("far", "Hello, world!")]


async def test_beyond_a_load_requests_overflow(serving: Serving, text: TextModel) -> None:
    busy = ScriptedEngine(text, lambda request: [65] * 200)
    busy.hold = True
    async with world(serving, None, busy, served={"fallback": ("far",), "overflow_at": 2}) as it:
        base = [asyncio.create_task(it.front.chat(max_tokens=200)) for _ in range(2)]
        await eventually(lambda: len(busy.seen) == 2)
        over = await it.front.chat()
        assert over.headers["x-penstock-route"] == "overflow" and over.headers["x-penstock-model"] == "far"
        asked = asyncio.create_task(it.front.chat(prompt_logprobs=1, max_tokens=1))
        await eventually(lambda: len(busy.seen) == 3)
        busy.hold = False
        kept = await asked
        assert kept.status_code == 200 and kept.headers["x-penstock-model"] == "tiny", "far cannot do that"
        assert all(reply.headers["x-penstock-model"] == "tiny" for reply in await asyncio.gather(*base))
        assert (await it.front.chat(max_tokens=1)).headers["x-penstock-model"] == "tiny"


async def test_a_key_that_is_not_there_ends_the_start() -> None:
    remote = RemoteModel("far", [RemoteServer("0", Upstream("http://127.0.0.1:1/v1", "m", key_env="NO_SUCH_KEY"))])
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        await remote.start()
