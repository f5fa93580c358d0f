"""Grammars that are far too large are refused by their source, at once and with the limit."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest

from penstock.engine.grammar.interface import GrammarError
from penstock.text import grammars
from penstock.text.grammar_limits import MAX_PATTERN, MAX_SOURCE
from penstock.text.grammars import Grammar


def nested(depth: int) -> dict[str, Any]:
    return reduce(lambda inner, _: {"type": "array", "items": inner}, range(depth), {"type": "null"})


REFUSED: dict[str, tuple[Callable[[], Grammar], str]] = {
    "the attack": (lambda: grammars.regex("a?" * 100_000), f"200000 characters; at most {MAX_PATTERN}"),
    "a fifth of it": (lambda: grammars.regex("a?" * 20_000), "40000 characters"),
    "repetitions": (lambda: grammars.regex("(x{1000}){1000}"), "repeats 1000000 times; at most 10000"),
    "counts in a row": (lambda: grammars.regex("x{200}{200}"), "repeats 40000 times"),
    "a count behind quotes": (lambda: grammars.lark('start: /"(x{1000}){1000}"/'), "repeats 1000000 times"),
    "groups": (lambda: grammars.regex("(" * 100 + "a" + ")" * 100), "nested more than 64"),
    "choices": (lambda: grammars.choice([str(i) for i in range(10_001)]), "10001 values; at most 10000"),
    "a long choice": (lambda: grammars.choice(["x" * 5_000]), "5000 characters; at most 2048"),
    "a pattern in a schema": (
        lambda: grammars.json_schema({"properties": {"a": {"anyOf": [{"pattern": "a?" * 9_000}]}}}),
        "18000 characters",
    ),
    "a pattern of keys": (lambda: grammars.json_schema({"patternProperties": {"(a{500}){500}": {}}}), "250000 times"),
    "a deep schema": (lambda: grammars.json_schema(nested(100)), "nested more than 64"),
    "a very deep schema": (lambda: grammars.json_schema(nested(50_000)), "nested more than 64"),
    "references": (
        lambda: grammars.json_schema({"anyOf": [{"prefixItems": [{"$ref": "#"}] * 600}] * 2}),
        r"more than 1000 `\$ref`s",
    ),
    "branches": (lambda: grammars.json_schema({"anyOf": [{}] * 1_001}), "1001 entries; at most 1000"),
    "an enum": (lambda: grammars.json_schema({"enum": list(range(10_001))}), "10001 values"),
    "a long value": (lambda: grammars.json_schema({"const": {"a": ["x" * 3_000]}}), "3000 characters"),
    "a deep value": (lambda: grammars.json_schema({"const": reduce(lambda a, _: [a], range(999), [])}), "nested"),
    "a rule": (lambda: grammars.lark('start: "a"{1,100000}'), "100000 times"),
    "a rule, as Lark writes it": (lambda: grammars.lark('start: "a"~1..20000'), "20000 times"),
    "a schema in Lark": (lambda: grammars.lark('start: %json {"pattern": "(a{500}){500}"}'), "250000 times"),
    "a long grammar": (lambda: grammars.lark("x" * 300_000), f"at most {MAX_SOURCE}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_grammar_that_is_too_large_is_refused_with_the_limit(name: str) -> None:
    build, why = REFUSED[name]
    gc.disable()  # a collection over all that other tests left behind takes longer than any of this
    try:
        begun = time.thread_time()
        with pytest.raises(GrammarError, match=why):
            _ = build().source
        assert time.thread_time() - begun < 2
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "build",
    [
        lambda: grammars.regex(r"[^\n]{1,5000}"),
        lambda: grammars.regex(r"(\w{1,40} ){1,200}[()\]{}]+\{99999\}[[:alpha:]{99999}]"),
        lambda: grammars.choice([f"option {i}" for i in range(5_000)]),
        lambda: grammars.json_schema({"type": "string", "maxLength": 10**6}),
        lambda: grammars.json_schema({"enum": [f"value {i}" for i in range(5_000)]}),
        lambda: grammars.json_schema({"properties": {"pattern": {"type": "string"}, "enum": {"const": 1}}}),
        lambda: grammars.lark('start: "{100000}" /a{5}/ b~1..3 // {100000}\nb: "x"'),
    ],
)
def test_large_but_honest_grammars_pass(build: Callable[[], Grammar]) -> None:
    assert grammars.check(build())


@pytest.mark.parametrize(
    "source", ['"\\"' * 60_000, "/\\/" * 60_000, "/" * 200_000, "a" + "{" * 200_000, "[" * 200_000]
)
def test_looking_takes_linear_time(source: str) -> None:
    begun = time.thread_time()
    with pytest.raises(GrammarError):
        grammars.check(grammars.lark(source))
    assert time.thread_time() - begun < 2
