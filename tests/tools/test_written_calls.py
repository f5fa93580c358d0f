"""Calls that are not JSON: Python (Llama 4, LFM2, OLMo 3), tags (GLM-4.5), keys and values with quotes of their own
(Gemma 4); and formats that differ in what stands
around JSON: Command-R, EXAONE 4, Hunyuan, Nemotron, Phi-4-mini, xLAM, GLM-4."""

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
TOOLS = (WEATHER, Tool("now"), Tool("db.find"), Tool("2-way"))


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
GEMMA = (
    'I look.<|tool_call>call:get_weather{city:<|"|>a "b" <tool_call|>}, é<|"|>,days:-3,more:{on:true,'
    'of:[<|"|>x<|"|>,2.5,null,[]]}}<tool_call|><|tool_call>call:now{}<tool_call|>'
)
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
    (
        "gemma4",
        GEMMA,
        "I look.",
        [
            (
                "get_weather",
                {"city": 'a "b" <tool_call|>}, é', "days": -3, "more": {"on": True, "of": ["x", 2.5, None, []]}},
            ),
            ("now", {}),
        ],
    ),
    ("gemma4", '<|tool_call>{"name": "now", "arguments": {"a": 1}}<tool_call|>', "", [("now", {"a": 1})]),
    ("gemma4", "<|tool_call>call:db.find{ q : 12 , <|\"|>a b<|\"|>: word }<tool_call|>So.", "So.",
     [("db.find", {"q": 12, "a b": "word"})]),
    ("gemma4", "<|tool_call>call:get_weather{city:7}<tool_call|>", "", [("get_weather", {"city": "7"})]),
    ("gemma4", "<|tool_call>call:other{}<tool_call|> text", "<|tool_call>call:other{}<tool_call|> text", []),
    ("gemma4", "<|tool_call>call:now{a:}<tool_call|>", "<|tool_call>call:now{a:}<tool_call|>", []),
    ("gemma4", "<|tool_call>call:now{a:1]<tool_call|>", "<|tool_call>call:now{a:1]<tool_call|>", []),
    ("gemma4", '<|tool_call>call:now{a:<|"|>1', '<|tool_call>call:now{a:<|"|>1', []),
    ("gemma4", "<|tool_call> is a mark", "<|tool_call> is a mark", []),
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
    ("pythonic", """[2-way(from="a), (", class=['x', (1, 2)], my-key={'k': ","},), now()]""", "",
     [("2-way", {"from": "a), (", "class": ["x", [1, 2]], "my-key": {"k": ","}}), ("now", {})]),
    ("olmo3", '<function_calls>2-way()\nnow(in=1,\n from="</function_calls>")\n</function_calls>', "",
     [("2-way", {}), ("now", {"in": 1, "from": "</function_calls>"})]),
    ("lfm2", '<|tool_call_start|>[2-way(is=True), 2-way(a= )]<|tool_call_end|>',
     '<|tool_call_start|>[2-way(is=True), 2-way(a= )]<|tool_call_end|>', []),
    ("pythonic", "[2-way(from=f(x))]", "[2-way(from=f(x))]", []),
    ("pythonic", "[2-way(from=1) + now()]", "[2-way(from=1) + now()]", []),
    ("pythonic", "[2-way(from=1, from=2)]", "[2-way(from=1, from=2)]", []),
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
        "olmo3",
        """Let me see.
<function_calls>
get_weather(city="a\\n</function_calls> (b", days=-3)
now()
db.find(q={'a': [1, true,
  None]})
</function_calls>Done.""",
        "Let me see.Done.",
        [
            ("get_weather", {"city": "a\n</function_calls> (b", "days": -3}),
            ("now", {}),
            ("db.find", {"q": {"a": [1, True, None]}}),
        ],
    ),
    ("olmo3", "<function_calls>now(), now()</function_calls>", "", [("now", {}), ("now", {})]),
    ("olmo3", "<function_calls>[now(x=1)]</function_calls> So.", " So.", [("now", {"x": 1})]),
    ("olmo3", '<function_calls>{"name": "now", "arguments": {}}</function_calls>', "", [("now", {})]),
    ("olmo3", "<function_calls>other()</function_calls>", "<function_calls>other()</function_calls>", []),
    ("olmo3", "<function_calls>now(</function_calls>)", "<function_calls>now(</function_calls>)", []),
    ("olmo3", "<function_calls>now()\nx = 1</function_calls>", "<function_calls>now()\nx = 1</function_calls>", []),
    ("olmo3", "<function_calls>now()\n", "<function_calls>now()\n", []),
    ("hunyuan", '<tool_calls>[{"name": "get_weather", "arguments": {"city": "</tool_calls>"}}, {"name": "now", '
     '"arguments": {}}]</tool_calls>\n', "", [("get_weather", {"city": "</tool_calls>"}), ("now", {})]),
    ("hunyuan", 'So. <tool_calls>\n{"name": "now", "arguments": {}}\n{"name": "now"}\n</tool_calls>Ok', "So.Ok",
     [("now", {}), ("now", {})]),
    ("hunyuan", '<tool_calls>[{"name": now}]</tool_calls>', '<tool_calls>[{"name": now}]</tool_calls>', []),
    ("nemotron", 'I look.\n<TOOLCALL>[{"name": "now", "arguments": {"a": "]"}}]</TOOLCALL>', "I look.",
     [("now", {"a": "]"})]),
    ("nemotron", "<TOOLCALL>[now]</TOOLCALL>", "<TOOLCALL>[now]</TOOLCALL>", []),
    ("functools", 'functools[{"name": "now", "arguments": {}}]', "", [("now", {})]),
    ("phi4", 'functools[{"name": "now", "arguments": {}}, {"name": "now"}]', "", [("now", {}), ("now", {})]),
    ("phi4", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', "", [("now", {})]),
    ("phi4", "Use functools.reduce or functools[0]", "Use functools.reduce or functools[0]", []),
    ("xlam", '[{"name": "get_weather", "arguments": {"city": "a"}}, {"name": "now", "arguments": {}}]', "",
     [("get_weather", {"city": "a"}), ("now", {})]),
    ("xlam", 'Ok. <tool_call>[{"name": "now", "arguments": {}}]</tool_call>', "Ok.", [("now", {})]),
    ("xlam", '[{"name": "other"}] [1]', '[{"name": "other"}] [1]', []),
    ("xlam", "[1, 2]", "[1, 2]", []),
    ("glm4", '\nget_weather\n{"city": "a\\"}"}\n', "", [("get_weather", {"city": 'a"}'})]),
    ("glm4", 'db.find \n{"a": {}}\nnow\n{} Done.', " Done.", [("db.find", {"a": {}}), ("now", {})]),
    ("glm4", 'now\n{"a": 1}<|assistant|>now\n{}', "", [("now", {"a": 1}), ("now", {})]),
    ("glm4", '{"name": "now", "parameters": {}}', "", [("now", {})]),
    ("glm4", 'I look.\n<|assistant|>get_weather \n{"city": "a"}<|assistant|>now\n{}', "I look.",
     [("get_weather", {"city": "a"}), ("now", {})]),
    ("glm4", 'So <|assistant|>{"name": "now"}', "So", [("now", {})]),
    ("glm4", "So <|assistant|>now\nor never", "So <|assistant|>now\nor never", []),
    ("glm4", "So <|assistant|>now\n", "So <|assistant|>now\n", []),
    ("glm4", 'nowhere\n{"a": 1}', 'nowhere\n{"a": 1}', []),
    ("glm4", "now is the time\n{}", "now is the time\n{}", []),
    ("glm4", 'Say: now\n{"a": 1}', 'Say: now\n{"a": 1}', []),
    ("glm4", "now\n", "now\n", []),
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
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7])
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
    assert detect("'<|tool_call>call:' + name + '{'").name == "gemma4"
    assert detect("<|tool_call|>").name == "granite"
    assert detect("write [func_name1(params_name1=params_value1), func_name2(params)]").name == "pythonic"
    assert detect("within <function_calls></function_calls>").name == "olmo3"
    assert detect("format <tool_calls>[{...}]</tool_calls>").name == "hunyuan"
    assert detect("<tool_calls> <tool_call>f<tool_sep>").name != "hunyuan"
    assert detect("'<TOOLCALL>[' <AVAILABLE_TOOLS>").name == "nemotron"
    assert detect("formatted as functools[{...}]").name == "functools"
    assert detect('in a single JSON array: [{"name": "tool_call_name", ...').name == "xlam"
    assert detect("<|system|>\n# \u53ef\u7528\u5de5\u5177").name == "glm4"
    assert detect("<\uff5cDSML\uff5ctool_calls>").name == "deepseek_v4"
    assert (
        detect("{% set d = '\uff5cDSML\uff5c' %}{{ '<' ~ d ~ 'function_calls>' }} {{ m.tool_calls }}").name
        == "deepseek_v32"
    )
    assert (
        detect("{% set d = '\uff5cDSML\uff5c' %}{{ '<' ~ d ~ 'tool_calls>' }} {{ m.tool_calls }}").name == "deepseek_v4"
    )


def test_a_huge_or_deep_list_is_text() -> None:
    deep = "[now(x=" + "[" * 5000 + "]" * 5000 + ")]"
    assert parse("pythonic", deep).text == deep
    long = "[now(x='" + "a" * 300_000
    assert parse("pythonic", long).text == long


@pytest.mark.parametrize("name", ["glm45", "pythonic", "cohere", "command_r", "olmo3", "glm4", "gemma4"])
def test_what_a_grammar_holds_can_be_read(name: FormatName) -> None:
    """Forced calls are JSON in any format: what the history writes is what the parser reads."""
    from penstock.tools.prompt import written

    form = FORMATS[name]
    call = {"function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    got = gather([*(parser := ToolCallParser(form, ["get_weather"])).push(written([call], form)), *parser.flush()])
    assert [(found.name, json.loads(found.arguments)) for found in got.calls] == [("get_weather", {"city": "Rome"})]
