"""Calls of DeepSeek, Kimi K2, Qwen3-Coder, Seed-OSS and MiniMax M2: marks around names and arguments, and XML."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from penstock.tools.argument_values import argument
from penstock.tools.events import CallArguments, CallBegin, CallEnd, Event, Parsed, gather
from penstock.tools.formats import FORMATS, FormatName, detect
from penstock.tools.prompt import written
from penstock.tools.toolbox import Tool, Toolbox

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"type": ["string", "null"]},
    },
}
TOOLS = (Tool("get_weather", parameters=SCHEMA), Tool("now"), Tool("db.find"), Tool("function"))
NEW: tuple[FormatName, ...] = (
    "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "kimi_k2", "solar_open", "qwen3_coder", "seed_oss",
    "minimax_m2",
)  # fmt: skip
Calls = list[tuple[str, dict[str, Any]]]


def parse(name: FormatName, *pieces: str, strict: bool = False) -> Parsed:
    parser = Toolbox(TOOLS, FORMATS[name], parallel=not strict).parser()
    events = [event for piece in pieces for event in parser.push(piece)]
    return gather(events + parser.flush())


def same_however_split(name: FormatName, text: str) -> Parsed:
    whole = parse(name, text)
    for at in range(1, len(text)):
        assert parse(name, text[:at], text[at:]) == whole, (text[:at], text[at:])
    assert parse(name, *text) == whole
    return whole


def read(parsed: Parsed) -> Calls:
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


V3 = """Let me see.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "``` <｜tool▁call▁end｜> é", "days": 3}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>function<｜tool▁sep｜>now
```json
{}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"""
V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>db.find<｜tool▁sep｜>{"q": {"a": [1, "}"]}}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
KIMI = (
    'I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": '
    '"Oslo <|tool_call_end|>"}<|tool_call_end|><|tool_call_begin|>functions.db.find:12<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>"
)
SOLAR = (
    'I look.<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>{"city": '
    '"<|calls|>"}<|tool_call:end|><|tool_call:begin|>x<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>'
)
QWEN = """So.
<tool_call>
<function=get_weather>
<parameter=city>
7

</parameter> <function=now> </tool_call>
</parameter>
<parameter=days>
3
</parameter>
<parameter=exact>
True
</parameter>
<parameter=tags>
["a", "</parameter>"]
</parameter>
<parameter=other>
{"x": null}
</parameter>
</function>
</tool_call>
<tool_call>
<function=now>
</function>
</tool_call>"""
SEED = """<seed:tool_call>
<function=get_weather>
<parameter=city>Paris
and more</parameter>
<parameter=tags>['a', 'b']</parameter>
<parameter=note>null</parameter>
</function>
</seed:tool_call>"""
MINIMAX = """
<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Rome</parameter>
<parameter name="days">x</parameter>
</invoke>
<invoke name="now">
</invoke>
</minimax:tool_call>"""
DSML = """Let me look.

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">
7</｜DSML｜parameter> is no end
</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
<｜DSML｜parameter name="tags" string="false">["<｜DSML｜", "é"]</｜DSML｜parameter>
<｜DSML｜parameter name="note" string="true">null</｜DSML｜parameter>
<｜DSML｜parameter name="other" string="false">"3"</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="now">

</｜DSML｜invoke>
</｜DSML｜function_calls>"""
DSML_JSON = """<｜DSML｜function_calls>
<｜DSML｜invoke name="db.find">
{"q": {"a": [1, "</｜DSML｜invoke>"]}}
</｜DSML｜invoke>
<｜DSML｜invoke name="now">{}</｜DSML｜invoke></｜DSML｜function_calls> Done."""
DSML_BAD_JSON = """<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="days" string="false">three</｜DSML｜parameter>
<｜DSML｜parameter name="exact" string="false">True</｜DSML｜parameter>
<｜DSML｜parameter name="city">
Rome
</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
CASES: list[tuple[FormatName, str, str, Calls]] = [
    ("deepseek_v3", V3, "Let me see.",
     [("get_weather", {"city": "``` <｜tool▁call▁end｜> é", "days": 3}), ("now", {})]),
    ("deepseek_v31", V31, "", [("db.find", {"q": {"a": [1, "}"]}}), ("function", {})]),
    ("deepseek_v3", V31, "", [("db.find", {"q": {"a": [1, "}"]}}), ("function", {})]),
    ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜> Ok.", "Ok.", [("now", {})]),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>", "",
     [("now", {})]),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{} x {}<｜tool▁calls▁end｜> y", " y",
     [("now", {})]),
    ("deepseek_v4", DSML_JSON.replace("function_calls>", "tool_calls>"), " Done.",
     [("db.find", {"q": {"a": [1, "</｜DSML｜invoke>"]}}), ("now", {})]),
    ("deepseek_v32", DSML_JSON, " Done.", [("db.find", {"q": {"a": [1, "</｜DSML｜invoke>"]}}), ("now", {})]),
    ("deepseek_v32", DSML_BAD_JSON, "", [("get_weather", {"days": "three", "exact": True, "city": "Rome"})]),
    ("deepseek_v32", DSML, "Let me look.",
     [("get_weather", {"city": "\n7</｜DSML｜parameter> is no end\n", "days": 3, "tags": ["<｜DSML｜", "é"],
                       "note": "null", "other": "3"}), ("now", {})]),
    ("qwen3_coder", '<tool_call><function=now>\n{"a": "x"}\n</function>\n</tool_call>', "", [("now", {"a": "x"})]),
    ("solar_open", SOLAR, "I look.", [("get_weather", {"city": "<|calls|>"}), ("now", {})]),
    ("solar_open", SOLAR.removesuffix("<|calls|>"), "I look.", [("get_weather", {"city": "<|calls|>"}), ("now", {})]),
    ("kimi_k2", KIMI, "I look.", [("get_weather", {"city": "Oslo <|tool_call_end|>"}), ("db.find", {})]),
    ("qwen3_coder", QWEN, "So.",
     [("get_weather", {"city": "7\n\n</parameter> <function=now> </tool_call>", "days": 3, "exact": True,
                       "tags": ["a", "</parameter>"], "other": {"x": None}}), ("now", {})]),
    ("qwen3_coder", "Go.\n<function=now>\n</function>\n</tool_call> Then.", "Go. Then.", [("now", {})]),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>a</parameter></tool_call>", "",
     [("get_weather", {"city": "a"})]),
    ("seed_oss", SEED, "", [("get_weather", {"city": "Paris\nand more", "tags": ["a", "b"], "note": None})]),
    ("minimax_m2", MINIMAX, "", [("get_weather", {"city": "Rome", "days": "x"}), ("now", {})]),
]  # fmt: skip
TEXTS: list[tuple[FormatName, str]] = [
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>other\n```json\n{}\n```"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>now"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜> x"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>" + "now" * 200),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="other">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n[1]</｜DSML｜invoke>'),
    ("deepseek_v32", '<｜DSML｜invoke name="now">\n<｜DSML｜parameter name="a" string="true">b'),
    ("deepseek_v32", "The mark ｜DSML｜ and <｜DSML｜ alone"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>call_17<|tool_call_argument_begin|>{}"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"),
    ("solar_open", "<|tool_calls|><|tool_call:begin|>a<|tool_call:name|>other<|tool_call:args|>{}<|tool_call:end|>"),
    ("qwen3_coder", "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar"),
    ("qwen3_coder", "<function=get_weather>\nand <parameter=city>\nPar</parameter></function>"),
    ("qwen3_coder", "<function=a\n <function=<function=now"),
    ("qwen3_coder", "In C <function pointers> are <f"),
    ("seed_oss", "<seed:tool_call>hello</seed:tool_call>"),
]


