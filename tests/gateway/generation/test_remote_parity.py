"""One table of requests, sent to a model that runs here and to remote ones: the answers have the same shape and mean
the same (R-RT-9).

There are two remotes: a second gateway of this project, and a server of a few lines that speaks the wire format of
others. All three answer with the same text.
"""

from __future__ import annotations

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
from penstock.config.cache import CacheConfig
from penstock.routing.remotes import RemoteModel
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving
from tests.wire_server import WireServer, wire_server

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@dataclass
class Worlds:
    """A gateway with a model of its own (`tiny`) and two remotes (`far`, `wire`)."""

    front: Running
    behind: Running
    wire: WireServer


@asynccontextmanager
async def worlds(serving: Serving, text: TextModel, tokenizer: bool = True, **settings: Any) -> AsyncIterator[Worlds]:
    async with AsyncExitStack() as stack:
        wire = await stack.enter_async_context(wire_server())
        behind = await stack.enter_async_context(serving(time_limit_s=None))
        remotes = [
            RemoteModel("far", [RemoteServer("0", Upstream(f"http://127.0.0.1:{behind.port}/v1", "tiny"))]),
            RemoteModel("wire", [RemoteServer("0", Upstream(wire.url, "m"))]),
        ]
        if tokenizer:
            for remote in remotes:
                remote.text = text
        front = await stack.enter_async_context(serving(others=remotes, **settings))
        yield Worlds(front, behind, wire)


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": USER, "max_completion_tokens": 3}),
    ("/v1/chat/completions", {"messages": USER, "n": 2, "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": USER, "stop": ["wor"]}),
    ("/v1/chat/completions", {"messages": USER, "stop": ["wor"], "include_stop_str_in_output": True}),
    ("/v1/chat/completions", {"messages": USER, "stop": [f"none{n}" for n in range(9)] + [","]}),
    ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": USER, "seed": 5, "temperature": 0.5, "logit_bias": {"5": 1.0}}),
    ("/v1/chat/completions", {"messages": USER, "user": "ann", "metadata": {"feature": "x"}, "service_tier": "auto"}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "developer", "content": "Be brief."}, *USER], "presence_penalty": 1},
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
    ("/v1/chat/completions", {"messages": USER, "stream": True}),
    ("/v1/chat/completions", {"messages": USER, "stream": True, "stream_options": {"include_usage": True}, "n": 2}),
    ("/v1/chat/completions", {"messages": USER, "stream": True, "logprobs": True, "top_logprobs": 1, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": USER, "conversation": "c1"}),
    ("/v1/chat/completions", {"messages": USER, "store": True}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 3, "logprobs": 2}),
    ("/v1/completions", {"prompt": ["hi", "there"], "n": 2, "max_tokens": 2}),
    ("/v1/completions", {"prompt": [72, 105], "max_tokens": 4}),
    ("/v1/completions", {"prompt": [[72, 105], [72]], "max_tokens": 4}),
    ("/v1/completions", {"prompt": "hi", "echo": True}),
    ("/v1/completions", {"prompt": "hi", "best_of": 3, "n": 2, "max_tokens": 4}),
    ("/v1/completions", {"prompt": "hi", "stop": "w"}),
    ("/v1/completions", {"prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/responses", {"input": "hi", "store": False}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/responses", {"input": "hi", "stream": True, "max_output_tokens": 4}),
    ("/v1/responses/input_tokens", {"input": "hi"}),
    ("/v1/messages", {"messages": USER, "max_tokens": 50}),
    ("/v1/messages", {"messages": USER, "max_tokens": 50, "stop_sequences": [","]}),
    ("/v1/messages", {"messages": USER, "max_tokens": 3, "stream": True}),
    ("/v1/messages/count_tokens", {"messages": USER}),
    ("/v1/tokenize", {"messages": USER}),
    ("/v1/tokenize", {"prompt": "hi there", "max_tokens": 5, "return_token_strs": True}),
    ("/v1/detokenize", {"tokens": [72, 105]}),
    ("/api/chat", {"messages": USER, "stream": False}),
    ("/api/chat", {"messages": USER}),
    ("/api/generate", {"prompt": "hi", "stream": False}),
    ("/api/generate", {"prompt": "hi", "raw": True, "stream": False}),
    ("/api/generate", {"prompt": "hi", "raw": True}),
    # What is wrong is wrong everywhere.
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": USER, "temperature": 9}),
    ("/v1/chat/completions", {"messages": USER, "stop": [""]}),
    ("/v1/chat/completions", {"messages": USER, "n": 1000}),
    ("/v1/chat/completions", {"messages": USER, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": USER, "tool_choice": "required"}),
    ("/v1/chat/completions", {"messages": USER, "top_logprobs": 3}),
    ("/v1/chat/completions", {"messages": USER, "logit_bias": {"999999": 1}}),
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": [999999]}),
    ("/v1/completions", {"prompt": "hi", "best_of": 1, "n": 2}),
    ("/v1/detokenize", {"tokens": [999999]}),
    ("/v1/tokenize", {}),
]
NAMES = [f"{index}-{path}-{','.join(body)}" for index, (path, body) in enumerate(REQUESTS)]


def shape(value: Any) -> Any:
    """The keys and types of a JSON value; numbers are alike, and so are all strings."""
    if isinstance(value, dict):
        # Likeliest tokens are keys in the older format of log-probabilities.
        return {key if len(key) > 1 else "token": shape(item) for key, item in value.items()}
    if isinstance(value, list):
        shapes: list[Any] = []
        for item in map(shape, value):
            if item not in shapes:
                shapes.append(item)
        return shapes
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def chunks_of(reply: httpx.Response) -> list[Any]:
    """What a reply consists of: one object, or the data of its events."""
    kind = reply.headers["content-type"]
    if kind.startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]
    if kind.startswith("application/x-ndjson"):
        return [json.loads(line) for line in reply.text.splitlines()]
    return [reply.json()]


def said(chunks: list[Any]) -> list[Any]:
    """What does not depend on who answers: texts, ends, calls, errors."""
    found: dict[str, Any] = {}

    def add(key: str, text: Any) -> None:
        found[key] = found[key] + text if isinstance(text, str) and isinstance(found.get(key), str) else text

    for chunk in chunks:
        if not isinstance(chunk, dict):
            add("done", True)
            continue
        if chunk.get("error"):
            error = chunk["error"]
            add("error", error if isinstance(error, str) else (error.get("type"), error.get("param")))
        for choice in chunk.get("choices", ()):
            message = choice.get("message") or choice.get("delta") or {}
            add(f"text{choice['index']}", message.get("content") or choice.get("text") or "")
            if choice["finish_reason"]:
                add(f"end{choice['index']}", choice["finish_reason"])
        for item in chunk.get("output", ()):
            add("output", [part.get("text") for part in item.get("content", ())])
        for name in ("stop_reason", "stop_sequence", "status", "done_reason", "response", "text", "count"):
            if isinstance(chunk.get(name), str | int):
                add(name, chunk[name])
        if isinstance(chunk.get("content"), list):
            add("content", [block.get("text") for block in chunk["content"]])
        if isinstance(chunk.get("message"), dict) and "content" in chunk["message"]:
            content = chunk["message"]["content"]
            add("message", content if isinstance(content, str) else "")
        if isinstance(chunk.get("delta"), dict):
            add("delta", chunk["delta"].get("text") or "")
            add("why", chunk["delta"].get("stop_reason") or "")
        elif isinstance(chunk.get("delta"), str):
            add("delta", chunk["delta"])
    return sorted(found.items(), key=lambda pair: pair[0])


@pytest.fixture
async def all_three(serving: Serving, text: TextModel, tmp_path: Path) -> AsyncIterator[Worlds]:
    async with worlds(serving, text, store_url=f"sqlite:///{tmp_path}/store.db") as found:
        yield found


async def test_every_request_means_the_same(all_three: Worlds) -> None:
    client = all_three.front.client
    wrong = []
    for name, (path, body) in zip(NAMES, REQUESTS, strict=True):
        here = await client.post(path, json={"model": "tiny", **body})
        for model in ("far", "wire"):
            sent = {**body, "conversation": f"c-{model}"} if "conversation" in body else body
            there = await client.post(path, json={"model": model, **sent})
            if there.status_code != here.status_code:
                wrong.append((name, model, here.status_code, here.text[:200], there.status_code, there.text[:300]))
                continue
            ours, theirs = chunks_of(here), chunks_of(there)
            if said(ours) != said(theirs) and not (model == "wire" and "stop_sequences" in body):
                wrong.append((name, model, said(ours), said(theirs)))
            if here.status_code == 200 and not differs_rightly(path, body, model):
                kinds = (shape(ours), shape(theirs)) if len(ours) == 1 else (keys(ours), keys(theirs))
                if kinds[0] != kinds[1]:
                    wrong.append((name, model, *kinds))
            told = {header for header in here.headers if header.startswith(("x-penstock", "x-request"))}
            if told - set(there.headers) - {"x-penstock-replica"}:
                wrong.append((name, model, "headers", told - set(there.headers)))
    assert not wrong, "\n".join(map(str, wrong))


def keys(chunks: list[Any]) -> set[Any]:
    """The kinds of events of a stream."""
    return {chunk if isinstance(chunk, str) else tuple(sorted(chunk)) for chunk in chunks}


def differs_rightly(path: str, body: dict[str, Any], model: str) -> bool:
    """A server that gives no stop reason cannot be quoted: the choice then has none."""
    return "stop" in body or "stop_sequences" in body


async def test_without_a_tokenizer_counts_are_estimates_that_say_so(serving: Serving, text: TextModel) -> None:
    async with worlds(serving, text, tokenizer=False) as it:
        client = it.front.client
        for path, body in (
            ("/v1/tokenize", {"prompt": "a" * 400}),
            ("/v1/messages/count_tokens", {"messages": USER}),
            ("/v1/responses/input_tokens", {"input": "hi"}),
        ):
            reply = await client.post(path, json={"model": "wire", **body})
            assert reply.json()["estimated"] is True and reply.headers["x-penstock-estimated"] == "tokens"
        assert (await client.post("/v1/tokenize", json={"model": "wire", "prompt": "a" * 400})).json()["count"] > 100
        for path, body in (("/v1/detokenize", {"tokens": [5]}), ("/v1/completions", {"prompt": [5, 6]})):
            refusal = await client.post(path, json={"model": "wire", **body})
            assert refusal.status_code == 400 and "tokenizer" in refusal.json()["error"]["message"]
        assert (await client.get("/v1/models/wire")).json()["tokenizer"] == "estimate"


async def test_answers_of_remotes_are_cached(serving: Serving, text: TextModel) -> None:
    async with worlds(serving, text, cache=CacheConfig(exact="on")) as it:
        for model in ("far", "wire"):
            body = {"model": model, "messages": USER, "temperature": 0, "max_tokens": 9}
            first = await it.front.client.post("/v1/chat/completions", json=body)
            assert first.headers["x-penstock-cache"] == "miss"
            asked = len(it.wire.asked), len(it.behind.engine.seen)
            again = await it.front.client.post("/v1/chat/completions", json=body)
            assert again.headers["x-penstock-cache"] == "exact"
            assert (len(it.wire.asked), len(it.behind.engine.seen)) == asked, "nobody was asked"
            assert said([again.json()]) == said([first.json()])
            used = again.json()["usage"]
            assert used["prompt_tokens"] == used["prompt_tokens_details"]["cached_tokens"]
            streamed = await it.front.client.post("/v1/chat/completions", json={**body, "stream": True})
            assert streamed.headers["x-penstock-cache"] == "exact" and said(chunks_of(streamed))[2][1] == "Hello, wo"
            other = await it.front.client.post("/v1/chat/completions", json={**body, "max_tokens": 2})
            assert other.headers["x-penstock-cache"] == "miss"
            varied = await it.front.client.post("/v1/chat/completions", json={**body, "temperature": 1})
            assert "x-penstock-cache" not in varied.headers


async def test_thoughts_are_passed_on_in_every_family(serving: Serving, text: TextModel) -> None:
    async with worlds(serving, text) as it:
        it.wire.thoughts = "hmm"
        client = it.front.client
        chat = (await client.post("/v1/chat/completions", json={"model": "wire", "messages": USER})).json()
        assert chat["choices"][0]["message"]["reasoning_content"] == "hmm"
        assert chat["choices"][0]["message"]["content"] == "Hello, world!"
        assert chat["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
        body = {"model": "wire", "messages": USER, "stream": True}
        streamed = chunks_of(await client.post("/v1/chat/completions", json=body))
        deltas = [choice["delta"] for chunk in streamed[:-1] for choice in chunk["choices"]]
        assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == ["hmm"]
        message = (await client.post("/v1/messages", json={"model": "wire", "messages": USER, "max_tokens": 50})).json()
        assert [block["type"] for block in message["content"]] == ["thinking", "text"]
        response = (await client.post("/v1/responses", json={"model": "wire", "input": "hi", "store": False})).json()
        assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
        ollama = await client.post("/api/chat", json={"model": "wire", "messages": USER, "stream": False})
        assert ollama.json()["message"]["thinking"] == "hmm"


async def test_calls_of_functions(serving: Serving, text: TextModel) -> None:
    async with worlds(serving, text) as it:
        it.wire.call = {"name": "weather", "arguments": '{"city": "Rome"}'}
        client = it.front.client
        body = {"model": "wire", "messages": USER, "tools": [TOOL], "tool_choice": "auto"}
        choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == it.wire.call
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        follow = {**body, "messages": [*USER, choice["message"] | {"content": None}, result]}
        follow["messages"][1] = {k: v for k, v in follow["messages"][1].items() if k in ("role", "tool_calls")}
        answer = (await client.post("/v1/chat/completions", json=follow)).json()["choices"][0]
        assert answer["message"]["content"] == "Hello, world!" and answer["finish_reason"] == "stop"
        assert it.wire.last["messages"][-1]["content"] == "sunny"


async def test_what_a_server_ignores_is_named(serving: Serving, text: TextModel) -> None:
    async with worlds(serving, text) as it:
        it.wire._logprobs = lambda *given: None  # type: ignore[method-assign]
        reply = await it.front.chat(model="wire", logprobs=True)
        assert reply.status_code == 200 and "logprobs" in reply.headers["x-penstock-ignored"]


async def test_logprobs_of_an_answer_behind_a_thought_are_not_named_as_ignored(
    serving: Serving, text: TextModel
) -> None:
    async with worlds(serving, text) as it:
        it.wire.thoughts = "hmm"
        reply = await it.front.chat(model="wire", logprobs=True)
        assert reply.json()["choices"][0]["message"]["reasoning_content"] == "hmm"
        assert reply.json()["choices"][0]["logprobs"]["content"], "the thought has none"
        assert "x-penstock-ignored" not in reply.headers


async def test_a_server_that_reports_no_usage_is_counted_by_its_tokenizer(serving: Serving, text: TextModel) -> None:
    async with worlds(serving, text) as it:
        it.wire.usage = False
        used = (await it.front.chat(model="wire")).json()["usage"]
        assert used["completion_tokens"] == len(text.encode("Hello, world!", special=False))
