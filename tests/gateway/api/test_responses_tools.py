"""Tools and items of the Responses API, as agents use them, through the official SDK."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.text import TextModel
from tests.gateway.api.test_responses import CLOCK, WEATHER, create, prompt, sdk, stored
from tests.gateway.conftest import Serving
from tests.gateway.generation.test_tool_choice import says
from tests.scripted import ScriptedEngine, make_text

PATCH: Any = {
    "type": "custom",
    "name": "patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** " /[a-z]+/ "\\n"?'},
}
AGENTS: Any = {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [CLOCK, PATCH]}


def calls(name: str, arguments: str) -> str:
    return f'<tool_call>[{{"name": "{name}", "arguments": {arguments}}}]</tool_call>'


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """With room for descriptions of tools."""
    return make_text(tmp_path_factory.mktemp("roomy"), context_length=8192)


def saying(text: TextModel, words: str) -> ScriptedEngine:
    return ScriptedEngine(text, words, max_model_len=8192)


async def test_a_free_text_tool_gets_its_text_and_returns_a_result(serving: Serving, text: TextModel) -> None:
    said = '*** "a"\n\té'
    engine = saying(text, "On it.\n" + calls("agents__patch", json.dumps({"input": said})))
    async with serving(engine, text) as running:
        client = sdk(running)
        async with client.responses.stream(model="tiny", input="Patch!", tools=[AGENTS]) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        kinds = [event.type for event in events]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        assert deltas and "".join(deltas) == said
        assert kinds[-3:] == [
            "response.custom_tool_call_input.done",
            "response.output_item.done",
            "response.completed",
        ]
        message, call = final.output
        assert message.type == "message" and call.type == "custom_tool_call"
        assert (call.name, call.namespace, call.input) == ("patch", "agents", said)
        whole = await client.responses.create(model="tiny", input="Patch!", tools=[AGENTS])
        assert whole.output[1].input == said  # type: ignore[union-attr]
        # The model was told the grammar, and it is enforced.
        assert "[a-z]+" in prompt(running, text) and "Sub-agents. Changes files." in prompt(running, text)
        assert "RULE_START" in running.engine.seen[-1].params.grammar
        output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
        history: Any = [{"role": "user", "content": "Patch!"}, *final.output, output]
        await client.responses.create(model="tiny", input=history, tools=[AGENTS])
        assert '"agents__patch"' in prompt(running, text) and "Done." in prompt(running, text)


@pytest.mark.parametrize(
    ("tool", "arguments", "field", "result"),
    [
        ("local_shell", {"command": ["ls", "-l"], "timeout_ms": 5}, "action", {"output": "files"}),
        ("shell", {"commands": ["ls"]}, "action", {"output": [{"stdout": "files", "stderr": ""}]}),
        (
            "apply_patch",
            {"type": "delete_file", "path": "a.py"},
            "operation",
            {"status": "completed", "output": "files"},
        ),
    ],
)
async def test_built_in_tools_that_the_client_runs(
    serving: Serving, text: TextModel, tool: str, arguments: dict[str, Any], field: str, result: dict[str, Any]
) -> None:
    async with serving(saying(text, calls(tool, json.dumps(arguments))), text) as running:
        asked = (await create(running, tools=[{"type": tool}])).json()
        (call,) = asked["output"]
        assert call["type"] == f"{tool}_call" and arguments.items() <= call[field].items()
        named = {"id": call["id"]} if tool == "local_shell" else {"call_id": call["call_id"]}
        output = {"type": f"{tool}_call_output", **named, **result}
        answered = await create(
            running, input=[{"role": "user", "content": "hi"}, call, output], tools=[{"type": tool}]
        )
        assert answered.status_code == 200, answered.text
        spoken = prompt(running, text)
        assert f'"{tool}"' in spoken and "files" in spoken.rpartition("<tool_response>")[2]


async def test_what_only_another_server_runs_is_left_out_and_named(serving: Serving, text: TextModel) -> None:
    async with serving(saying(text, "Hi."), text) as running:
        history = [
            {"role": "developer", "content": "Be kind."},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
            {"type": "additional_tools", "role": "developer", "tools": [WEATHER, {"type": "web_search"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        ]
        reply = await create(
            running,
            input=history,
            tools=[{"type": "web_search", "external_web_access": True}, {"type": "mcp", "server_label": "x"}],
            tool_choice="auto",
            parallel_tool_calls=True,
            include=["reasoning.encrypted_content"],
            reasoning={"summary": "auto", "effort": "low"},
            text={"verbosity": "low"},
            client_metadata={"x": "y"},
            max_tool_calls=3,
            store=False,
        )
        assert reply.status_code == 200, reply.text
        assert set(reply.headers["x-penstock-ignored"].split(", ")) == {
            "client_metadata", "input.reasoning", "input.web_search_call",
            "reasoning", "text.verbosity", "tools.mcp", "tools.web_search",
        }  # fmt: skip
        assert '"get_weather"' in prompt(running, text)
        assert reply.json()["tools"][0]["type"] == "web_search" and reply.json()["max_tool_calls"] == 3
        # With nothing left to offer there is nothing to choose from.
        assert (await create(running, tools=[{"type": "web_search"}], tool_choice="auto")).status_code == 200
        refused = await create(running, tools=[{"type": "web_search"}], tool_choice="required")
        assert refused.status_code == 400


async def test_tool_choices_of_every_form(serving: Serving, text: TextModel) -> None:
    async with serving(saying(text, calls("clock", "{}")), text) as running:
        some = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
        for choice, allowed in (
            (some, {"clock"}),
            ({**some, "mode": "auto", "tools": [{"type": "namespace", "name": "agents"}]}, {"agents__clock"}),
            ({"type": "function", "name": "clock"}, {"clock"}),
            ({"type": "function", "name": "clock", "namespace": "agents"}, {"agents__clock"}),
            ({"type": "custom", "name": "patch", "namespace": "agents"}, {"agents__patch"}),
            ({"type": "local_shell"}, {"local_shell"}),
        ):
            reply = await create(running, tools=[WEATHER, CLOCK, AGENTS, {"type": "local_shell"}], tool_choice=choice)
            assert reply.status_code == 200, reply.text
            assert reply.json()["tool_choice"] == choice
            grammar = running.engine.seen[-1].params.grammar
            names = ("get_weather", "clock", "agents__clock", "agents__patch", "local_shell")
            offered = {name for name in names if f'\\"name\\\\\\": \\\\\\"{name}\\\\\\"' in grammar}
            assert offered >= allowed and "get_weather" not in offered, grammar
            assert all(name in prompt(running, text) for name in names)
        chat = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": "clock"}}]}}  # fmt: skip
        definition = {"type": "function", "function": {"name": "clock"}}
        assert (await running.chat(tools=[definition], tool_choice=chat)).status_code == 200
        for wrong in ({"type": "allowed_tools"}, {"type": "function"}):
            refused = await running.chat(tools=[definition], tool_choice=wrong)
            assert refused.json()["error"]["param"] == f"tool_choice.{wrong['type']}"


async def test_sampling_parameters_are_those_of_chat(serving: Serving, text: TextModel) -> None:
    async with serving(says(text, "one two")) as running:
        reply = await create(
            running, top_k=3, seed=7, stop=[" t"], ignore_eos=True, min_p=0.1, presence_penalty=0.5, max_tokens=20
        )
        assert reply.status_code == 200, reply.text
        params = running.engine.seen[-1].params
        assert (params.top_k, params.seed, params.min_p, params.presence_penalty) == (3, 7, 0.1, 0.5)
        assert params.max_tokens == 20 and not params.stop_token_ids
        assert reply.json()["output"][0]["content"][0]["text"] == "one"
        assert (await create(running, response_format={"type": "json_object"})).status_code == 200
        assert running.engine.seen[-1].params.grammar


async def test_items_of_stored_responses(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(**stored(tmp_path)) as running:
        client = sdk(running)
        first = await client.responses.create(model="tiny", input="one")
        again: Any = [{"role": "user", "content": "zero"}, {"type": "item_reference", "id": first.output[0].id}]
        second = await client.responses.create(model="tiny", input=[*again, {"role": "user", "content": "two"}])
        said = "<|assistant|>Hello, world!<|end|>"
        assert prompt(running, text) == f"<|user|>zero<|end|>{said}<|user|>two<|end|><|assistant|>"
        third = await client.responses.create(model="tiny", input="three", previous_response_id=second.id)
        pages = [item async for item in client.responses.input_items.list(third.id, limit=2, order="asc")]
        assert [item.type for item in pages] == ["message"] * 5
        assert [item.content[0].text for item in pages] == ["zero", "Hello, world!", "two", "Hello, world!", "three"]  # type: ignore[union-attr]
        newest = await client.responses.input_items.list(third.id, limit=1)
        assert newest.data[0].content[0].text == "three" and newest.has_more  # type: ignore[union-attr]
        counted = await client.responses.input_tokens.count(model="tiny", input="three", previous_response_id=second.id)
        assert counted.input_tokens == third.usage.input_tokens  # type: ignore[union-attr]
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel(third.id)
        for missing in (client.responses.cancel, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await missing("resp_x")
        stream = await client.responses.retrieve(third.id, stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.completed" and events[-1].response == third
        rest = await client.responses.retrieve(third.id, stream=True, starting_after=events[-3].sequence_number)
        assert [event async for event in rest] == events[-2:]


async def test_truncation_leaves_out_the_oldest_turns(serving: Serving, text: TextModel) -> None:
    async with serving() as running:
        history = [{"role": "user", "content": "a" * 400}, {"role": "assistant", "content": "b" * 100}]
        asked = [{"role": "system", "content": "Be kind."}, *history, {"role": "user", "content": "c" * 50}]
        assert (await create(running, input=asked)).status_code == 400
        reply = await create(running, input=asked, truncation="auto")
        assert reply.status_code == 200, reply.text
        assert prompt(running, text) == f"<|system|>Be kind.<|end|><|user|>{'c' * 50}<|end|><|assistant|>"
        assert reply.headers["x-penstock-context"].startswith("turns=2, dropped_turns=1")
        kept = await create(running, input=[*asked[2:]], truncation="auto")
        assert "x-penstock-context" not in kept.headers and "b" * 100 in prompt(running, text)
