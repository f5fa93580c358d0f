"""`functions` and `function_call`, the older form of tools, through the official SDK and as plain JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.backends.remote.server import RemoteServer
from penstock.backends.remote.upstream import Upstream
from penstock.routing.remotes import RemoteModel
from penstock.text import TextModel
from tests.gateway.api.test_reasoning import OPENS, scripted
from tests.gateway.api.test_responses import prompt, sdk, stored
from tests.gateway.conftest import Serving, events
from tests.gateway.generation.test_tool_choice import CALL, WEATHER, says
from tests.text.test_thoughts import model

FUNCTION: Any = WEATHER["function"]
ONE = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'
ARGUMENTS = '{"city": "Zürich"}'
ASKED: Any = [{"role": "user", "content": "Weather?"}]


async def test_a_call_and_its_result(serving: Serving, text: TextModel) -> None:
    async with serving(says(text, f"One moment.\n{ONE}")) as running:
        client = sdk(running)
        answer = await client.chat.completions.create(model="tiny", messages=ASKED, functions=[FUNCTION])
        (choice,) = answer.choices
        assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
        assert choice.message.content == "One moment." and choice.message.function_call is not None
        assert choice.message.function_call.to_dict() == {"name": "get_weather", "arguments": ARGUMENTS}
        assert "Weather of a city" in prompt(running, text)
        assert not running.engine.seen[-1].params.grammar, "the model may use its own format"
        # Many programs send the result without the functions.
        results: Any = [
            choice.message.model_dump(),
            {"role": "function", "name": "get_weather", "content": "sunny"},
        ]
        again = await client.chat.completions.create(model="tiny", messages=[*ASKED, *results])
        assert again.choices[0].finish_reason == "stop"
        shown = prompt(running, text)
        assert '"name": "get_weather"' in shown and "<tool_response>\nsunny" in shown
        with_tools: Any = [
            {
                "role": "assistant",
                "content": "One moment.",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        ]
        await client.chat.completions.create(model="tiny", messages=[*ASKED, *with_tools])
        assert prompt(running, text) == shown


async def test_a_streamed_call(serving: Serving, text: TextModel) -> None:
    async with serving(says(text, ONE)) as running:
        asked = {"functions": [FUNCTION], "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last, done = events((await running.chat(messages=ASKED, **asked)).text)
        assert done == "[DONE]" and json.loads(last)["usage"]["completion_tokens"] > 0
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        calls = [choice["delta"]["function_call"] for choice in choices if "function_call" in choice["delta"]]
        assert calls[0] == {"name": "get_weather", "arguments": ""}
        assert all(set(call) == {"arguments"} for call in calls[1:])
        assert "".join(call["arguments"] for call in calls) == ARGUMENTS
        assert choices[-1]["finish_reason"] == "function_call"
        assert not any("tool_calls" in choice["delta"] for choice in choices)
        stream = await sdk(running).chat.completions.create(
            model="tiny", messages=ASKED, functions=[FUNCTION], function_call={"name": "get_weather"}, stream=True
        )
        name = arguments = ""
        async for chunk in stream:
            if call := chunk.choices[0].delta.function_call:
                name, arguments = name + (call.name or ""), arguments + (call.arguments or "")
        assert (name, arguments) == ("get_weather", ARGUMENTS)
        # Each of several choices has a call of its own.
        both = [json.loads(chunk) for chunk in events((await running.chat(**{**asked, "n": 2})).text)[:-2]]
        for index in range(2):
            own = [chunk["choices"][0] for chunk in both if chunk["choices"][0]["index"] == index]
            calls = [choice["delta"]["function_call"] for choice in own if "function_call" in choice["delta"]]
            assert calls[0] == {"name": "get_weather", "arguments": ""}
            assert "".join(call["arguments"] for call in calls) == ARGUMENTS
            assert own[-1]["finish_reason"] == "function_call"


async def test_which_function_is_called(serving: Serving, text: TextModel) -> None:
    clock: Any = {"name": "clock"}
    async with serving(says(text, CALL)) as running:
        none = (await running.chat(functions=[FUNCTION], function_call="none")).json()["choices"][0]
        assert none["message"]["content"] == CALL and none["finish_reason"] == "stop"
        assert "function_call" not in none["message"]
        named = await running.chat(functions=[FUNCTION, clock], function_call={"name": "clock"})
        assert "get_weather" not in running.engine.seen[-1].params.grammar
        assert "clock" in running.engine.seen[-1].params.grammar and named.status_code == 200
        # There is room for one call.
        auto = (await running.chat(functions=[FUNCTION, clock], function_call="auto")).json()["choices"][0]
        assert auto["message"]["function_call"]["name"] == "get_weather"
        assert auto["message"]["content"] is None and auto["finish_reason"] == "function_call"
        streamed = (await running.chat(functions=[FUNCTION, clock], stream=True)).text
        assert '"name":"get_weather"' in streamed and '"name":"clock"' not in streamed
        for nothing in ({"functions": []}, {"functions": None, "function_call": None}, {"function_call": "none"}):
            assert (await running.chat(**nothing)).status_code == 200


async def test_what_cannot_be_is_refused_under_its_own_name(serving: Serving, text: TextModel) -> None:
    async with serving(says(text, ONE)) as running:
        with pytest.raises(openai.BadRequestError, match="older form of `tools`") as refused:
            await sdk(running).chat.completions.create(
                model="tiny",
                messages=ASKED,
                functions=[FUNCTION],
                tools=[WEATHER],  # type: ignore[list-item]
            )
        assert refused.value.param == "tools"
        unknown = await running.chat(functions=[FUNCTION], function_call={"name": "other"})
        assert unknown.json()["error"]["message"].startswith("`function_call` names `other`")
        alone = (await running.chat(function_call="auto")).json()["error"]
        assert (alone["param"], alone["message"]) == (
            "function_call",
            "`function_call` is only allowed with `functions`.",
        )


async def test_results_belong_to_the_newest_open_call(serving: Serving, text: TextModel) -> None:
    def call(city: str) -> dict[str, Any]:
        return {"role": "assistant", "content": None, "function_call": {"name": "get_weather", "arguments": city}}

    def result(said: str | None) -> dict[str, Any]:
        return {"role": "function", "name": "get_weather", "content": said}

    async with serving(says(text, "fine")) as running:
        messages = [*ASKED, call('{"city": "A"}'), result("rain"), call('{"city": "B"}'), result("snow"), result(None)]
        reply = await running.chat(messages=messages)
        assert reply.status_code == 200, reply.text
        shown = prompt(running, text)
        assert shown.index('"A"') < shown.index("rain") < shown.index('"B"') < shown.index("snow")
        # The history of a truncated conversation may begin with a result.
        reply = await running.chat(messages=[result("hail"), *ASKED])
        assert reply.status_code == 200 and "hail" in prompt(running, text)
        counted = await running.client.post("/v1/tokenize", json={"model": "tiny", "messages": messages})
        assert counted.status_code == 200 and counted.json()["count"] > 0


async def test_thoughts_come_with_a_call(serving: Serving, tmp_path: Path) -> None:
    thinker = model(tmp_path, "<think>", "</think>", template=OPENS)
    said = f"Let me see.\n</think>\n\n{ONE}"
    async with serving(scripted(thinker, said), text=thinker) as running:
        whole = (await running.chat(messages=ASKED, functions=[FUNCTION])).json()
        message = whole["choices"][0]["message"]
        assert message["reasoning_content"] == "Let me see."
        assert message["function_call"]["arguments"] == ARGUMENTS
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_stored_conversations_and_completions(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(says(text, CALL), **stored(tmp_path)) as running:
        for asked in (ASKED, [{"role": "function", "name": "get_weather", "content": "sunny"}]):
            reply = await running.chat(messages=asked, functions=[FUNCTION, {"name": "clock"}], conversation="s")
            assert reply.status_code == 200, reply.text
        kept = (await running.client.get("/v1/conversations/s")).json()["messages"]
        assert [message["role"] for message in kept] == ["user", "assistant", "tool", "assistant"]
        (call,) = kept[1]["tool_calls"]
        assert kept[2]["tool_call_id"] == call["id"] and call["function"]["name"] == "get_weather"
        for stream in (False, True):
            reply = await running.chat(messages=ASKED, functions=[FUNCTION], store=True, stream=stream)
            id = json.loads(events(reply.text)[0])["id"] if stream else reply.json()["id"]
            found = (await running.client.get(f"/v1/chat/completions/{id}")).json()
            assert found["choices"][0]["message"]["function_call"]["name"] == "get_weather"
            assert found["choices"][0]["finish_reason"] == "function_call" and found["tools"] is None


async def test_another_server_is_asked_with_tools(serving: Serving, text: TextModel) -> None:
    async with serving(says(text, ONE)) as behind:
        far = RemoteModel("far", [RemoteServer("0", Upstream(f"http://127.0.0.1:{behind.port}/v1", "tiny"))])
        async with serving(others=[far]) as front:
            whole = await front.chat(model="far", messages=ASKED, functions=[FUNCTION])
            choice = whole.json()["choices"][0]
            assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": ARGUMENTS}
            assert choice["finish_reason"] == "function_call"
            streamed = (await front.chat(model="far", messages=ASKED, functions=[FUNCTION], stream=True)).text
            assert '"function_call":{"name":"get_weather","arguments":""}' in streamed
            history = [
                *ASKED,
                {"role": "assistant", "content": None, "function_call": choice["message"]["function_call"]},
                {"role": "function", "name": "get_weather", "content": "sunny"},
            ]
            assert (await front.chat(model="far", messages=history)).status_code == 200
