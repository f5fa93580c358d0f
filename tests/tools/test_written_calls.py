"""Calls that are not JSON: Python lists (Llama 4) and tags (GLM-4.5); and those of Command-R, EXAONE 4 and Llama 4."""

from __future__ import annotations

import json

import pytest

from penstock.tools.events import Parsed, gather
from penstock.tools.formats import FORMATS, FormatName, detect
from penstock.tools.parser import ToolCallParser
from penstock.tools.toolbox import Tool, Toolbox

WEATHER = Tool(
    "get_weather",
    parameters={"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
)
TOOLS = (WEATHER, Tool("now"), Tool("db.find"))


def parse(name: FormatName, text: str, size: int = 0) -> Parsed:
    parser = Toolbox(TOOLS, FORMATS[name]).parser()
    pieces = [text] if not size else [text[at : at + size] for at in range(0, len(text), size)]
    events = [event for piece in pieces for event in parser.push(piece)]
    return gather(events + parser.flush())


GLM = """Let me see.
<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>12 "Rue" </tool_call> é</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
<arg_key>more</arg_key>
<arg_value>{"a": [true]}</arg_value>
</tool_call>
<tool_call>now
</tool_call>"""
CASES: list[tuple[FormatName, str, str, list[tuple[str, dict[str, object]]]]] = [
    (
        "glm45",
        GLM,
        "Let me see.",
        [
            ("get_weather", {"city": '12 "Rue" </tool_call> é', "days": 3, "more": {"a": [True]}}),
            ("now", {}),
        ],
    ),
    ("glm45", '<tool_call>get_weather<arg_key>city</arg_key><arg_value>7</arg_value></tool_call>', "",
     [("get_weather", {"city": "7"})]),
    ("glm45", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', "", [("now", {})]),
    ("glm45", "<tool_call>other\n</tool_call> text", "<tool_call>other\n</tool_call> text", []),
    ("glm45", "<tool_call>get_weather\n<arg_key>city", "<tool_call>get_weather\n<arg_key>city", []),
    (
        "pythonic",
        """[get_weather(city="it's ]) \\" é", days=-3), now(), db.find(q={'a': [1, true, None], "b": 'x'})]""",
        "",
        [
            ("get_weather", {"city": "it's ]) \" é", "days": -3}),
            ("now", {}),
            ("db.find", {"q": {"a": [1, True, None], "b": "x"}}),
        ],
    ),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", [("now", {})]),
    ("pythonic", 'Sure.\n<|python_start|>{"name": "now", "parameters": {}}<|python_end|>', "Sure.", [("now", {})]),
    ("pythonic", '{"name": "get_weather", "parameters": {"city": "Rome"}}', "", [("get_weather", {"city": "Rome"})]),
    ("pythonic", "[1] says no", "[1] says no", []),
    ("pythonic", "[other(x=1)] no", "[other(x=1)] no", []),
    ("pythonic", "[now(__import__('os'))]", "[now(__import__('os'))]", []),
    ("pythonic", "[now(x=f())] [now()]", "[now(x=f())] [now()]", []),
    ("pythonic", "[get_weather(city='Par", "[get_weather(city='Par", []),
    ("lfm2", '<|tool_call_start|>[get_weather(city="Rome"), now()]<|tool_call_end|>I look.', "I look.",
     [("get_weather", {"city": "Rome"}), ("now", {})]),
    ("lfm2", 'So. <|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>', "So.", [("now", {})]),
    ("lfm2", "<|tool_call_start|>[now()]", "", [("now", {})]),
    ("lfm2", "<|tool_call_start|>[other()]<|tool_call_end|>", "<|tool_call_start|>[other()]<|tool_call_end|>", []),
    ("lfm2", "<|tool_call_start|> [", "<|tool_call_start|> [", []),
    ("lfm2", "[now()]", "[now()]", []),
    (
        "cohere",
        'I will look.<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
        '"parameters": {"city": "Oslo"}},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]'
        "<|END_ACTION|>",
        "I will look.",
        [("get_weather", {"city": "Oslo"}), ("now", {})],
    ),
    (
        "command_r",
        'Action: ```json\n[\n  {\n    "tool_name": "get_weather",\n    "parameters": {"city": "Oslo"}\n  }\n]```',
        "",
        [("get_weather", {"city": "Oslo"})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Seoul"}}</tool_call>',
        "",
        [("get_weather", {"city": "Seoul"})],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "said", "calls"), CASES)
@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_calls_are_the_same_however_the_text_is_split(
    name: FormatName, text: str, said: str, calls: list[tuple[str, dict[str, object]]], size: int
) -> None:
    got = parse(name, text, size)
    assert [(call.name, json.loads(call.arguments)) for call in got.calls] == calls
    assert got.text == said


def test_templates_say_which_format_it_is() -> None:
    assert detect("<tool_call>{name}\n<arg_key>{k}</arg_key>").name == "glm45"
    assert detect('<tool_call>{"name": ...}</tool_call>').name == "hermes"  # EXAONE 4, Qwen
    assert detect("<|START_RESPONSE|> <|START_ACTION|>").name == "cohere"
    assert detect("Write 'Action:' followed by ```json").name == "command_r"
    assert detect("<|header_start|>assistant<|header_end|>").name == "pythonic"
    assert detect("List of tools: <|tool_list_start|>[").name == detect("List of tools: [").name == "lfm2"
    assert detect("<|start_header_id|> <|python_tag|>").name == "llama3"


def test_a_huge_or_deep_list_is_text() -> None:
    deep = "[now(x=" + "[" * 5000 + "]" * 5000 + ")]"
    assert parse("pythonic", deep).text == deep
    long = "[now(x='" + "a" * 300_000
    assert parse("pythonic", long).text == long


@pytest.mark.parametrize("name", ["glm45", "pythonic", "cohere", "command_r"])
def test_what_a_grammar_holds_can_be_read(name: FormatName) -> None:
    """Forced calls are JSON in any format: what the history writes is what the parser reads."""
    from penstock.tools.prompt import written

    form = FORMATS[name]
    call = {"function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    got = gather([*(parser := ToolCallParser(form, ["get_weather"])).push(written([call], form)), *parser.flush()])
    assert [(found.name, json.loads(found.arguments)) for found in got.calls] == [("get_weather", {"city": "Rome"})]