@pytest.mark.parametrize(("name", "text", "said", "calls"), CASES)
def test_calls_are_the_same_however_the_text_is_split(name: FormatName, text: str, said: str, calls: Calls) -> None:
    got = same_however_split(name, text)
    assert read(got) == calls
    assert got.text.lstrip("\n") == said


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_what_is_no_call_stays_text(name: FormatName, text: str) -> None:
    assert same_however_split(name, text) == Parsed(text)


@pytest.mark.parametrize(("name", "text"), {name: text for name, text, *_ in CASES[::-1]}.items())
def test_damaged_calls_are_the_same_however_they_are_split(name: FormatName, text: str) -> None:
    rng = random.Random(name)
    for _ in range(4):
        at, length = rng.randrange(len(text)), rng.randrange(12)
        same_however_split(name, text[:at] + rng.choice(["", "{", "<", "x\n"]) + text[at + length :])


def test_arguments_between_marks_are_streamed() -> None:
    parser = Toolbox(TOOLS, FORMATS["kimi_k2"]).parser()
    events: list[Event] = parser.push("<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argu")
    assert events == []
    assert parser.push('ment_begin|>{"a"') == [CallBegin(0, "now"), CallArguments(0, '{"a"')]
    assert parser.push(": 1}<|tool") == [CallArguments(0, ": 1}"), CallEnd(0)]
    assert parser.flush() == []


