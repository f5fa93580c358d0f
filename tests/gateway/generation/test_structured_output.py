"""Constraints as other servers spell them lead to the same grammar as `response_format`."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.response_format import Checked, grammar_of
from penstock.gateway.generation.schemas import ChatRequest
from penstock.gateway.generation.structured_output import with_response_format
from penstock.protocol.errors import InvalidRequest
from penstock.text import grammars
from tests.gateway.conftest import Serving

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
GBNF = 'root ::= "yes" | "no"'
TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}
JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"guided_json": SCHEMA}, JSON),
    ({"guided_json": json.dumps(SCHEMA)}, JSON),
    ({"json_schema": SCHEMA}, JSON),
    ({"json_schema": json.dumps(SCHEMA)}, JSON),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}, "response_format": {"type": "text"}}, JSON),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, JSON),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, JSON),
    ({"structured_outputs": {"json_object": True}}, {"type": "json_object"}),
    ({"guided_regex": "a+"}, {"type": "regex", "regex": "a+"}),
    ({"regex": "a+"}, {"type": "regex", "regex": "a+"}),
    ({"structured_outputs": {"regex": "a+"}}, {"type": "regex", "regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"type": "choice", "choice": ["a", "b"]}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"type": "choice", "choice": ["a", "b"]}),
    ({"guided_grammar": "start: /x+/"}, {"type": "grammar", "grammar": "start: /x+/"}),
    ({"grammar": GBNF}, {"type": "grammar", "grammar": GBNF}),
    ({"ebnf": GBNF}, {"type": "grammar", "grammar": GBNF}),
    ({"structured_outputs": {"grammar": GBNF}}, {"type": "grammar", "grammar": GBNF}),
    ({"guided_grammar": GBNF, "structured_outputs": {"grammar": GBNF}}, {"type": "grammar", "grammar": GBNF}),
    ({"structural_tag": json.dumps(TAG)}, {"type": "structural_tag", **TAG}),
    ({"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **TAG})}},
     {"type": "structural_tag", **TAG}),
]  # fmt: skip


def decoded(body: dict[str, Any]) -> ChatRequest:
    return msgspec.convert({"model": "tiny", "messages": [USER], **body}, ChatRequest)


@pytest.mark.parametrize(("spelled", "plain"), SAME)
def test_every_spelling_gives_the_same_grammar(spelled: dict[str, Any], plain: dict[str, Any]) -> None:
    found = with_response_format(decoded(spelled))
    expected = decoded({"response_format": plain})
    assert found.response_format is not None and expected.response_format is not None
    assert grammar_of(found.response_format).source == grammar_of(expected.response_format).source
    plainly = msgspec.structs.replace(found, response_format=expected.response_format)
    assert plainly == expected, "nothing else is left of it, for caches and other servers"


def test_nothing_asked_for_is_nothing() -> None:
    request = decoded({"structured_outputs": {}, "guided_json": None, "grammar": ""})
    assert with_response_format(request).response_format is None


async def test_constraints_reach_the_engine_or_say_why_not(serving: Serving) -> None:
    schema = {"type": "array", "items": {"type": "string", "format": "file-path"}, "uniqueItems": True}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    parameters = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    named = "json_schema.format.file-path, json_schema.uniqueItems"
    async with serving() as gateway:
        for ask in (gateway.chat, gateway.complete):
            for extra in ({}, {"stream": True}, {"n": 2}):
                reply = await ask(guided_json=SCHEMA, guided_decoding_backend="xgrammar", **extra)
                assert (reply.status_code, reply.headers["x-penstock-ignored"]) == (200, "guided_decoding_backend")
                assert gateway.engine.seen[-1].params.grammar == grammars.json_schema(SCHEMA).source
        reply = await gateway.client.post("/v1/responses", json={"model": "tiny", "input": "hi", "guided_json": SCHEMA})
        assert (reply.status_code, gateway.engine.seen[-1].params.grammar) == (200, grammars.json_schema(SCHEMA).source)
        for body in ({"response_format": wanted}, {"guided_json": schema, "stream": True}, {"tools": [tool]}):
            assert (await gateway.chat(**body)).headers["x-penstock-ignored"] == named
        assert "x-penstock-ignored" not in (await gateway.chat()).headers
        for body, says in (
            ({"grammar": "root ::= missing"}, "missing"),
            ({"response_format": {"type": "json_schema"}}, "no schema"),
            ({"structural_tag": {"format": {"type": "no"}}}, "no format"),
            ({"guided_regex": "(?=a)"}, "look-around"),
        ):
            reply = await gateway.chat(**body)
            assert reply.status_code == 400 and says in reply.json()["error"]["message"], reply.text


def test_a_strict_server_refuses_what_it_does_not_enforce() -> None:
    exchange = cast(Exchange, SimpleNamespace(refuses_unknown=True))
    with pytest.raises(InvalidRequest, match="uniqueItems") as caught:
        Checked("source", ("uniqueItems",)).told(exchange, "response_format")
    assert caught.value.code == "unsupported_grammar"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"json_schema": "[1]"}, "json_schema"),
        ({"structural_tag": {"structures": 5}}, "structural_tag"),
    ],
)
def test_one_constraint_and_a_readable_one(body: dict[str, Any], param: str) -> None:
    request = decoded(body)
    with pytest.raises(InvalidRequest) as caught:
        with_response_format(request)
    assert caught.value.param == param
