"""A parameter is honoured, refused where it would change the answer, or ignored and named in `x-penstock-ignored`:
never silently dropped, and no wall for clients that send more than we know."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.gateway.app.unknown_fields import MOST_NAMES, UnknownFields, ignored_header, strip_unknown
from penstock.gateway.generation.request_decoder import CHANGES_THE_ANSWER
from penstock.gateway.generation.schemas import ChatRequest
from tests.gateway.conftest import Running, Serving

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}", "parsed": None}}


async def chat(gateway: Running, **more: Any) -> Any:
    return await gateway.client.post("/v1/chat/completions", json={"model": "tiny", "messages": [USER], **more})


async def test_what_clients_add_is_ignored_and_named(serving: Serving) -> None:
    async with serving() as gateway:
        told = [
            USER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [CALL],
                "reasoning_content": "Hm.",
                "provider_fields": {},
            },
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "x", "cache_control": {}}]},
        ]
        reply = await chat(gateway, messages=told, reasoning_effort="low", verbosity="low", frobnicate=1)
        assert reply.status_code == 200, reply.text
        assert set(reply.headers["x-penstock-ignored"].split(", ")) == {
            "frobnicate",
            "messages.content.cache_control",
            "messages.provider_fields",
            "messages.reasoning_content",
            "messages.tool_calls.function.parsed",
            "messages.tool_calls.index",
            "reasoning_effort",
            "verbosity",
        }
        assert "x-penstock-ignored" not in (await chat(gateway)).headers


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_is_that_of_the_request_without_it(serving: Serving, stream: bool) -> None:
    async with serving() as gateway:
        for extra in ({}, {"frobnicate": [1, {"a": 2}]}):
            reply = await chat(gateway, stream=stream, seed=1, **extra)
            assert reply.headers.get("x-penstock-ignored") == next(iter(extra), None)
        first, second = gateway.engine.seen
        assert (first.prompt, first.params) == (second.prompt, second.params)


async def test_what_would_change_the_answer_is_refused(serving: Serving) -> None:
    async with serving() as gateway:
        for name, neutral in CHANGES_THE_ANSWER.items():
            if "." in name or name in ChatRequest.__struct_fields__:
                continue
            reply = await chat(gateway, **{name: "something else"})
            if name not in ("suffix",):
                assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
            for usual in neutral:
                reply = await chat(gateway, **{name: usual})
                assert (reply.status_code, reply.headers["x-penstock-ignored"]) == (200, name), reply.text
        assert (await chat(gateway, priority=True)).status_code == 400, "true is not 1"
        assert (await chat(gateway, messages=[{**USER, "prefix": True}])).status_code == 400
        assert gateway.engine.seen[-1].prompt


MESSAGES = {"messages": [USER], "max_tokens": 9}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"prompt": "x", "frobnicate": None}, "frobnicate"),
    ("tokenize", {"prompt": "x", "frobnicate": 1}, "frobnicate"),
    ("detokenize", {"tokens": [1], "frobnicate": 1}, "frobnicate"),
    ("responses", {"input": "x", "reasoning": {"effort": "low"}}, "reasoning"),
    ("responses", {"input": "x", "text": {"verbosity": "low"}}, "text.verbosity"),
    ("responses", {"input": "x", "include": ["file_search_call.results"]}, "include.file_search_call.results"),
    ("responses", {"input": [{"role": "user", "content": "x", "phase": 1}]}, "input.phase"),
    ("messages", {**MESSAGES, "thinking": {"type": "adaptive"}}, "thinking"),
    ("messages", {**MESSAGES, "output_config": {"effort": "low"}}, "output_config.effort"),
    ("messages/count_tokens", {"messages": [USER], "context_management": {}}, "context_management"),
]


@pytest.mark.parametrize(("path", "body", "ignored"), CASES)
async def test_every_endpoint_has_the_policy(serving: Serving, path: str, body: dict[str, Any], ignored: str) -> None:
    async with serving() as gateway:
        reply = await gateway.client.post(f"/v1/{path}", json={"model": "tiny", **body})
        assert (reply.status_code, reply.headers.get("x-penstock-ignored")) == (200, ignored), reply.text
    async with serving(refuses_unknown=True) as strict:
        assert (await strict.client.post(f"/v1/{path}", json={"model": "tiny", **body})).status_code == 400


BROKEN = [b'{"model":"tiny","x":1,"messages":[', b'{"x":"\xff"}', b'{"x":1}', b'{"x":' + b"[" * 9999]


@pytest.mark.parametrize("body", BROKEN)
async def test_a_wrong_body_stays_a_clear_400(serving: Serving, body: bytes) -> None:
    async with serving() as gateway:
        json_type = {"content-type": "application/json"}
        reply = await gateway.client.post("/v1/chat/completions", content=body, headers=json_type)
        assert reply.status_code == 400 and reply.json()["error"]["message"]


def test_names_are_bounded_and_harmless() -> None:
    body = {"model": "m", "messages": [USER], **{f"x{n}": n for n in range(99)}}
    stripped, unknown = strip_unknown(ChatRequest, body)
    assert json.loads(stripped) == {"model": "m", "messages": [USER]}
    assert len(unknown.names) == MOST_NAMES and unknown.unnamed == 99 - MOST_NAMES
    value = ignored_header(["a\r\nset-cookie: x", "é,b", "y" * 500, *[f"n{n}" * 20 for n in range(99)]], 3)
    assert len(value) < 1200 and value.isascii() and b"\n" not in value and b"more" in value
    assert ignored_header(["a", "a", "b"], 0) == b"a, b"


def test_a_name_is_reported_once_for_many_messages() -> None:
    found = UnknownFields()
    for n in range(5):
        found.add("messages.extra", n)
    assert found.names == {"messages.extra": 0} and not found.unnamed
    assert msgspec.json.decode(strip_unknown(ChatRequest, {"messages": 5})[0]) == {"messages": 5}
