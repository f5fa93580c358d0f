"""Structured output and function calls with the official SDK, the real server and the real default model."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest

from tests.e2e.conftest import MODEL, Server

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 16},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "clock", "description": "The time now"}},
]


@pytest.fixture
def client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def schema(strict: bool = True, schema: dict[str, Any] = PERSON) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": strict}}


def check_person(text: str | None) -> None:
    person = json.loads(text or "")
    assert set(person) == {"name", "age", "colour"}
    assert 1 <= len(person["name"]) <= 12 and 0 <= person["age"] <= 120
    assert person["colour"] in ("red", "green", "blue")


@pytest.mark.slow
async def test_a_schema_is_followed_whatever_the_seed(client: openai.AsyncOpenAI) -> None:
    async def one(seed: int) -> str | None:
        reply = await client.chat.completions.create(
            model=MODEL,
            messages=ask("Invent a person."),
            temperature=1,
            seed=seed,
            max_tokens=120,
            response_format=schema(),
        )
        assert reply.choices[0].finish_reason == "stop"
        return reply.choices[0].message.content

    answers = await asyncio.gather(*(one(seed) for seed in range(8)))
    for answer in answers:
        check_person(answer)
    assert len(set(answers)) > 4


@pytest.mark.slow
async def test_other_formats(client: openai.AsyncOpenAI) -> None:
    async def one(form: dict[str, Any], **params: Any) -> str:
        reply = await client.chat.completions.create(
            model=MODEL,
            messages=ask("Is Paris in France?"),
            max_tokens=40,
            temperature=1,
            seed=1,
            extra_body={"response_format": form},
            **params,
        )
        return reply.choices[0].message.content or ""

    phone, choice, grammar = await asyncio.gather(
        one({"type": "regex", "regex": r"\+\d{2} \d{3}-\d{4}"}),
        one({"type": "choice", "choice": ["yes", "no"]}),
        one({"type": "grammar", "grammar": 'start: word (", " word){2}\nword: "red" | "green"'}),
    )
    assert re.fullmatch(r"\+[0-9]{2} [0-9]{3}-[0-9]{4}", phone)
    assert choice in ("yes", "no")
    assert re.fullmatch(r"(red|green)(, (red|green)){2}", grammar)
    completion = await client.completions.create(
        model=MODEL,
        prompt="The answer is ",
        n=2,
        logprobs=2,
        max_tokens=8,
        extra_body={"response_format": {"type": "choice", "choice": ["forty-two", "none"]}},
    )
    for answer in completion.choices:
        assert answer.text in ("forty-two", "none") and answer.finish_reason == "stop"
        assert answer.logprobs is not None and "".join(answer.logprobs.tokens or ()) == answer.text


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_call_that_must_be_made_is_made(client: openai.AsyncOpenAI, choice: Any) -> None:
    params: dict[str, Any] = {
        "model": MODEL,
        "messages": ask("What is the weather in Paris, in celsius?"),
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 100,
        "temperature": 0.8,
        "seed": 3,
        "parallel_tool_calls": False,
    }
    whole = (await client.chat.completions.create(**params)).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls or ()
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("celsius", "fahrenheit")
    else:
        assert (choice, call.function.name, arguments) == ("required", "clock", {})
    async with client.chat.completions.stream(**params) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    assert streamed.finish_reason == "tool_calls"
    (same,) = streamed.message.tool_calls or ()
    assert same.function.name == call.function.name and same.function.arguments == call.function.arguments
    # The conversation goes on with the result, in the shape the SDK itself hands back.
    follow = await client.chat.completions.create(
        model=MODEL,
        messages=[
            *params["messages"],
            whole.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "12 degrees, rain"},
        ],
        tools=TOOLS,
        max_tokens=8,
    )
    assert follow.choices[0].finish_reason in ("stop", "length")


async def test_a_schema_that_cannot_be_enforced_is_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys") as refused:
        await client.chat.completions.create(
            model=MODEL,
            messages=ask("x"),
            response_format=schema(schema={"type": "array", "contains": {"type": "null"}}),
        )
    assert refused.value.code == "unsupported_grammar"


@pytest.mark.slow
async def test_constrained_and_free_requests_share_steps(client: openai.AsyncOpenAI) -> None:
    async def one(index: int) -> tuple[int, str | None]:
        extra: dict[str, Any] = {"response_format": schema(strict=False)} if index % 2 else {}
        reply = await client.chat.completions.create(
            model=MODEL,
            messages=ask(f"Person {index} is"),
            temperature=1,
            seed=index,
            max_tokens=60 if index % 2 else 10,
            **extra,
        )
        assert reply.usage is not None and reply.usage.completion_tokens > 0
        return index, reply.choices[0].message.content

    for index, text in await asyncio.gather(*(one(index) for index in range(50))):
        if index % 2:
            check_person(text)
        else:
            assert text
