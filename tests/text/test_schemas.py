"""What a JSON schema demands is enforced or refused: random texts under each are valid, duplicate keys included."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from penstock.engine.grammar.interface import GrammarError
from penstock.text import grammars
from penstock.text.schema_rules import enforceable, keys_may_repeat, keys_of
from tests.engine.grammar.tokens import VOCAB, compiler, walk

COMPILER = compiler(VOCAB)
INTEGER = {"type": "integer"}
DRAWS = 40

ENFORCED: dict[str, dict[str, Any]] = {
    "any object": {"type": "object", "maxProperties": 3},
    "free keys": {"type": "object", "additionalProperties": INTEGER, "minProperties": 3, "maxProperties": 4},
    "free keys beside declared ones": {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": INTEGER},
    "two keys by pattern": {"type": "object", "patternProperties": {"^[ab]$": INTEGER}, "additionalProperties": False},
    "words by pattern": {
        "type": "object",
        "patternProperties": {"^(foo|ba[rz])$": INTEGER},
        "additionalProperties": False,
    },
    "many keys by pattern": {
        "type": "object",
        "patternProperties": {"^[ab]+$": INTEGER, "^[xy][0-9]*$": {"type": "null"}},
        "additionalProperties": False,
        "minProperties": 3,
        "maxProperties": 5,
    },
    "patterns beside free keys": {
        "type": "object",
        "patternProperties": {"^x$": INTEGER},
        "additionalProperties": {"type": "null"},
    },
    "a declared key that a pattern matches": {
        "type": "object",
        "properties": {"a": {"minimum": 5}},
        "patternProperties": {"^a?$": INTEGER},
        "required": ["a"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": {
            "type": "object",
            "minProperties": 2,
            "maxProperties": 2,
            "additionalProperties": {"type": "object", "minProperties": 1, "maxProperties": 2},
        },
    },
    "counts": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": -50, "maximum": 50},
    "bounds": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "format": {"type": "string", "format": "date"},
    "pattern with lengths": {"type": "string", "pattern": "^[a-c]+$", "minLength": 2, "maxLength": 3},
    "exclusive branches": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    "recursion": {
        "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}},
        "$ref": "#/$defs/t",
    },
}

REFUSED: dict[str, dict[str, Any]] = {
    "contains": {"type": "array", "contains": INTEGER},
    "not": {"not": INTEGER},
    "if": {"if": INTEGER, "then": {"minimum": 3}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "min/maxProperties": {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "minProperties": 1},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "disjoint": {"type": "object", "patternProperties": {"^x": INTEGER, "y$": {"type": "null"}}},
}


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    assert len(set(keys)) == len(keys), f"a key is repeated: {keys}"
    return dict(pairs)


@pytest.mark.parametrize("schema", ENFORCED.values(), ids=ENFORCED)
def test_random_texts_are_valid(schema: dict[str, Any]) -> None:
    fresh = COMPILER.compile(grammars.check(grammars.json_schema(schema)))
    rng = random.Random(1)
    ended = 0
    for _ in range(DRAWS):
        text = walk(COMPILER, fresh, rng)
        if text is None:
            continue
        ended += 1
        jsonschema.Draft202012Validator(schema).validate(json.loads(text, object_pairs_hook=unique))
    assert ended >= 30


@pytest.mark.parametrize("keyword", REFUSED)
def test_what_cannot_be_enforced_is_refused(keyword: str) -> None:
    with pytest.raises(GrammarError, match=keyword):
        grammars.check(grammars.json_schema(REFUSED[keyword]))


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("^a$", ["a"]),
        ("^(foo|ba[rz])$", ["foo", "bar", "baz"]),
        ("^x[0-2]?$", ["x", "x0", "x1", "x2"]),
        (r"^a\$$", ["a$"]),
        ("^a|b$", None),
        (r"^a\$", None),
        ("a$", None),
        ("^[a-z]+$", None),
        ("^[a-z][0-9]$", None),
        ("^(a{60}){60}$", None),
        ("^(?=a)a$", None),
        ("^(", None),
        ("", None),
    ],
)
def test_patterns_with_few_keys_are_written_out(pattern: str, keys: list[str] | None) -> None:
    assert keys_of(pattern) == keys


def test_a_schema_is_rewritten_everywhere_and_left_alone_otherwise() -> None:
    inner = {"type": "object", "patternProperties": {"^a$": INTEGER}}
    schema = {"properties": {"p": inner}, "items": [inner], "anyOf": [inner, True], "additionalProperties": inner}
    written = {"type": "object", "properties": {"a": INTEGER}}
    assert enforceable(schema) == {
        "properties": {"p": written},
        "items": [written],
        "anyOf": [written, True],
        "additionalProperties": written,
    }
    plain = {"type": "object", "properties": {"patternProperties": {"^a$": {}}}, "enum": [{"patternProperties": {}}]}
    assert enforceable(plain) == plain


CLOSED = {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "may"),
    [
        (INTEGER, False),
        ({"enum": [{"a": 1}]}, False),
        (CLOSED, False),
        ({"type": ["object", "null"], **{k: v for k, v in CLOSED.items() if k != "type"}}, False),
        ({"type": "array", "items": CLOSED}, False),
        ({"type": "array", "prefixItems": [CLOSED], "items": False}, False),
        ({"anyOf": [CLOSED, {"type": "null"}]}, False),
        ({"$defs": {"x": CLOSED}, "$ref": "#/$defs/x"}, False),
        ({}, True),
        ({"type": "object"}, True),
        ({"description": "anything"}, True),
        ({"type": "array"}, True),
        ({"type": "array", "prefixItems": [CLOSED]}, True),
        ({**CLOSED, "properties": {"a": True}}, True),
        ({**CLOSED, "patternProperties": {"^x": INTEGER}}, True),
        ({"anyOf": [CLOSED, {"type": "object"}]}, True),
        ({"$defs": {"x": {"type": "object"}}, "$ref": "#/$defs/x"}, True),
        ({"x": {"type": "object"}, "$ref": "#/x"}, True),
        ({"$defs": {"x": {"const": 1, "y": {}}}, "$ref": "#/$defs/x/y"}, True),
        ({"type": "object", "properties": 1, "additionalProperties": False}, True),
    ],
)
def test_only_undeclared_keys_may_repeat(schema: dict[str, Any], may: bool) -> None:
    """Where none are possible, nothing has to be watched."""
    assert keys_may_repeat(schema) == may
