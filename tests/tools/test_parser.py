"""One parser for streams and whole messages: wherever a message is cut, the result is the same."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from penstock.tools.events import CallArguments, CallBegin, CallEnd, Event, Parsed, Text, gather
from penstock.tools.formats import FORMATS, FormatName, ToolFormat, detect
from penstock.tools.parser import ToolCallParser

NAMES = ("get_weather", "search", "f")


def parse(form: ToolFormat, *pieces: str) -> Parsed:
    parser = ToolCallParser(form, NAMES)
    events = [event for piece in pieces for event in parser.push(piece)]
    return gather(events + parser.flush())


# --- transcripts, made up


def some_text(rng: random.Random) -> str:
    words = [
        "Sure",
        " ",
        "\n",
        "é",
        "日本",
        "😀",
        "<",
        "<tool",
        "[",
        "[TOOL_",
        "{",
        "}",
        '"',
        "\\",
        "</tool_call>",
        "ok. ",
    ]
    return "".join(rng.choices(words, k=rng.randrange(5)))


def some_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(5 if depth < 2 else 3)
    if kind == 0:
        return rng.choice(["", "x", 'quote " and \\', "</tool_call>", "é\n\t😀", "{[", "]}", "\u2028"])
    if kind == 1:
        return rng.choice([0, -1.5, 1e9, True, None])
    if kind == 2:
        return rng.choice([{}, []])
    if kind == 3:
        return [some_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(["a", "name", "arguments", "é"]): some_value(rng, depth + 1) for _ in range(rng.randrange(3))}


def some_call(rng: random.Random, form: ToolFormat) -> str:
    arguments = {key: some_value(rng) for key in rng.sample(["city", "n", "é", "name"], rng.randrange(3))}
    pairs: list[tuple[str, Any]] = [("name", rng.choice(NAMES)), (form.arguments, arguments)]
    if rng.random() < 0.2:
        pairs.reverse()
    if rng.random() < 0.1:
        pairs.insert(rng.randrange(3), ("id", rng.choice(["x", {"deep": [1]}, None, 3])))
    if rng.random() < 0.1:
        pairs = [(key, json.dumps(value) if key == form.arguments else value) for key, value in pairs]
    return json.dumps(dict(pairs), ensure_ascii=rng.random() < 0.3, indent=rng.choice([None, None, 1]))


def some_message(rng: random.Random, form: ToolFormat) -> str:
    calls = [some_call(rng, form) for _ in range(rng.randrange(3))]
    if form.listed:
        body = form.opener + form.before + f"[{', '.join(calls)}]" + form.after + form.closer if calls else ""
    elif form.bare:
        body = rng.choice(["", form.opener]) + form.between.join(calls)
    else:
        wrapped = [form.opener + form.before + call + form.after + form.closer for call in calls]
        body = rng.choice(["", "\n", " and "]).join(wrapped)
    text = some_text(rng) + body + some_text(rng)
    damage = rng.random()
    if text and damage < 0.2:
        return text[: rng.randrange(len(text))]
    if text and damage < 0.35:
        at = rng.randrange(len(text))
        return text[:at] + rng.choice(["", "x", '"', "}", form.opener]) + text[at + 1 :]
    return text


LIKE_OTHERS = ("hunyuan", "nemotron", "functools", "deepseek_v32", "xlam", "solar_open")
"""Formats that differ from others in their marks only."""


@pytest.mark.parametrize("count", [30, pytest.param(125, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LIKE_OTHERS else []) for name in FORMATS]
)
def test_every_cut_of_a_message_gives_the_same(name: FormatName, count: int) -> None:
    form = FORMATS[name]
    rng = random.Random(name)
    calls = texts = 0
    for _ in range(count):
        message = some_message(rng, form)
        whole = parse(form, message)
        calls += len(whole.calls)
        texts += bool(whole.text)
        for cut in range(1, len(message)):
            assert parse(form, message[:cut], message[cut:]) == whole, (message, cut)
        assert parse(form, *message) == whole
    assert calls > count // 4 and texts > count // 4


def test_all_formats_read_what_they_write() -> None:
    rng = random.Random(3)
    for form in FORMATS.values():
        for _ in range(50):
            wanted = {"name": rng.choice(NAMES), form.arguments: {"value": some_value(rng)}}
            body = json.dumps(wanted, ensure_ascii=False)
            body = f"[{body}]" if form.listed else body
            parsed = parse(form, form.opener + form.before + body + form.after + form.closer)
            assert parsed.text == ""
            (call,) = parsed.calls
            assert call.name == wanted["name"]
            assert json.loads(call.arguments) == wanted[form.arguments]


# --- particular cases

HERMES, LLAMA, SMOL, MISTRAL = (FORMATS[name] for name in ("hermes", "llama3", "smollm2", "mistral"))


def test_text_around_calls() -> None:
    parsed = parse(HERMES, 'Let me look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\nDone.')
    assert parsed.text == "Let me look.\nDone."
    assert [call.name for call in parsed.calls] == ["f"]
    assert parse(HERMES, " plain text \n") == Parsed(" plain text \n")


def test_arguments_are_streamed_as_soon_as_the_name_is_known() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push('<tool_call>{"name": "f", "argum') == []
    assert parser.push('ents": {"a"') == [CallBegin(0, "f"), CallArguments(0, '{"a"')]
    assert parser.push(": 1}") == [CallArguments(0, ": 1}")]
    assert parser.push("}") == [CallEnd(0)]
    assert parser.push("</tool_call>") == [] and parser.flush() == []


def test_plain_text_is_not_held_back() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push("Hello") == [Text("Hello")]
    assert parser.push(" wor") == [Text(" wor")]
    assert parser.push("ld <") == [Text("ld")]
    assert parser.push("b> ") == [Text(" <b>")]
    assert parser.flush() == [Text(" ")]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (HERMES, "<tool_call>oops</tool_call>"),
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": 3}'),
        (HERMES, '<tool_call>{"arguments": {}}'),
        (HERMES, '<tool_call>{"name": "f", "argu'),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}'),
        (SMOL, "<tool_call>[]</tool_call>"),
        (LLAMA, '{"name": "Bob", "age": 7}'),
        (LLAMA, 'Here: {"name": "f", "parameters": {}}'),
        (LLAMA, "{broken"),
        (MISTRAL, "[TOOL_CALLS] none"),
    ],
)
def test_what_is_not_a_call_is_text(form: ToolFormat, message: str) -> None:
    assert parse(form, message) == Parsed(message)


def test_a_call_cut_short_keeps_what_it_has() -> None:
    parsed = parse(HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b')
    assert parsed.calls[0].arguments == '{"a": "b' and parsed.text == ""


def test_a_call_that_breaks_after_it_was_reported_is_dropped_to_its_end() -> None:
    parsed = parse(HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call> next')
    assert parsed.text == " next" and len(parsed.calls) == 1


def test_arguments_without_an_object() -> None:
    for written, read in (('"{\\"a\\": 1}"', '{"a": 1}'), ("null", "{}"), ('""', "{}")):
        message = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
        assert parse(HERMES, message).calls[0].arguments == read
    assert parse(HERMES, '<tool_call>{"name": "f"}</tool_call>').calls[0].arguments == "{}"
    # Half a surrogate pair is no text, and could not be sent.
    assert not parse(HERMES, '<tool_call>{"name": "f", "arguments": "\\ud800"}').calls


def test_a_hostile_message_takes_linear_time() -> None:
    message = '<tool_call>{"x": "' * 20_000
    assert parse(HERMES, message) == Parsed(message)
    assert parse(HERMES, "<tool_call>{" * 20_000).calls == []
    parse(HERMES, *('<tool_call>{"name":' * 1_000))


def test_events_of_a_call_come_in_order() -> None:
    parser = ToolCallParser(SMOL, NAMES)
    message = '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "search"}]</tool_call>'
    events: list[Event] = [event for char in message for event in parser.push(char)] + parser.flush()
    kinds = [(type(event).__name__, getattr(event, "index", None)) for event in events]
    assert list(dict.fromkeys(kinds)) == [
        (kind, index) for index in (0, 1) for kind in ("CallBegin", "CallArguments", "CallEnd")
    ]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("... [TOOL_CALLS] [ ...", "mistral"),
        ("... <|tool|> ... <|/tool|>", "phi4"),
        ("... <|tool_call|> ...", "granite"),
        ("within <tool_call></tool_call> XML tags", "hermes"),
        ('Respond in the format {"name": function name, "parameters": dictionary}', "llama3"),
        ("{% for message in messages %}", "smollm2"),
    ],
)
def test_formats_are_found_in_templates(template: str, name: str) -> None:
    assert detect(template).name == name


def test_ids_that_a_template_would_refuse_are_mapped() -> None:
    assert len(MISTRAL.new_id()) == 9 and MISTRAL.new_id().isalnum()
    assert MISTRAL.known_id("abcdefgh1") == "abcdefgh1"
    assert len(MISTRAL.known_id("call_123")) == 9 and MISTRAL.known_id("call_123") == MISTRAL.known_id("call_123")
    assert HERMES.known_id("call_123") == "call_123" and HERMES.new_id().startswith("call_")


@pytest.mark.parametrize(
    "message",
    [
        '[TOOL_CALLS]search[ARGS]{"q": "a[ARGS]"}',
        '[TOOL_CALLS]search{"q": "a[ARGS]"}',
        '[TOOL_CALLS]search[CALL_ID]abcdefghi[ARGS]{"q": "a[ARGS]"}',
        '[TOOL_CALLS] [{"name": "search", "arguments": {"q": "a[ARGS]"}}]',
    ],
)
def test_mistral_writes_the_name_inside_or_before_the_arguments(message: str) -> None:
    whole = parse(MISTRAL, f"So: {message}")
    assert whole.text == "So:" and [(call.name, call.arguments) for call in whole.calls] == [
        ("search", '{"q": "a[ARGS]"}')
    ]
    for at in range(len(message)):
        assert parse(MISTRAL, "So: " + message[:at], message[at:]) == whole
    twice = parse(MISTRAL, message + message)
    assert [call.name for call in twice.calls] == ["search", "search"]


@pytest.mark.parametrize("message", ["[TOOL_CALLS]nothing[ARGS]{}", "[TOOL_CALLS]see", "[TOOL_CALLS]search x"])
def test_what_is_no_call_of_a_known_function_stays_text(message: str) -> None:
    for at in range(len(message)):
        assert parse(MISTRAL, message[:at], message[at:]).text == message
