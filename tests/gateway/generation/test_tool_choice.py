"""Function calls and response formats through the API, with an engine that says what the test wants it to say."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.engine.request import Request
from penstock.gateway.generation.schemas import ChatRequest
from penstock.gateway.generation.tokenized_model import RemoteText
from penstock.gateway.generation.tool_choice import toolbox_of
from penstock.text import TextModel
from tests.gateway.conftest import Serving, events
from tests.scripted import ScriptedEngine

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>[{"name": "get_weather", "arguments": {"city": "Zürich"}}, {"name": "clock"}]</tool_call>'


def says(text: TextModel, answer: str) -> ScriptedEngine:
    return ScriptedEngine(text, answer, max_model_len=4096)


def streamed(body: str) -> tuple[str, list[dict[str, str]], str | None]:
    """Content, calls and finish reason of a stream, put together as the official SDK does."""
    content, finish = "", None
    calls: list[dict[str, str]] = []
    for data in events(body)[:-1]:
        (choice,) = json.loads(data)["choices"]
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
        finish = choice["finish_reason"] or finish
    return content, calls, finish


async def test_calls_are_returned_whole_and_streamed(serving: Serving, text: TextModel) -> None:
    async with serving(says(text, f"One moment.\n{CALL}")) as gateway:
        whole = (await gateway.chat(tools=[WEATHER, CLOCK])).json()["choices"][0]
        assert whole["finish_reason"] == "tool_calls"
        message = whole["message"]
        assert message["content"] == "One moment."
        first, second = message["tool_calls"]
        assert first["type"] == "function" and first["id"] != second["id"]
        assert first["function"] == {"name": "get_weather", "arguments": '{"city": "Zürich"}'}
        assert second["function"] == {"name": "clock", "arguments": "{}"}
        content, calls, finish = streamed((await gateway.chat(tools=[WEATHER, CLOCK], stream=True)).text)
        assert (content, finish) == ("One moment.", "tool_calls")
        assert [(call["name"], call["arguments"]) for call in calls] == [
            (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
        ]


async def test_a_message_of_calls_alone_has_no_content(serving: Serving, text: TextModel) -> None:
    async with serving(says(text, CALL)) as gateway:
        message = (await gateway.chat(tools=[WEATHER, CLOCK])).json()["choices"][0]["message"]
        assert message["content"] is None and len(message["tool_calls"]) == 2


async def test_without_tools_nothing_is_parsed(serving: Serving, text: TextModel) -> None:
    async with serving(says(text, CALL)) as gateway:
        for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
            choice = (await gateway.chat(**body)).json()["choices"][0]
            assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
            assert "tool_calls" not in choice["message"]


async def test_a_call_cut_by_the_limit_says_length(serving: Serving, text: TextModel) -> None:
    async with serving(says(text, CALL)) as gateway:
        limit = len(text.encode('<tool_call>[{"name": "get_weather", "arguments": {"ci'))
        choice = (await gateway.chat(tools=[WEATHER], max_tokens=limit)).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"c')


async def test_a_template_without_tools_gets_them_explained(serving: Serving, text: TextModel) -> None:
    history = [
        {"role": "user", "content": "Weather in Rome?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    async with serving(says(text, "Sunny.")) as gateway:
        reply = await gateway.chat(messages=history, tools=[WEATHER])
        assert reply.status_code == 200, reply.text
        prompt = text.decode(gateway.engine.seen[-1].prompt, skip_special=False)
        assert "<tools>" in prompt and '"get_weather"' in prompt and "Weather of a city" in prompt
        assert '<tool_call>[{"name": "get_weather", "arguments": {"city": "Rome"}}]</tool_call>' in prompt
        assert "<tool_response>\nsunny\n</tool_response>" in prompt
        counted = await gateway.client.post(
            "/v1/tokenize", json={"model": "tiny", "messages": history, "tools": [WEATHER]}
        )
        assert counted.json()["tokens"] == gateway.engine.seen[-1].prompt


async def grammar_of(serving: Serving, text: TextModel, **body: Any) -> str:
    async with serving(says(text, "x")) as gateway:
        reply = await gateway.chat(**body)
        assert reply.status_code == 200, reply.text
        return gateway.engine.seen[-1].params.grammar


@pytest.mark.slow
async def test_a_grammar_reaches_the_engine_only_where_one_is_asked_for(serving: Serving, text: TextModel) -> None:
    assert not await grammar_of(serving, text)
    assert not await grammar_of(serving, text, response_format={"type": "text"})
    assert not await grammar_of(serving, text, tools=[WEATHER])
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    for body in (
        {"response_format": {"type": "json_object"}},
        {"tools": [strict]},
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tools": [WEATHER], "parallel_tool_calls": False},
        {"tools": [WEATHER], "response_format": {"type": "json_object"}},
    ):
        assert await grammar_of(serving, text, **body)
    named = await grammar_of(
        serving, text, tools=[WEATHER, CLOCK], tool_choice={"type": "function", "function": {"name": "clock"}}
    )
    assert "clock" in named and "get_weather" not in named


def test_a_function_that_is_named_is_called_once(text: TextModel) -> None:
    model = RemoteText("tiny", text, None)
    for choice, asked, several in (
        ("required", None, True),
        ({"type": "function", "function": {"name": "clock"}}, None, False),
        ({"type": "function", "function": {"name": "clock"}}, True, True),
        ("required", False, False),
    ):
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "a"}],
            "tools": [CLOCK],
            "tool_choice": choice,
            "parallel_tool_calls": asked,
        }
        toolbox = toolbox_of(msgspec.convert(body, ChatRequest), model)
        assert toolbox is not None and toolbox.parallel is several


async def test_completions_take_a_response_format_too(serving: Serving, text: TextModel) -> None:
    async with serving(says(text, "x")) as gateway:
        reply = await gateway.complete(response_format={"type": "choice", "choice": ["a", "b"]}, n=2)
        assert reply.status_code == 200
        assert all('\\"a\\" | \\"b\\"' in seen.params.grammar for seen in gateway.engine.seen)
        await gateway.complete(response_format={"type": "choice", "choice": ["a", "b"]})
        refused = await gateway.complete(response_format={"type": "regex", "regex": "("})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "unsupported_grammar"
        counted = [
            await gateway.metric(f'penstock_grammars_total{{outcome="{o}"}}') for o in ("compiled", "known", "refused")
        ]
        assert counted == [1, 1, 1]


async def test_a_grammar_the_engine_refuses_is_the_callers_error(serving: Serving, text: TextModel) -> None:
    from penstock.engine.request import GRAMMAR_REFUSED, Delta

    class Refusing(ScriptedEngine):
        def submit(self, request: Request) -> None:
            self._deltas.append(
                Delta(request.request_id, finish_reason="error", error=f"{GRAMMAR_REFUSED}: too complex")
            )

    async with serving(Refusing(text)) as gateway:
        reply = await gateway.chat(response_format={"type": "json_object"})
        assert reply.status_code == 400 and "too complex" in reply.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completed_grammar_ends_with_stop_and_keeps_its_last_token(
    serving: Serving, text: TextModel, stream: bool
) -> None:
    class Completing(ScriptedEngine):
        def _advance(self, id: str) -> None:
            super()._advance(id)
            if id in self._left and not self._left[id][1]:
                self._deltas[-1].finish_reason = "complete"
                del self._left[id]

    engine = Completing(text, lambda request: text.encode('{"a": 1}'))
    async with serving(engine) as gateway:
        reply = await gateway.chat(response_format={"type": "json_object"}, stream=stream)
        if stream:
            content, _, finish = streamed(reply.text)
        else:
            choice = reply.json()["choices"][0]
            content, finish = choice["message"]["content"], choice["finish_reason"]
        assert (content, finish) == ('{"a": 1}', "stop")
