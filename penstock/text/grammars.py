"""Grammars for constrained output: JSON schemas, regular expressions, choices and Lark grammars, in one form.

A `Grammar` is a list of named parts in llguidance's notation; the text starts with the first one, and a part refers to
another as `@name`. Engines compile `Grammar.source`. Checking needs no tokenizer and no model, so an unusable grammar
is refused before it reaches an engine, and one that is too large before anything is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.grammar.interface import GrammarError
from penstock.engine.grammar.unique_keys import JsonStart, with_header
from penstock.text import grammar_limits as limits
from penstock.text.gbnf import gbnf_to_lark, is_gbnf
from penstock.text.schema_keywords import rewritten
from penstock.text.schema_rules import enforceable, keys_may_repeat

_OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,24}", "lenient": False}
"""White space between JSON tokens: one space, or a line break with indentation. Enough for every usual style, and a
model cannot generate white space for ever. Keywords that cannot be enforced are errors."""

NOT_INSTALLED = "grammars need the package llguidance, which is not installed on this server"

Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Grammar:
    """Named parts; the first one is the start."""

    parts: tuple[Part, ...]
    json_start: JsonStart | None = None
    """Where in the text JSON begins whose objects must not repeat a key; None: nowhere."""
    unenforced: tuple[str, ...] = ()
    """Keywords of its schemas that answers may violate."""

    @property
    def source(self) -> str:
        """What engines compile; raises `GrammarError` when it is larger than `grammar_limits` allow."""
        for part in self.parts:
            if "json_schema" in part:
                limits.check_schema(part["json_schema"])
            else:
                limits.check_lark(part["lark_grammar"])
        try:
            source = json.dumps({"grammars": self.parts}, ensure_ascii=False)
        except RecursionError:
            raise GrammarError("it is nested too deeply") from None
        limits.check_source(source)
        return source if self.json_start is None else with_header(self.json_start, source)

    def named(self, name: str) -> Grammar:
        """The same grammar, to be referred to as `@name`."""
        return Grammar(({**self.parts[0], "name": name}, *self.parts[1:]), self.json_start, self.unenforced)


def json_schema(schema: Mapping[str, Any]) -> Grammar:
    """JSON that is valid under `schema`."""
    if "x-guidance" in schema:
        raise GrammarError("`x-guidance` is not a keyword of JSON schema")
    limits.check_schema(schema)
    schema, unenforced = rewritten(schema)
    schema = enforceable(schema)
    part = {"name": "json", "json_schema": {**schema, "x-guidance": _OPTIONS}}
    return Grammar((part,), json_start="" if keys_may_repeat(schema) else None, unenforced=unenforced)


def json_object() -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> Grammar:
    """Text that matches the whole of `pattern`: no look-around, no back-references; `\\d` and `\\w` are ASCII."""
    from llguidance import regex_to_lark

    limits.check_pattern(pattern)
    return lark(f"start: /{regex_to_lark(pattern, 'dw')}/")


def choice(options: Sequence[str]) -> Grammar:
    """Exactly one of `options`."""
    limits.check_values(len(options))
    for option in options:
        limits.check_text(option)
    # One lexeme, however many options there are: the lexer tells them apart faster than the parser.
    return lark("start: OPTION\nOPTION: " + " | ".join(map(literal, options)))


def lark(source: str) -> Grammar:
    """A grammar in Lark notation with the start rule `start`, or in GBNF with the rule `root`."""
    limits.check_source(source)
    if is_gbnf(source):
        source = gbnf_to_lark(source)
        limits.check_source(source)
    for schema in limits.schemas_in_lark(source):
        limits.check_schema(schema)
    return Grammar(({"name": "lark", "lark_grammar": source},))


def literal(text: str) -> str:
    """A text as a Lark literal."""
    return json.dumps(text)


def check(grammar: Grammar) -> str:
    """The source of a grammar that engines can compile; raises `GrammarError` with the reason otherwise.

    In this process: for grammars that come from nobody else. Those of clients go through `GrammarSandbox`.
    """
    try:
        from penstock.engine.grammar.guidance import validate
    except ImportError as error:
        raise GrammarError(NOT_INSTALLED) from error
    source = grammar.source
    validate(source)
    return source
