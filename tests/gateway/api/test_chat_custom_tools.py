"""Custom tools of chat completions, which take free text, through the official SDK."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from penstock.text import TextModel
from tests.gateway.api.test_responses import prompt, sdk
from tests.gateway.conftest import Serving
from tests.scripted import ScriptedEngine, make_text

PATCH: Any = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Changes files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "*** " /[a-z]+/ "\\n"?'}},
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
ASKED: Any = [{"role": "user", "content": "Patch!"}]
SAID = '*** "a"\n\té'


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return make_text(tmp_path_factory.mktemp("roomy"), context_length=8192)


def calling(text: TextModel, *calls: tuple[str, Any]) -> ScriptedEngine:
    written = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])
    return ScriptedEngine(text, f"<tool_call>{written}</tool_call>", max_model_len=8192)


async def test_a_custom_tool_gets_its_text_and_returns_a_result(serving: Serving, text: TextModel) -> None:
    engine = calling(text, ("patch", {"input": SAID}), ("clock", {}))
    async with serving(engine, text) as running:
        client = sdk(running)
        answer = await client.chat.completions.create(model="tiny", messages=ASKED, tools=[PATCH, CLOCK])
        assert answer.choices[0].finish_reason == "tool_calls"
        custom, function = answer.choices[0].message.tool_calls or ()
        assert custom.type == "custom" and (custom.custom.name, custom.custom.input) == ("patch", SAID)
        assert function.type == "function" and function.function.arguments == "{}"
        # The model was told the grammar, and it is enforced.
        assert "[a-z]+" in prompt(running, text) and "Changes files." in prompt(running, text)
        assert "RULE_START" in running.engine.seen[-1].params.grammar
        results: Any = [
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": custom.id, "content": "Done."},
            {"role": "tool", "tool_call_id": function.id, "content": "Noon."},
        ]
        await client.chat.completions.create(model="tiny", messages=[*ASKED, *results], tools=[PATCH, CLOCK])
        assert '"patch"' in prompt(running, text) and "Done." in prompt(running, text)


async def test_the_input_of_a_custom_tool_is_streamed(serving: Serving, text: TextModel) -> None:
    engine = calling(text, ("patch", {"input": SAID}), ("clock", {"zone": "UTC"}), ("patch", {"input": "*** b"}))
    async with serving(engine, text) as running:
        stream = await sdk(running).chat.completions.create(
            model="tiny", messages=ASKED, tools=[PATCH, CLOCK], stream=True
        )
        inputs: dict[int, str] = {}
        begun: list[tuple[int, str, str]] = []
        async for chunk in stream:
            for delta in chunk.choices[0].delta.tool_calls or ():
                sent = delta.to_dict()
                if "id" in sent:
                    kind: Any = sent["type"]
                    begun.append((delta.index, kind, sent[kind]["name"]))  # type: ignore[index]
                part: Any = sent.get("custom") or sent.get("function")
                inputs[delta.index] = inputs.get(delta.index, "") + (part.get("input") or part.get("arguments") or "")
    assert begun == [(0, "custom", "patch"), (1, "function", "clock"), (2, "custom", "patch")]
    assert inputs == {0: SAID, 1: '{"zone": "UTC"}', 2: "*** b"}


async def test_arguments_in_another_form_are_streamed_at_the_end(serving: Serving, text: TextModel) -> None:
    free: Any = {"type": "custom", "custom": {"name": "free"}}
    engine = calling(text, ("free", {"text": "hello"}))
    async with serving(engine, text) as running:
        client = sdk(running)
        whole = await client.chat.completions.create(model="tiny", messages=ASKED, tools=[free])
        (call,) = whole.choices[0].message.tool_calls or ()
        assert call.type == "custom" and call.custom.input == "hello"
        stream = await client.chat.completions.create(model="tiny", messages=ASKED, tools=[free], stream=True)
        deltas: list[Any] = [
            delta.to_dict() async for chunk in stream for delta in chunk.choices[0].delta.tool_calls or ()
        ]
    assert "".join(delta["custom"]["input"] for delta in deltas) == "hello"


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "patch"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "patch"}}]},
        },
    ],
)
async def test_a_custom_tool_may_be_chosen(serving: Serving, text: TextModel, choice: Any) -> None:
    async with serving(calling(text, ("patch", {"input": "*** a"})), text) as running:
        await sdk(running).chat.completions.create(
            model="tiny", messages=ASKED, tools=[CLOCK, PATCH], tool_choice=choice
        )
        grammar = running.engine.seen[-1].params.grammar
        assert "patch" in grammar and "clock" not in grammar


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].custom"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{**PATCH, "function": {"name": "f"}}]}, "tools[0].function"),
        ({"tools": [PATCH, PATCH]}, "tools[1].custom.name"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format.grammar",
        ),
        ({"tools": [CLOCK], "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        ({"tools": [CLOCK], "tool_choice": {"type": "custom", "custom": {"name": "patch"}}}, "tool_choice"),
    ],
)
async def test_mistakes_are_named(serving: Serving, changes: Any, param: str) -> None:
    async with serving() as running:
        with pytest.raises(openai.BadRequestError) as refused:
            await sdk(running).chat.completions.create(model="tiny", messages=ASKED, **changes)
        assert refused.value.param == param
