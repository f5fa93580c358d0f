"""Ollama's own API: a line of JSON per piece (R-RT-8, R-RT-9)."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol.errors import EngineLost, InvalidRequest
from tests.backends.remote.scripted_server import (
    CONVERSATION,
    NDJSON,
    TOOLS,
    Asked,
    Reply,
    ask,
    client,
    ndjson,
    reply_json,
    scripted,
)


def line(content: str = "", **message: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "created_at": "2026-01-01T00:00:00.123456789Z",
        "message": {"role": "assistant", "content": content, **message},
        "done": False,
    }


def last(reason: str = "stop", **fields: Any) -> dict[str, Any]:
    return {
        **line(),
        "done": True,
        "done_reason": reason,
        "total_duration": 1,
        "load_duration": 1,
        "prompt_eval_count": 11,
        "prompt_eval_duration": 1,
        "eval_count": 5,
        "eval_duration": 1,
        **fields,
    }


TEXT = ndjson(line("Hé"), line("llo 日本"), last())


@pytest.mark.parametrize(
    ("said", "sent", "ignored"),
    [
        ({"thinking": {"type": "disabled"}}, False, ()),
        ({"thinking": {"type": "enabled"}}, True, ()),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, True, ("thinking",)),
        ({"thinking": {"type": "adaptive"}}, None, ("thinking",)),
        ({"reasoning": {"enabled": False}}, False, ()),
        ({"thinking_budget": 5}, None, ("thinking_budget",)),
    ],
)
async def test_other_words_for_whether_it_thinks(
    said: dict[str, Any], sent: bool | None, ignored: tuple[str, ...]
) -> None:
    async with scripted(Reply(TEXT, headers=NDJSON)) as there, client(there, "ollama") as server:
        fits = server.fit({"messages": [{"role": "user", "content": "hi"}], **said})
        assert fits.ignored == ignored and not fits.refused
        await ask(server, **fits.body)
        assert there.asked[-1].json.get("think") is sent


async def test_a_chat_with_thoughts_and_logprobs() -> None:
    odds = {"token": "Hé", "logprob": -0.5, "bytes": [72, 195, 169], "top_logprobs": [{"token": "Hi", "logprob": -1.0}]}
    stream = ndjson(line("", thinking="Hm."), {**line("Hé"), "logprobs": [odds]}, line("llo 日本"), last("length"))
    parts = [stream[at : at + 5] for at in range(0, len(stream), 5)]
    async with scripted(Reply(parts, headers=NDJSON)) as there, client(there, "ollama", model="qwen3:8b") as server:
        answer = await ask(
            server,
            messages=CONVERSATION,
            tools=TOOLS,
            temperature=0.0,
            repetition_penalty=1.1,
            top_k=-1,
            seed=4,
            stop="X",
            max_tokens=9,
            logprobs=True,
            top_logprobs=1,
        )
    assert (answer.text, answer.thoughts, answer.reason) == ("Héllo 日本", "Hm.", "length")
    assert answer.usage == (11, 5, 0)
    [odds_back] = [c.logprobs.content for k in answer.chunks for c in k.choices if c.logprobs and c.logprobs.content]
    assert odds_back[0].logprob == -0.5 and odds_back[0].top_logprobs[0].token == "Hi"
    [asked] = there.asked
    sent = asked.json
    assert asked.target == "/api/chat" and sent["model"] == "qwen3:8b" and sent["stream"] is True
    options = {"temperature": 0.0, "repeat_penalty": 1.1, "top_k": 0, "seed": 4, "stop": ["X"], "num_predict": 9}
    assert sent["options"] == options and sent["logprobs"] is True and sent["top_logprobs"] == 1
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert sent["messages"][2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert sent["messages"][4] == {"role": "tool", "content": "snow", "tool_call_id": "c2", "tool_name": "weather"}


async def test_parallel_calls_are_whole_objects() -> None:
    first = {"function": {"name": "weather", "arguments": {"city": "日本"}}}
    second = {"id": "call_x", "function": {"index": 1, "name": "clock", "arguments": {}}}
    stream = ndjson(line(tool_calls=[first]), line(tool_calls=[second]), last())
    async with scripted(Reply(stream, headers=NDJSON)) as there, client(there, "ollama") as server:
        answer = await ask(server, tools=TOOLS)
    assert answer.reason == "tool_calls"
    assert answer.calls == [("call_0", "weather", {"city": "日本"}), ("call_x", "clock", {})]


async def test_formats_and_choices() -> None:
    async with scripted(Reply(TEXT, headers=NDJSON)) as there, client(there, "ollama") as server:
        schema = {"type": "object"}
        await ask(server, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        await ask(server, response_format={"type": "json_object"})
        await ask(server, tools=TOOLS, tool_choice="none")
        assert server.fit({"tools": TOOLS, "tool_choice": "required"}).refused == ("tool_choice",)
        assert server.fit({"n": 2, "logit_bias": {"1": 1}}).refused == ("n", "logit_bias")
        assert server.fit({"response_format": {"type": "regex", "regex": "a"}}).refused == ("response_format",)
    assert there.asked[0].json["format"] == schema and there.asked[1].json["format"] == "json"
    assert "tools" not in there.asked[2].json


async def test_completions_and_embeddings() -> None:
    def script(asked: Asked) -> Reply:
        if asked.target == "/api/embed":
            return reply_json({"model": "m", "embeddings": [[1, 0], [0, 1]], "prompt_eval_count": 4})
        ends = {"response": "", "done": True, "done_reason": "stop", "prompt_eval_count": 2, "eval_count": 2}
        return Reply(
            ndjson({"response": "one ", "done": False}, {"response": "two", "done": False}, ends), headers=NDJSON
        )

    async with scripted(script) as there, client(there, "ollama") as server:
        answer = await ask(server, "completions", prompt="count", max_tokens=2)
        await ask(server, "completions", prompt="def f(", suffix="return 1")
        found = await server.embed(["a", "b"], "r", 2)
        with pytest.raises(InvalidRequest, match="no token ids"):
            await ask(server, "completions", prompt=[1, 2])
    assert (answer.text, answer.reason, answer.usage) == ("one two", "stop", (2, 2, 0))
    assert there.asked[0].json["raw"] is True and there.asked[0].json["prompt"] == "count"
    assert there.asked[1].json["suffix"] == "return 1" and "raw" not in there.asked[1].json
    assert found.vectors == [[1.0, 0.0], [0.0, 1.0]] and there.asked[2].json["dimensions"] == 2


async def test_an_error_in_the_middle() -> None:
    stream = ndjson(line("Hi"), {"error": "an error was encountered while running the model"})
    async with scripted(Reply(stream, headers=NDJSON)) as there, client(there, "ollama") as server:
        with pytest.raises(EngineLost):
            await ask(server)


async def test_whether_the_model_is_loaded() -> None:
    models: list[dict[str, Any]] = []
    async with scripted(lambda asked: reply_json({"models": models})) as there, client(there, "ollama") as server:
        await server.look()
        assert server.load is not None and server.load.loaded is False and server.load.requests is None
        models.append({"name": "m:latest", "model": "m:latest", "size_vram": 1})
        await server.look()
        assert server.load.loaded is True
    assert there.asked[0].target == "/api/ps"
