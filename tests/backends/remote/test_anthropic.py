"""Anthropic's Messages API, as its documentation shows it on the wire (R-RT-8, R-RT-9)."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol.errors import InvalidRequest
from tests.backends.remote.scripted_server import (
    CONVERSATION,
    TOOLS,
    Asked,
    Reply,
    ask,
    client,
    reply_json,
    scripted,
    sse,
)

START = {
    "type": "message_start",
    "message": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": "m",
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 10,
            "cache_creation_input_tokens": 5,
            "cache_read_input_tokens": 100,
            "output_tokens": 1,
        },
    },
}


def opened(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: int, kind: str, **fields: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def closed(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def ending(reason: str, tokens: int = 9) -> list[dict[str, Any]]:
    told = {"stop_reason": reason, "stop_sequence": None}
    return [{"type": "message_delta", "delta": told, "usage": {"output_tokens": tokens}}, {"type": "message_stop"}]


TEXT = sse(
    START,
    opened(0, type="text", text=""),
    {"type": "ping"},
    delta(0, "text_delta", text="Hé"),
    delta(0, "text_delta", text="llo 日本"),
    closed(0),
    *ending("end_turn"),
    kinds=True,
)


async def test_text_thinking_and_usage_with_the_cache() -> None:
    stream = sse(
        START,
        opened(0, type="thinking", thinking="", signature=""),
        delta(0, "thinking_delta", thinking="Let me "),
        delta(0, "thinking_delta", thinking="see."),
        delta(0, "signature_delta", signature="EqQB"),
        closed(0),
        opened(1, type="redacted_thinking", data="xyz"),
        closed(1),
        opened(2, type="text", text=""),
        delta(2, "text_delta", text="Hi"),
        {"type": "a_new_event", "index": 7},
        closed(2),
        *ending("max_tokens", 20),
        kinds=True,
        end="\r\n",
    )
    async with (
        scripted(Reply([stream[at : at + 7] for at in range(0, len(stream), 7)])) as there,
        client(there, "anthropic", path="/v1", key_env="") as server,
    ):
        answer = await ask(server)
    assert (answer.text, answer.thoughts, answer.reason) == ("Hi", "Let me see.", "length")
    assert answer.usage == (115, 20, 100)


async def test_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "sk-ant-1")
    async with scripted(Reply(TEXT)) as there, client(there, "anthropic", key_env="A_KEY") as server:
        answer = await ask(
            server,
            messages=CONVERSATION,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0.5,
            top_k=-1,
            stop=["END"],
        )
        assert answer.text == "Héllo 日本" and answer.reason == "stop"
        await ask(server, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "clock"}}, max_tokens=7)
        some = {"type": "function", "function": {"name": "clock"}}
        only = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [some]}}
        await ask(server, tools=TOOLS, tool_choice=only, top_k=4)
        schema = {"type": "object"}
        await ask(server, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    first, named, allowed, formed = there.asked
    assert first.target == "/v1/messages" and first.headers["x-api-key"] == "sk-ant-1"
    assert first.headers["anthropic-version"] == "2023-06-01" and "authorization" not in first.headers
    sent = first.json
    assert sent["system"] == "Be brief." and sent["max_tokens"] == 4096 and sent["stream"] is True
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "user"]
    assert sent["messages"][1]["content"] == [
        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "c2", "name": "weather", "input": {"city": "Oslo"}},
    ]
    assert sent["messages"][2]["content"] == [
        {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"},
        {"type": "tool_result", "tool_use_id": "c2", "content": "snow"},
        {"type": "text", "text": "And the time?"},
    ]
    assert sent["tools"][0] == {
        "name": "weather",
        "description": "The weather",
        "input_schema": TOOLS[0]["function"]["parameters"],
    }
    assert sent["tools"][1] == {"name": "clock", "input_schema": {"type": "object"}}
    assert sent["tool_choice"] == {"type": "any", "disable_parallel_tool_use": True}
    assert sent["stop_sequences"] == ["END"] and sent["temperature"] == 0.5 and "top_k" not in sent
    assert named.json["tool_choice"] == {"type": "tool", "name": "clock"} and named.json["max_tokens"] == 7
    assert [tool["name"] for tool in allowed.json["tools"]] == ["clock"] and allowed.json["top_k"] == 4
    assert formed.json["output_config"] == {"format": {"type": "json_schema", "schema": schema}}


async def test_parallel_calls_in_fragments() -> None:
    stream = sse(
        START,
        opened(0, type="text", text=""),
        delta(0, "text_delta", text="I look."),
        closed(0),
        opened(1, type="tool_use", id="toolu_1", name="weather", input={}),
        delta(1, "input_json_delta", partial_json=""),
        delta(1, "input_json_delta", partial_json='{"ci'),
        delta(1, "input_json_delta", partial_json='ty": "日'),
        delta(1, "input_json_delta", partial_json='本"}'),
        closed(1),
        opened(2, type="tool_use", id="toolu_2", name="clock", input={}),
        delta(2, "input_json_delta", partial_json=""),
        closed(2),
        *ending("tool_use"),
        kinds=True,
    )
    async with scripted(Reply(stream)) as there, client(there, "anthropic") as server:
        answer = await ask(server, tools=TOOLS)
    assert answer.text == "I look." and answer.reason == "tool_calls"
    assert answer.calls == [("toolu_1", "weather", {"city": "日本"}), ("toolu_2", "clock", {})]


async def test_a_refusal_is_a_filtered_answer() -> None:
    async with (
        scripted(Reply(sse(START, *ending("refusal"), kinds=True))) as there,
        client(there, "anthropic") as server,
    ):
        assert (await ask(server)).reason == "content_filter"


@pytest.mark.parametrize(
    ("said", "sent", "ignored"),
    [
        ({"enable_thinking": False}, {"type": "disabled"}, ()),
        ({"reasoning": {"enabled": False}}, {"type": "disabled"}, ()),
        ({"reasoning": {"max_tokens": 2000}}, {"type": "enabled", "budget_tokens": 2000}, ()),
        ({"reasoning": {"enabled": True, "max_tokens": 2000}}, {"type": "enabled", "budget_tokens": 2000}, ()),
        ({"max_reasoning_tokens": 2000}, {"type": "enabled", "budget_tokens": 2000}, ()),
        ({"reasoning_budget": 0}, {"type": "disabled"}, ()),
        ({"reasoning_budget": -1}, None, ("reasoning_budget",)),
        ({"enable_thinking": True}, None, ("enable_thinking",)),
    ],
)
async def test_other_words_for_how_much_it_thinks(
    said: dict[str, Any], sent: dict[str, Any] | None, ignored: tuple[str, ...]
) -> None:
    async with scripted(Reply(TEXT)) as there, client(there, "anthropic") as server:
        fits = server.fit({"messages": CONVERSATION[:2], **said})
        assert fits.ignored == ignored and not fits.refused
        await ask(server, **fits.body)
        assert there.asked[-1].json.get("thinking") == sent


async def test_what_it_cannot_express() -> None:
    async with scripted(Reply(TEXT)) as there, client(there, "anthropic") as server:
        body = {
            "messages": [],
            "seed": 3,
            "n": 1,
            "logprobs": True,
            "user": "u",
            "frequency_penalty": 0.0,
            "min_p": 0.2,
        }
        found = server.fit(body)
        assert found.refused == ("seed", "logprobs", "min_p") and found.ignored == ("n", "user", "frequency_penalty")
        assert server.fit({"response_format": {"type": "json_object"}}).refused == ("response_format",)
        assert not server.fit({"continue_final_message": True, "add_generation_prompt": False}).refused
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
        with pytest.raises(InvalidRequest, match="image_url"):
            await ask(server, messages=image)
        broken = [{**CONVERSATION[2], "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]}]
        with pytest.raises(InvalidRequest, match="JSON object"):
            await ask(server, messages=broken)
        with pytest.raises(InvalidRequest, match="no embeddings"):
            await server.embed(["x"], "r")
    assert there.asked == []


async def test_an_empty_answer_in_the_history_is_left_out() -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "b"}]
    async with scripted(Reply(TEXT)) as there, client(there, "anthropic") as server:
        await ask(server, messages=said)
    texts = [{"type": "text", "text": text} for text in "ab"]
    assert there.asked[0].json["messages"] == [{"role": "user", "content": texts}]


async def test_tokens_are_counted_there() -> None:
    def script(asked: Asked) -> Reply:
        assert asked.target == "/v1/messages/count_tokens" and "max_tokens" not in asked.json
        return reply_json({"input_tokens": 14})

    async with scripted(script) as there, client(there, "anthropic") as server:
        assert (await server.count({"messages": CONVERSATION}, "r")).count == 14
        assert server.supports("tokenize_chat") and not server.supports("tokenize"), "it counts whole requests"
        with pytest.raises(InvalidRequest, match="no tokenize"):
            await server.count({"prompt": "hi"}, "r")
