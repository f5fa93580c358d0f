"""What the gateway does around an answer, it does around the answers of remote models too (R-RT-9)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.backends.remote.server import RemoteServer
from penstock.backends.remote.upstream import Upstream
from penstock.config.cache import CacheConfig
from penstock.config.context import ConversationsConfig, JudgeConfig, ToolsConfig
from penstock.config.guardrails import GuardrailConfig
from penstock.config.remotes import RemoteConfig
from penstock.config.routing import RouteConfig
from penstock.routing.remotes import RemoteModel
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving, events, garbage, until
from tests.gateway.generation.test_remote_parity import chunks_of, said
from tests.gateway.rag.test_collections import encoders, filled
from tests.tools.execution.parts import LOOPBACK, WeatherServer, weather
from tests.wire_server import WireServer, wire_server

USER = [{"role": "user", "content": "hi"}]
HARD = [{"role": "user", "content": "Prove by induction that the sum of the first n odd numbers is n squared."}]
PRICES = (RemoteConfig(name="wire", model="m", input_price=3.0, output_price=4.0),)


@asynccontextmanager
async def wired(
    serving: Serving, tokenizer: TextModel | None = None, window: int | None = None, **settings: Any
) -> AsyncIterator[tuple[Running, WireServer]]:
    """A gateway with a model of its own and the remote `wire`."""
    wire_options = settings.pop("wire", {})
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(wire_server(**wire_options))
        remote = RemoteModel("wire", [RemoteServer("0", Upstream(wire.url, "m"))], context_window=window)
        remote.text = tokenizer
        front = await stack.enter_async_context(serving(others=[remote], remotes=PRICES, **settings))
        yield front, wire


@pytest.fixture(scope="module")
def api() -> Any:
    with weather() as server:
        yield server


async def test_sources_are_found_put_before_the_question_and_cited(
    serving: Serving, encoder_endpoint: str, tmp_path: Path
) -> None:
    settings = {
        "encoders": encoders(encoder_endpoint),
        "store_url": f"sqlite:///{tmp_path}/s.db",
        "routes": (RouteConfig(name="auto", small="tiny", large="wire"),),
    }
    asked = [{"role": "user", "content": "How many weeks of paid leave do parents receive?"}]
    async with wired(serving, wire={"text": "Parents receive twelve weeks [1]."}, **settings) as (front, wire):
        await filled(front)
        for model, stream in (("wire", False), ("wire", True)):
            reply = await front.chat(model=model, messages=asked, rag={"collection": "handbook"}, stream=stream)
            assert reply.status_code == 200, reply.text
            prompt = wire.last["messages"]
            assert prompt[0]["role"] == "system" and "twelve weeks of paid leave" in prompt[-1]["content"]
            chunks = chunks_of(reply)
            rag = next(chunk["rag"] for chunk in chunks if "rag" in chunk)
            assert rag["sources"][0]["document"] == "handbook.md"
            found = [
                note
                for chunk in chunks
                if isinstance(chunk, dict)
                for choice in chunk["choices"]
                for note in (choice.get("message") or choice.get("delta") or {}).get("annotations") or ()
            ]
            assert found and found[0]["url_citation"]["title"] == "handbook.md"
        routed = await front.chat(
            model="auto", messages=[*asked[:0], *HARD], rag={"collection": "handbook"}, conversation="c"
        )
        assert routed.status_code == 200 and routed.headers["x-penstock-model"] == "wire"
        again = await front.chat(model="wire", messages=USER, conversation="c")
        assert again.status_code == 200
        told = [message["content"] for message in wire.last["messages"]]
        assert HARD[0]["content"] in told, "the conversation has the question without its sources"


async def test_a_route_with_a_remote_as_its_large_model_takes_every_kind_of_request(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    settings = {
        "routes": (RouteConfig(name="auto", small="tiny", large="wire"),),
        "store_url": f"sqlite:///{tmp_path}/s.db",
    }
    async with wired(serving, text, **settings) as (front, _wire):
        hard = HARD[0]["content"]
        requests: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {"messages": HARD, "logprobs": True, "n": 2}),
            ("/v1/chat/completions", {"messages": HARD, "conversation": "x", "stream": True}),
            ("/v1/completions", {"prompt": hard, "logprobs": 1, "echo": False, "n": 2}),
            ("/v1/responses", {"input": hard}),
            ("/v1/messages", {"messages": HARD, "max_tokens": 20}),
            ("/api/chat", {"messages": HARD, "stream": False}),
            ("/api/generate", {"prompt": hard, "raw": True, "stream": False}),
        ]
        for path, body in requests:
            reply = await front.client.post(path, json={"model": "auto", **body})
            assert reply.status_code == 200, (path, reply.text)
            assert reply.headers["x-penstock-model"] == "wire" and "Hello" in json.dumps(said(chunks_of(reply)))


async def test_tools_that_the_gateway_runs(serving: Serving, api: WeatherServer, tmp_path: Path) -> None:
    settings = {
        "tools": ToolsConfig(networks=LOOPBACK, max_steps=4),
        "tool_servers": (api.config(),),
        "store_url": f"sqlite:///{tmp_path}/s.db",
    }
    call = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    async with wired(serving, wire={"call": call, "text": "Sunny."}, **settings) as (front, wire):
        reply = (await front.chat(model="wire", server_tools=["weather"])).json()
        assert reply["choices"][0]["message"]["content"] == "Sunny."
        assert [event["type"] for event in reply["tool_events"]] == ["tool_call", "tool_result"]
        result = wire.last["messages"][-1]
        assert result["role"] == "tool" and "sunny" in result["content"]
        streamed = await front.chat(model="wire", server_tools=["weather"], stream=True)
        assert "tool_result" in streamed.text and events(streamed.text)[-1] == "[DONE]"
        row = (await front.client.get("/v1/usage?by=model")).json()["data"][0]
        assert row["prompt_tokens"] == 4 * 11, "each step is charged as its server counted it"


async def test_a_long_conversation_is_summarised_by_the_remote(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    settings = {
        "store_url": f"sqlite:///{tmp_path}/s.db",
        "conversations": ConversationsConfig(overflow="summarise", keep_turns=1, reply_tokens=32),
    }
    for tokenizer in (text, None):
        async with wired(serving, tokenizer, 400, **settings) as (front, wire):
            for turn in range(14):
                words = [{"role": "user", "content": f"I say number {turn}, which is {'long ' * 6}"}]
                reply = await front.chat(model="wire", messages=words, conversation=f"s{tokenizer is None}")
                assert reply.status_code == 200, reply.text
            report = reply.json()["conversation"]
            assert report["turns"] == 14 and report["summarised_turns"] > 0, report
            assert any("Summarize" in body["messages"][-1]["content"] for _, body in wire.asked)
            features = (await front.client.get("/v1/usage?by=feature")).json()["data"]
            assert any(row["feature"] == "conversation summary" for row in features)


async def test_guardrails_hold_in_streams_and_over_thoughts(serving: Serving) -> None:
    rules = (
        GuardrailConfig(name="no worlds", stage="output", words=("world",)),
        GuardrailConfig(name="no cards", stage="input", patterns=(r"\d{16}",), action="redact"),
    )
    async with wired(serving, guardrails=rules) as (front, wire):
        streamed = await front.chat(model="wire", stream=True)
        assert "content_filter" in streamed.text and "world" not in streamed.text
        whole = await front.client.post("/v1/completions", json={"model": "wire", "prompt": "card 1234567812345678"})
        assert whole.json()["choices"][0]["finish_reason"] == "content_filter"
        assert "1234567812345678" not in json.dumps(wire.asked)
        wire.text, wire.thoughts = "Fine.", "a world of thoughts"
        thought = await front.chat(model="wire")
        assert "world" not in thought.text and thought.json()["choices"][0]["finish_reason"] == "content_filter"
        refused = await front.chat(model="wire", logprobs=True)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs"


async def test_votes_batches_and_stored_answers(serving: Serving, tmp_path: Path) -> None:
    async with wired(serving, store_url=f"sqlite:///{tmp_path}/s.db", gateway_timeout_s=0.4) as (front, _wire):
        client = front.client
        id = (await front.chat(model="wire", store=True)).json()["id"]
        vote = await client.post("/v1/feedback", json={"response_id": id, "rating": "up"})
        assert vote.status_code == 200 and vote.json()["model"] == "wire"
        kept = (await client.get(f"/v1/chat/completions/{id}")).json()
        assert kept["model"] == "wire" and kept["choices"][0]["message"]["content"] == "Hello, world!"
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
        sent = json.dumps({**line, "body": {"model": "wire", "messages": USER}}).encode()
        file = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("b.jsonl", sent)})
        batch = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        made = (await client.post("/v1/batches", json=batch)).json()

        async def state() -> Any:
            return (await client.get(f"/v1/batches/{made['id']}")).json()

        done = await until(state, lambda found: found["status"] in ("completed", "failed"))
        assert done["request_counts"]["completed"] == 1, done
        output = (await client.get(f"/v1/files/{done['output_file_id']}/content")).json()
        assert output["response"]["body"]["model"] == "wire"


async def test_answers_of_a_remote_are_judged_by_a_remote(serving: Serving) -> None:
    async with wired(serving, wire={"text": "Yes."}, judge=JudgeConfig(rate=1.0, model="wire")) as (front, wire):
        for model in ("wire", "tiny"):
            assert (await front.chat(model=model, messages=HARD)).status_code == 200
        for model in ("wire", "tiny"):
            line = f'penstock_answer_relevance_sum{{model_name="{model}",route="direct"}}'

            async def graded(line: str = line) -> float:
                try:
                    return await front.metric(line)
                except KeyError:
                    return -1.0

            assert await until(graded, lambda found: found >= 0) == 1.0
        wire.text = "Maybe."
        await front.chat(model="wire", messages=HARD)
        failed = 'penstock_judged_answers_total{model_name="wire",route="direct",outcome="failed"}'

        async def unclear() -> float:
            try:
                return await front.metric(failed)
            except KeyError:
                return 0.0

        assert await until(unclear, lambda found: found > 0) == 1


async def test_the_ledger_has_what_the_server_counted_also_of_a_stream_that_was_left(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    settings = {"store_url": f"sqlite:///{tmp_path}/s.db", "wire": {"text": "A" * 300, "pause_s": 0.02}}
    async with wired(serving, text, **settings) as (front, wire):
        body = {"model": "wire", "messages": USER, "stream": True}
        async with front.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            read = 0
            async for line in reply.aiter_lines():
                read += line.startswith("data")
                if read > 8:
                    break

        async def rows() -> Any:
            return (await front.client.get("/v1/usage?by=model")).json()["data"]

        (row,) = await until(rows, lambda found: bool(found) and found[0]["completion_tokens"] > 0)
        assert 5 <= row["completion_tokens"] < 100, "what had arrived, counted by the tokenizer"
        nanos = row["prompt_tokens"] * 3000 + row["completion_tokens"] * 4000
        assert float(row["cost"]) == pytest.approx(nanos / 1e9)
        await until(lambda: _left(wire), lambda left: left > 0)


async def _left(wire: WireServer) -> int:
    await asyncio.sleep(0)
    return wire.left


async def test_a_similar_question_finds_the_answer_of_a_remote(serving: Serving, encoder_endpoint: str) -> None:
    settings = {"encoders": encoders(encoder_endpoint), "cache": CacheConfig(semantic="on")}
    async with wired(serving, **settings) as (front, wire):
        await front.parts.encoders.find("minilm").open()

        async def ask(question: str) -> httpx.Response:
            return await front.chat(model="wire", messages=[{"role": "user", "content": question}], temperature=0)

        assert (await ask("What is the capital of France?")).headers["x-penstock-cache"] == "miss"
        await front.parts.background.close()
        asked = len(wire.asked)
        assert (await ask("what's the capital of France")).headers["x-penstock-cache"] == "semantic"
        assert len(wire.asked) == asked
        assert (await ask("What is the capital of Spain?")).headers["x-penstock-cache"] == "miss"


async def test_timelines_metrics_and_headers(serving: Serving) -> None:
    async with wired(serving) as (front, _wire):
        reply = await front.chat(model="wire")
        assert reply.headers["x-penstock-replica"] == "0"
        trace = (await front.client.get(f"/v1/traces/{reply.headers['x-request-id']}")).json()
        assert trace["engines"][0]["model"] == "wire" if "engines" in trace else trace["phases"]
        lines = (await front.client.get("/metrics")).text
        assert 'model_name="wire"' in lines and "penstock" in lines


async def test_a_server_that_is_slow_or_breaks_off(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    settings = {"wire": {"text": "A" * 400, "pause_s": 0.02}, "store_url": f"sqlite:///{tmp_path}/s.db"}
    async with wired(serving, text, **settings, time_limit_s=0.5) as (front, wire):
        for path, body in (("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "hi"})):
            asked = {"model": "wire", "max_tokens": 400, **body}
            # On a busy machine nothing may have arrived in that time, which is a 408.
            reply = await until(partial(front.client.post, path, json=asked), lambda reply: reply.status_code != 408)
            choice = reply.json()["choices"][0]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "time_limit")
            assert reply.headers["x-penstock-limit"] == "time_limit"
    async with wired(serving, text, **settings) as (front, wire):
        wire.broken, wire.pause_s = True, 0.0
        streamed = await front.chat(model="wire", stream=True)
        assert json.loads(events(streamed.text)[-1])["error"]["code"] == "engine_lost"
        whole = await front.chat(model="wire")
        assert whole.status_code == 503 and whole.json()["error"]["code"] == "engine_lost"
        several = await front.chat(model="wire", n=3)
        assert several.status_code == 503
    async with wired(serving, text, wire={"text": "Hi"}) as (front, wire):
        events_of = wire._events
        wire._events = lambda path, body: events_of(path, {**body, "n": 1})  # type: ignore[method-assign]
        fewer = await front.chat(model="wire", n=3)
        assert fewer.status_code == 400 and fewer.json()["error"]["param"] == "n"


async def test_a_remote_has_fallbacks_of_its_own(serving: Serving) -> None:
    async with wired(serving) as (front, wire):
        remote = front.parts.registry.remotes["wire"]
        remote.fallback = ("tiny",)
        assert (await front.chat(model="wire")).headers["x-penstock-model"] == "wire"
        remote.members[0].server.dialect.upstream = Upstream("http://127.0.0.1:1/v1", "m")
        for path, body in (("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "hi"})):
            reply = await front.client.post(path, json={"model": "wire", **body})
            assert (reply.headers["x-penstock-model"], reply.headers["x-penstock-route"]) == ("tiny", "fallback")
        assert len(wire.asked) == 1


async def test_choices_of_a_server_that_gives_one_at_a_time(serving: Serving) -> None:
    async with AsyncExitStack() as stack:
        behind = await stack.enter_async_context(serving())
        upstream = Upstream(f"http://127.0.0.1:{behind.port}", "tiny", dialect="anthropic")
        remote = RemoteModel("claude", [RemoteServer("0", upstream)])
        front = await stack.enter_async_context(serving(others=[remote]))
        reply = await front.chat(model="claude", n=3, stop=["world"])
        answer = reply.json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["Hello, "] * 3, answer
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert len(behind.engine.seen) == 3 and answer["usage"]["completion_tokens"] >= 3 * 7
        streamed = chunks_of(await front.chat(model="claude", n=2, stream=True))
        found = dict(said(streamed))
        assert found["text0"] == found["text1"] == "Hello, world!" and found["end1"] == "stop"
        refusal = await front.client.post("/v1/completions", json={"model": "claude", "prompt": "hi"})
        assert refusal.status_code == 400 and refusal.json()["error"]["code"] == "remote_model"
        scored = await front.chat(model="claude", logprobs=True)
        assert scored.status_code == 400 and scored.json()["error"]["param"] == "logprobs"
        counted = await front.client.post("/v1/messages/count_tokens", json={"model": "claude", "messages": USER})
        there = await behind.client.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": USER})
        assert counted.json()["input_tokens"] == there.json()["input_tokens"]


async def test_requests_to_remotes_leave_no_cycles(serving: Serving) -> None:
    async with wired(serving) as (front, _wire):
        await front.chat(model="wire")
        with garbage() as found:
            for body in ({}, {"stream": True}, {"n": 2}, {"stop": ["wor"]}, {"logprobs": True}):
                assert (await front.chat(model="wire", **body)).status_code == 200
            assert (await front.complete(model="wire")).status_code == 200
        assert not found, found
