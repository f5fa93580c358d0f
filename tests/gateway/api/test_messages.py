"""The Messages API, as the official SDK of Anthropic uses it."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import anthropic
import pytest

from penstock.config.schema import TierConfig
from penstock.gateway.api.anthropic.renderer import _input
from penstock.text import TextModel
from tests.gateway.accounting.test_quotas import settings, sign_in
from tests.gateway.conftest import Running, Serving
from tests.gateway.generation.test_tool_choice import CALL, says
from tests.scripted import ScriptedEngine

WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object"}}
HI: Any = [{"role": "user", "content": "hi"}]


def sdk(running: Running) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{running.port}", api_key="none", max_retries=0)


def prompt(running: Running, text: TextModel) -> str:
    return text.decode(running.engine.seen[-1].prompt, skip_special=False)


async def create(running: Running, **body: Any) -> Any:
    body = {"model": "tiny", "messages": HI, "max_tokens": 50, **body}
    return await running.client.post("/v1/messages", json=body)


async def test_a_message(serving: Serving, text: TextModel) -> None:
    async with serving() as running:
        reply = await sdk(running).messages.create(
            model="small",
            max_tokens=50,
            system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
            messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            metadata={"user_id": "ann"},
            extra_body={"temperature": 0.5, "top_k": 7, "top_p": 0.9},
        )
        (block,) = reply.content
        assert block.type == "text" and block.text == "Hello, world!"
        assert (reply.stop_reason, reply.model, reply.role) == ("end_turn", "tiny", "assistant")
        assert reply._request_id is not None and reply._request_id.startswith("req_")
        seen = running.engine.seen[-1]
        assert reply.usage.cache_read_input_tokens == 3
        assert reply.usage.input_tokens + 3 == len(seen.prompt)
        assert reply.usage.output_tokens == 14
        assert prompt(running, text) == "<|system|>Be kind.<|end|><|user|>hi<|end|><|assistant|>"
        assert (seen.params.temperature, seen.params.top_k, seen.params.top_p) == (0.5, 7, 0.9)
        assert seen.params.max_tokens == 50


async def test_the_events_of_a_stream(serving: Serving) -> None:
    async with serving() as running:
        stream = await sdk(running).messages.create(model="tiny", max_tokens=50, messages=HI, stream=True)
        events = [event async for event in stream]
        kinds = [event.type for event in events]
        assert [kind for kind in kinds if kind != "content_block_delta"] == [
            "message_start",
            "content_block_start",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        texts = [event.delta.text for event in events if event.type == "content_block_delta"]  # type: ignore[union-attr]
        assert "".join(texts) == "Hello, world!"
        assert events[-2].delta.stop_reason == "end_turn" and events[-2].usage.output_tokens == 14
        raw = (await create(running, stream=True)).text
        assert 'event: ping\ndata: {"type":"ping"}\n\n' in raw and "[DONE]" not in raw


async def test_the_sdk_s_own_accumulator_agrees(serving: Serving, text: TextModel) -> None:
    async with (
        serving(says(text, f"One moment.\n{CALL}")) as running,
        sdk(running).messages.stream(model="tiny", max_tokens=400, messages=HI, tools=[WEATHER, CLOCK]) as stream,
    ):
        streamed = await stream.get_final_message()
        whole = await sdk(running).messages.create(model="tiny", max_tokens=400, messages=HI, tools=[WEATHER, CLOCK])
        for message in (streamed, whole):
            said, first, second = message.content
            assert said.type == "text" and said.text == "One moment."
            assert first.type == "tool_use" and first.input == {"city": "Zürich"}
            assert second.type == "tool_use" and (second.name, second.input) == ("clock", {})
            assert message.stop_reason == "tool_use"


async def test_tool_results_make_the_prompt_of_chat(serving: Serving, text: TextModel) -> None:
    async with serving(says(text, CALL)) as running:
        asked = await sdk(running).messages.create(model="tiny", max_tokens=400, messages=HI, tools=[WEATHER, CLOCK])
        calls = [block for block in asked.content if block.type == "tool_use"]
        conversation: Any = [
            *HI,
            {"role": "assistant", "content": asked.content},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": calls[0].id, "content": "sunny"},
                    {"type": "tool_result", "tool_use_id": calls[1].id, "content": "no clock", "is_error": True},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ]
        options: Any = {"model": "tiny", "messages": conversation, "tools": [WEATHER, CLOCK]}
        await sdk(running).messages.create(max_tokens=10, **options)
        spoken = prompt(running, text)
        count = await sdk(running).messages.count_tokens(**options)
        assert count.input_tokens == len(running.engine.seen[-1].prompt)
        arguments = ('{"city":"Zürich"}', "{}")
        history = [
            *HI,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": call.id, "function": {"name": call.name, "arguments": given}}
                    for call, given in zip(calls, arguments, strict=True)
                ],
            },
            {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"},
            {"role": "tool", "tool_call_id": calls[1].id, "content": "Error: no clock"},
            {"role": "user", "content": "And now?"},
        ]
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"],
                },
            }
            for tool in (WEATHER, CLOCK)
        ]  # fmt: skip
        assert (await running.chat(messages=history, tools=tools)).status_code == 200
        assert prompt(running, text) == spoken


async def test_how_it_ended(serving: Serving, text: TextModel) -> None:
    async with serving() as running:
        cut = (await create(running, max_tokens=5)).json()
        assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "Hello")
        stopped = (await create(running, stop_sequences=["wor"])).json()
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "wor")
        assert stopped["content"][0]["text"] == "Hello, "
    async with serving(says(text, CALL)) as running:
        limit = len(text.encode('<tool_call>[{"name": "get_weather", "arguments": {"ci'))
        cut = (await create(running, max_tokens=limit, tools=[WEATHER])).json()
        assert cut["stop_reason"] == "max_tokens"
        assert cut["content"][0]["input"]["INVALID_JSON"].startswith('{"c')


@pytest.mark.parametrize("arguments", ['{"a": 1}', "", "[1]", '{"a', "[" * 5000])
def test_the_input_of_a_call_is_always_an_object(arguments: str) -> None:
    expected = {"a": 1} if arguments == '{"a": 1}' else {"INVALID_JSON": arguments} if arguments else {}
    assert _input(arguments) == expected


async def test_it_is_charged_to_the_user_it_names(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path)) as running:
        await create(running, metadata={"user_id": "ann"})
        await create(running, metadata={"user_id": "ann"}, stream=True)
        (row,) = (await running.client.get("/v1/usage?by=user")).json()["data"]
        assert (row["user"], row["requests"], row["completion_tokens"]) == ("ann", 2, 28)


async def test_formats_and_tool_choices_reach_the_engine(serving: Serving, text: TextModel) -> None:
    async with serving(says(text, "x")) as running:
        for body in (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {"tools": [WEATHER], "tool_choice": {"type": "any"}},
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}},
            {"tools": [WEATHER], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ):
            reply = await create(running, **body)
            assert reply.status_code == 200, reply.text
            assert running.engine.seen[-1].params.grammar
        await create(running, tools=[WEATHER], tool_choice={"type": "none"}, thinking={"type": "disabled"})
        assert not running.engine.seen[-1].params.grammar and "get_weather" not in prompt(running, text)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"compaction": {"type": "x"}}, "compaction"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]},
            "of the assistant",
        ),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, "context length"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"tools": [WEATHER, WEATHER]}, "get_weather"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"container": "c"}, "container"),
        ({"logprobs": True}, "logprobs"),
    ],
)
async def test_what_is_not_honoured_is_refused_in_this_api_s_shape(
    serving: Serving, body: dict[str, Any], says: str
) -> None:
    async with serving() as running:
        refused = await create(running, **body)
        assert refused.status_code == 400, refused.text
        problem = refused.json()
        assert problem["type"] == "error" and problem["error"]["type"] == "invalid_request_error"
        assert set(problem["error"]) == {"type", "message"} and says in problem["error"]["message"]
        assert problem["request_id"] == refused.headers["x-request-id"]
        assert not running.engine.seen


async def test_other_errors_are_what_the_sdk_knows(serving: Serving, text: TextModel) -> None:
    async with serving() as running:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await sdk(running).messages.create(model="huge", max_tokens=5, messages=HI)
        assert unknown.value.type == "not_found_error"
    engine = ScriptedEngine(text, lambda request: [ord("a")] * 400, step_s=0.01)
    async with serving(engine) as running:
        stream = await sdk(running).messages.create(model="tiny", max_tokens=400, messages=HI, stream=True)
        with pytest.raises(anthropic.APIStatusError) as broken:
            async for event in stream:
                if event.type == "content_block_delta":
                    running.stop.set()
        assert broken.value.body["error"]["type"] == "api_error"  # type: ignore[index,call-overload]


async def test_a_silence_is_filled_with_pings(serving: Serving, text: TextModel) -> None:
    engine = ScriptedEngine(text)
    engine.hold = True
    async with serving(engine, hold_status_s=0.02, keep_alive_s=0.02) as running:
        body = {"model": "tiny", "messages": HI, "max_tokens": 50, "stream": True}
        async with running.client.stream("POST", "/v1/messages", json=body) as reply:
            seen: list[str] = []
            async for line in reply.aiter_lines():
                seen.append(line)
                if seen.count("event: ping") == 4:
                    engine.hold = False
        events = [line.removeprefix("event: ") for line in seen if line.startswith("event: ")]
        assert events[0] == "message_start" and set(events[1:5]) == {"ping"} and events[-1] == "message_stop"


async def test_limits_are_told_as_this_api_tells_them(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path, TierConfig(name="free", requests_per_minute=1))) as running:
        await sign_in(running)
        key = running.client.headers.pop("authorization").removeprefix("Bearer ")
        assert (await create(running)).json()["error"]["type"] == "authentication_error"
        running.client.headers["x-api-key"] = key
        first, second = await create(running), await create(running)
        assert first.headers["anthropic-ratelimit-requests-limit"] == "1"
        assert first.headers["anthropic-ratelimit-requests-remaining"] == "0"
        reset = datetime.datetime.fromisoformat(first.headers["anthropic-ratelimit-requests-reset"])
        assert 0 < (reset - datetime.datetime.now(datetime.UTC)).total_seconds() < 65
        assert not [name for name in first.headers if name.startswith("x-ratelimit")]
        assert second.status_code == 429 and second.json()["error"]["type"] == "rate_limit_error"
        assert second.headers["retry-after"]
