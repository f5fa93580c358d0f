"""Tool calls and structured output: what the model must write, it writes, whichever way the client spells it."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from tests.compat.conftest import MODEL, user

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["location"],
            "additionalProperties": False,
        },
    },
}
DONE = {
    "type": "function",
    "function": {
        "name": "done",
        "parameters": {"type": "object", "properties": {"success": {"const": True}}, "required": ["success"]},
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NAMED = {"type": "function", "function": {"name": "get_current_weather"}}


def chat(client: openai.OpenAI, **more: Any) -> Any:
    asked = {"max_completion_tokens": 60, "temperature": 0, **more}
    return client.chat.completions.create(model=MODEL, messages=user("What is the weather in Paris?"), **asked)


def the_call(answer: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the only call, from an answer or from a stream."""
    if not isinstance(answer, openai.Stream):
        (choice,) = answer.choices
        (called,) = choice.message.tool_calls
        assert choice.finish_reason in ("tool_calls", "stop") and not choice.message.content and called.id
        return called.function.name, json.loads(called.function.arguments)
    name, arguments, ids = "", "", set()
    for chunk in answer:
        for entry in chunk.choices[0].delta.tool_calls or ():
            assert len(chunk.choices[0].delta.tool_calls) == 1 and entry.index == 0
            name += entry.function.name or ""
            arguments += entry.function.arguments or ""
            ids |= {entry.id} - {None}
    assert len(ids) == 1
    return name, json.loads(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_required(client: openai.OpenAI, stream: bool) -> None:
    asked = {"parallel_tool_calls": False, "stream": stream}
    assert the_call(chat(client, tools=[DONE], tool_choice="required", **asked)) == ("done", {"success": True})
    name, arguments = the_call(chat(client, tools=[DONE, WEATHER], tool_choice=NAMED, **asked))
    assert name == "get_current_weather" and arguments["location"] in ("Paris", "Rome")


def test_no_call_where_none_is_wanted(client: openai.OpenAI) -> None:
    for more in ({"tools": [WEATHER], "tool_choice": "none"}, {"tool_choice": None}, {"tools": None}):
        assert chat(client, max_completion_tokens=4, **more).choices[0].message.tool_calls is None


def test_the_result_of_a_call_is_part_of_the_prompt(client: openai.OpenAI) -> None:
    called = {"id": "call_1", "type": "function", "function": {"name": "done", "arguments": '{"success": true}'}}
    messages = [
        *user("Do it."),
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It is done."},
    ]
    asked = {"model": MODEL, "tools": [DONE], "max_tokens": 4}
    answer = client.chat.completions.create(messages=messages, **asked)
    assert (
        answer.usage.prompt_tokens > client.chat.completions.create(messages=messages[:1], **asked).usage.prompt_tokens
    )
    with pytest.raises(openai.BadRequestError, match="call"):
        messages[2]["tool_call_id"] = "call_2"
        client.chat.completions.create(messages=messages, **asked)


@pytest.mark.parametrize(
    "more",
    [
        {"tool_choice": "required"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [WEATHER], "tool_choice": "sometimes"},
        {"tools": [{"type": "function"}]},
        {"tools": [WEATHER, WEATHER]},
    ],
    ids=str,
)
def test_tools_that_cannot_be(http: httpx.Client, more: dict[str, Any]) -> None:
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": user("x"), **more})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("tool")


SPELLINGS = {
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}},
    "llama.cpp json_object": {"response_format": {"type": "json_object", "schema": PERSON}},
    "llama.cpp json_schema": {"json_schema": PERSON},
    "vLLM structured_outputs": {"structured_outputs": {"json": PERSON}},
    "vLLM guided_json": {"guided_json": PERSON},
}


@pytest.mark.slow
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_schema_in_every_spelling(client: openai.OpenAI, spelling: str) -> None:
    answer = chat(client, max_completion_tokens=50, extra_body=SPELLINGS[spelling])
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"} and isinstance(person["age"], int) and 0 <= person["age"] <= 99


@pytest.mark.slow
def test_choices_patterns_and_grammars(client: openai.OpenAI) -> None:
    def said(**more: Any) -> str:
        return str(chat(client, temperature=0.7, extra_body=more).choices[0].message.content)

    assert said(structured_outputs={"choice": ["Rust", "Ada"]}) in ("Rust", "Ada")
    assert said(guided_choice=["Rust", "Ada"]) in ("Rust", "Ada")
    assert re.fullmatch(r"\d{1,3}\.\d{1,3}", said(structured_outputs={"regex": r"\d{1,3}\.\d{1,3}"}))
    assert said(structured_outputs={"grammar": 'start: "yes" | "no"'}) in ("yes", "no")


@pytest.mark.slow
def test_any_object_and_constants(client: openai.OpenAI) -> None:
    fixed = {"type": "json_schema", "json_schema": {"name": "fixed", "schema": {"const": "42"}}}
    assert chat(client, response_format=fixed).choices[0].message.content == '"42"'
    free = chat(client, response_format={"type": "json_object"}, max_completion_tokens=20)
    assert free.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.slow
def test_structure_in_text_completions_too(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Yes or no?", max_tokens=5, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert answer.choices[0].text in ("yes", "no")


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object", "schema": 123}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "hiccup"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 123}}}},
        {"response_format": {"type": "json_schema"}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"grammar": "no grammar"}},
    ],
    ids=str,
)
def test_structures_that_cannot_be(http: httpx.Client, more: dict[str, Any]) -> None:
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": user("x"), "max_tokens": 2, **more})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
