"""Response formats: each is refused with a reason or followed, in bounded time and memory, and JSON is valid."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from penstock.engine.grammar.interface import GrammarError, words_for
from penstock.engine.grammar.sandbox import GrammarSandbox, Limits
from penstock.gateway.generation.response_format import grammar_of, schema_of
from penstock.gateway.generation.schemas import JsonSchemaFormat, ResponseFormat, TextFormat
from penstock.text.schema_keywords import rewritten
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


KEYWORDS: list[tuple[str, Any]] = [
    ("minProperties", 2),
    ("maxProperties", 1),
    ("required", ["a", "zz"]),
    ("additionalProperties", {"type": "null"}),
    ("additionalProperties", False),
    ("patternProperties", {"^(a|b)$": {"type": "integer"}, "c+": {"type": "null"}}),
    ("properties", {"a": {"minimum": 2}, "": {"type": "boolean"}}),
    ("propertyNames", {"maxLength": 2}),
    ("dependentRequired", {"a": ["b"]}),
    ("uniqueItems", True),
    ("contains", {"type": "integer"}),
    ("items", {"type": "object"}),
    ("prefixItems", [{"type": "integer"}, {"$ref": "#"}]),
    ("not", {"const": 1}),
    ("if", {"minimum": 2}),
    ("$ref", "#"),
    ("$ref", "#/$defs/d"),
    ("type", ["object", "array", "null"]),
    ("enum", [1, "a", {"a": 1}, []]),
    ("const", {"a": [1, "x"]}),
    ("pattern", "(?i)a|b$"),
    ("maxLength", 3),
    ("minItems", 2),
    ("multipleOf", 0.3),
    ("exclusiveMinimum", 3),
    ("format", "email"),
    ("anyOf", [{"type": "integer"}, {"minLength": 2}]),
    ("oneOf", [{"required": ["a"]}, {"required": ["b"]}]),
    ("allOf", [{"properties": {"a": {}}}, {"maxProperties": 3}]),
]
PIECES = [
    *[
        r"a",
        r".*",
        r"[^a-c]",
        r"\d",
        r"\w+",
        r"\p{L}",
        r"(a|b)",
        r"?",
        r"+",
        r"{3}",
        r"{2,90}",
        r"{0,}",
        r"|",
        r"^",
        r"$",
        r"(",
        r")",
        r"(?i)",
        r"[",
        r"]",
        r"\\",
        r"/",
    ],
    '"',
    "\n",
    "é",
]


def mutate(data: bytes, rng: random.Random, pool: Sequence[bytes]) -> bytes:
    """Edit what is inside a format: keywords in and out of a schema, pieces of patterns and rules."""
    try:
        form = json.loads(data)
        kind = form["type"]
        inner = form["json_schema"]["schema"] if kind == "json_schema" else form[kind]
    except (ValueError, LookupError, TypeError, RecursionError):
        return mutate_json(rng.choice(SEEDS), rng, pool)
    if isinstance(inner, str):
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(inner) + 1)
            piece = (
                rng.choice(PIECES) if rng.random() < 0.6 else inner[at : at + rng.randint(1, 20)] * rng.randint(0, 3)
            )
            inner = inner[:at] + piece + inner[at + rng.randrange(4) :]
        form[kind] = inner
    elif kind == "json_schema" and isinstance(inner, dict):
        if rng.random() < 0.5:
            edited = json.loads(mutate_json(json.dumps(inner).encode(), rng, [b"{}"]).decode(errors="replace") or "{}")
            inner = edited if isinstance(edited, dict) else inner
        nodes = [inner]
        for node in nodes:
            nested = [value for value in node.values() if isinstance(value, dict | list)]
            nodes += [value for value in nested if isinstance(value, dict)]
            nodes += [
                value for values in nested if isinstance(values, list) for value in values if isinstance(value, dict)
            ]
        for _ in range(rng.randint(1, 3)):
            keyword, value = rng.choice(KEYWORDS)
            rng.choice(nodes)[keyword] = value
        form["json_schema"]["schema"] = inner
    else:
        return mutate_json(data, rng, pool)
    return json.dumps(form).encode()


def guarded(data: bytes, rng: random.Random, pool: Sequence[bytes]) -> bytes:
    try:
        return mutate(data, rng, pool)
    except (ValueError, RecursionError):  # an edit of the bytes left no JSON
        return mutate_json(data, rng, pool)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[GrammarSandbox]:
    sandbox = GrammarSandbox(VOCABULARY, VOCAB, Limits(compile_s=0.5))
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
            schema = schema_of(wanted)
            left, unenforced = rewritten(schema)
            check_json(text, left if unenforced else schema)

    fuzz("grammars", run, SEEDS, seconds=seconds, quick=250, limit_s=5.0, mutate=guarded)