def test_a_call_cut_short_keeps_what_it_has() -> None:
    cut = parse("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": "b')
    assert cut.text == "" and cut.calls[0].arguments == '{"a": "b'


@pytest.mark.parametrize("name", NEW)
def test_only_what_a_grammar_holds_is_a_call_where_there_is_one(name: FormatName) -> None:
    form = FORMATS[name]
    assert form.without_opener
    bare = {
        "kimi_k2": "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "deepseek_v32": '<｜DSML｜invoke name="now"></｜DSML｜invoke>',
        "deepseek_v4": '<｜DSML｜invoke name="now"></｜DSML｜invoke>',
        "solar_open": "<|tool_call:begin|>a<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|>",
        "minimax_m2": '<invoke name="now"></invoke>',
    }.get(name, "<function=now></function>" if form.tags else "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}")
    assert read(parse(name, bare)) == [("now", {})]
    assert parse(name, bare, strict=True) == Parsed(bare)


@pytest.mark.parametrize("name", NEW)
def test_what_is_written_can_be_read(name: FormatName) -> None:
    calls = [
        {"function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}},
        {"function": {"name": "now", "arguments": "{}"}},
    ]
    text = written(calls, FORMATS[name])
    assert read(same_however_split(name, text)) == [("get_weather", {"city": "Rome"}), ("now", {})]


def test_long_values_take_linear_time() -> None:
    value = "</parameter>  <x" * 4_000
    text = f"<tool_call><function=get_weather><parameter=city>{value}</parameter></function></tool_call>"
    assert parse("qwen3_coder", *(text[at : at + 7] for at in range(0, len(text), 7))).calls
    open_ended = "<tool_call><function=get_weather><parameter=city>" + "</parameter>" + " " * 10_000
    assert parse("qwen3_coder", *open_ended) == Parsed(open_ended)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "number"}, "12", 12),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "false", False),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "true", "true"),
        ({"$ref": "#/$defs/kind"}, "3", "3"),
        ({"enum": [1, 2]}, "2", 2),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"type": "array"}, '["\\ud800"]', '["\\ud800"]'),
        ({}, "[1]", [1]),
        ({}, '"quoted"', '"quoted"'),
        ({}, "{1, 2}", "{1, 2}"),
        (True, "x", "x"),
    ],
)
def test_values_are_typed_by_the_schema(schema: Any, text: str, value: Any) -> None:
    whole = {"properties": {"key": schema}, "$defs": {"kind": {"enum": ["1", "3"]}}}
    assert argument(text, "key", whole) == value


def test_templates_say_which_format_it_is() -> None:
    v3 = "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '\\n' + '```json'"
    assert detect(v3).name == "deepseek_v3"
    assert detect("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'").name == "deepseek_v31"
    assert detect("'<｜DSML｜function_calls>'").name == "deepseek_v32"
    assert detect("<|tool_calls_section_begin|><|tool_call_begin|>").name == "kimi_k2"
    assert detect("'<|im_system|>tool_declare<|im_middle|>'").name == "kimi_k2"
    assert detect("'<|tool_calls|>' '<|tool_call:begin|>'").name == "solar_open"
    assert detect("<tool_call>\n<function=example>\n<parameter=a>").name == "qwen3_coder"
    assert detect("<seed:tool_call>\n<function=example>\n<parameter=a>").name == "seed_oss"
    assert detect('<minimax:tool_call> <invoke name="x">').name == "minimax_m2"
