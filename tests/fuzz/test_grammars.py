"""Response formats: each is refused with a reason or followed, in bounded time and memory, and JSON is valid."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from penstock.engine.grammar.interface import GrammarError, words_for
from penstock.engine.grammar.sandbox import GrammarSandbox, Limits
from penstock.gateway.generation.response_format import grammar_of
from penstock.gateway.generation.schemas import JsonSchemaFormat, ResponseFormat, TextFormat
from tests.engine.grammar.tokens import CLOSING, END, NAMES, VOCAB, VOCABULARY, compiler, text_of
from tests.fuzz.harness import DURATIONS, fuzz, mutate_json

COMPILER = compiler(VOCAB)
_decode = msgspec.json.Decoder(ResponseFormat).decode


def schema(schema: dict[str, Any]) -> bytes:
    return json.dumps({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}).encode()


def other(kind: str, key: str, value: object) -> bytes:
    return json.dumps({"type": kind, key: value}).encode()


INTEGER = {"type": "integer", "minimum": 0, "maximum": 9}
SEEDS = [
    schema(
        {"type": "object", "properties": {"a": INTEGER, "b": {"type": "string", "maxLength": 4}}, "required": ["a"]}
    ),
    schema({"type": "object", "patternProperties": {"^[ab]{1,2}$": INTEGER}, "additionalProperties": False}),
    schema({"type": "object", "additionalProperties": INTEGER, "minProperties": 2, "maxProperties": 4}),
    schema({"type": "array", "prefixItems": [INTEGER, {"enum": ["x", None, 1.5, {"a": [1]}]}], "maxItems": 4}),
    schema({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}]}),
    schema({"allOf": [{"type": "integer", "multipleOf": 3}, {"exclusiveMaximum": 100}, {"minimum": -5}]}),
    schema({"oneOf": [{"type": "string", "format": "date"}, {"type": "boolean"}], "$defs": {"d": {"const": 1}}}),
    schema({"type": "string", "pattern": "^(a|bc){2,5}[^x]?$", "minLength": 3}),
    other("regex", "regex", r"(19|20)\d\d-(0[1-9]|1[0-2])( and \w{1,9}){0,3}!"),
    other("regex", "regex", "(x{90}){100}|(a?){90}a{90}|.*b.{20}"),
    other("choice", "choice", ["yes", "no", 'a "quoted" one', "ünïcode"]),
    other("grammar", "grammar", 'start: e\ne: e "+" e | "(" e ")" | N\nN: /[0-9]{1,9}/'),
    other("grammar", "grammar", 'start: a{1,9} %json {"type": "integer"}\na: T0\nT0: T1 T1\nT1: "x" | /y+/'),
    b'{"type": "json_object"}',
]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[GrammarSandbox]:
    sandbox = GrammarSandbox(VOCABULARY, VOCAB, Limits(compile_s=0.5, memory=64 << 20))
    yield sandbox
    sandbox.close()


def text_under(source: str, rng: random.Random) -> str | None:
    """A random text; None when it does not end soon, or runs into a limit or a corner, which fails a request."""
    matcher = COMPILER.compile(source)
    mask = np.zeros((1, words_for(VOCAB)), np.int32)
    taken: list[int] = []
    while len(taken) < 120:
        COMPILER.fill([matcher], mask)
        if matcher.error is not None:
            return None
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        closing = [token for token in allowed if token == END or NAMES[token] in CLOSING]
        taken.append(rng.choice(closing if closing and rng.random() < 0.6 else allowed))
        matcher.accept(taken[-1])
        if matcher.error is not None:
            return None
        if matcher.complete:
            return text_of(taken)
    return None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    assert len(found) == len(pairs), f"a key is repeated: {pairs}"
    return found


def check_json(text: str, schema: dict[str, Any]) -> None:
    value = json.loads(text, object_pairs_hook=unique)
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        problems = list(jsonschema.Draft202012Validator(schema).iter_errors(value))
    except Exception:  # a schema that the reference cannot read: any JSON will do
        return
    # The reference divides by floats, and reads patterns as Python does.
    problems = [problem for problem in problems if problem.validator not in ("multipleOf", "pattern")]
    assert not problems, (text, problems[0].message)


@pytest.mark.parametrize("seconds", DURATIONS)
def test_grammars(sandbox: GrammarSandbox, seconds: float) -> None:
    def run(data: bytes) -> None:
        try:
            wanted = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        if isinstance(wanted, TextFormat):
            return
        try:
            source = grammar_of(wanted).source
            sandbox.try_out(source)
        except GrammarError as error:
            assert str(error)
            return
        text = text_under(source, random.Random(len(data)))
        if text is not None and isinstance(wanted, JsonSchemaFormat):
            check_json(text, wanted.json_schema.schema)

    fuzz("grammars", run, SEEDS, seconds=seconds, limit_s=5.0, mutate=mutate_json)
