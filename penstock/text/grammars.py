"""Grammars for constrained output: JSON schemas, regular expressions, choices and Lark grammars, in one form.

A `Grammar` is a list of named parts in llguidance's notation; the text starts with the first one, and a part refers to
another as `@name`. Engines compile `Grammar.source`. Checking needs no tokenizer and no model, so an unusable grammar
is refused before it reaches an engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.grammar.interface import GrammarError

MAX_SOURCE = 256 * 1024
"""Maximum length of a grammar in characters."""
_OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,24}", "lenient": False}
"""White space between JSON tokens: one space, or a line break with indentation. Enough for every usual style, and a
model cannot generate white space for ever. Keywords that cannot be enforced are errors."""

Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Grammar:
    """Named parts; the first one is the start."""

    parts: tuple[Part, ...]

    @property
    def source(self) -> str:
        return json.dumps({"grammars": self.parts}, ensure_ascii=False)

    def named(self, name: str) -> Grammar:
        """The same grammar, to be referred to as `@name`."""
        return Grammar(({**self.parts[0], "name": name}, *self.parts[1:]))


def json_schema(schema: Mapping[str, Any]) -> Grammar:
    """JSON that is valid under `schema`."""
    if "x-guidance" in schema:
        raise GrammarError("`x-guidance` is not a keyword of JSON schema")
    return Grammar(({"name": "json", "json_schema": {**schema, "x-guidance": _OPTIONS}},))


def json_object() -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> Grammar:
    """Text that matches the whole of `pattern`: no look-around, no back-references; `\\d` and `\\w` are ASCII."""
    from llguidance import regex_to_lark

    return lark(f"start: /{regex_to_lark(pattern, 'dw')}/")


def choice(options: Sequence[str]) -> Grammar:
    """Exactly one of `options`."""
    return lark("start: " + " | ".join(map(literal, options)))


def lark(source: str) -> Grammar:
    """A grammar in Lark notation with the start rule `start`."""
    return Grammar(({"name": "lark", "lark_grammar": source},))


def literal(text: str) -> str:
    """A text as a Lark literal."""
    return json.dumps(text)


def check(grammar: Grammar) -> str:
    """The source of a grammar that engines can compile; raises `GrammarError` with the reason otherwise."""
    try:
        from llguidance import LLMatcher

        from penstock.engine.grammar.guidance import limits
    except ImportError as error:
        raise GrammarError("grammars need the package llguidance, which is not installed on this server") from error
    try:
        source = grammar.source
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    if len(source) > MAX_SOURCE:
        raise GrammarError(f"it has {len(source)} characters; at most {MAX_SOURCE} are accepted")
    failed, messages = LLMatcher.validate_grammar_with_warnings(source, limits=limits())
    if failed:
        raise GrammarError(messages[0].strip())
    return source
