"""Bounds on a grammar that are checked before anything is compiled: a look at its source, in linear time.

They keep out what is far too large for any honest use. What passes may still be costly, which only compiling shows:
that happens in a sandbox, with limits on time and memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from penstock.engine.grammar.interface import GrammarError

MAX_SOURCE = 256 * 1024
"""Characters of a whole grammar."""
MAX_PATTERN = 4096
"""Characters of one regular expression."""
MAX_NESTING = 64
"""Levels of groups in a regular expression, and of a JSON schema."""
MAX_REPETITIONS = 10_000
"""Repetitions in a regular expression: `{1,100}` inside `{50}` counts 5,000."""
MAX_BRANCHES = 1_000
"""Alternatives at one place of a JSON schema, and `$ref`s in the whole of it."""
MAX_VALUES = 10_000
"""Values in an `enum`, options of a choice."""
MAX_TEXT = 2_048
"""Characters of a string that is prescribed letter by letter: an option, a `const`, a value of an `enum`."""

_COUNT = re.compile(r"\{(\d{0,9})(?:,(\d{0,9}))?\}")
_LARK_TOKEN = re.compile(
    r"""//[^\n]* | (?P<literal>"(?:[^"\\\n]|\\[^\n])*"?) | /(?P<pattern>(?:[^/\\\n]|\\[^\n])+)/?""", re.VERBOSE
)
"""Comments, literals, regular expressions. One that is not closed is taken to the end of its line: in linear time."""
_LARK_COUNT = re.compile(r"\{\s*(\d{0,9})\s*(?:,\s*(\d{0,9})\s*)?\}|~\s*(\d{1,9})(?:\s*\.\.\s*(\d{1,9}))?")
_LARK_JSON = re.compile(r"%json\b\s*")
_SUBSCHEMAS = ("additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames")
_SUBSCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SUBSCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def check_source(source: str) -> None:
    if len(source) > MAX_SOURCE:
        raise GrammarError(f"it has {len(source)} characters; at most {MAX_SOURCE} are accepted")


def check_text(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise GrammarError(f"it prescribes a text of {len(text)} characters; at most {MAX_TEXT} are accepted")


def check_values(count: int) -> None:
    if count > MAX_VALUES:
        raise GrammarError(f"it lists {count} values; at most {MAX_VALUES} are accepted")


def check_pattern(pattern: str) -> None:
    """A regular expression, whatever its dialect: its length, the nesting of its groups, its repetitions."""
    if len(pattern) > MAX_PATTERN:
        raise GrammarError(
            f"a regular expression in it has {len(pattern)} characters; at most {MAX_PATTERN} are accepted"
        )
    # Repetitions inside each open group, and of the last item, which a count behind it multiplies.
    groups, last, at = [1], 1, 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at, last = at + 2, 1
        elif character == "[":
            at, last = _class_end(pattern, at), 1
        elif character == "(":
            groups.append(1)
            if len(groups) > MAX_NESTING:
                raise GrammarError(f"its groups are nested more than {MAX_NESTING} deep")
            at, last = at + 1, 1
        elif character == ")" and len(groups) > 1:
            at, last = at + 1, groups.pop()
        elif character == "{" and (count := _COUNT.match(pattern, at)):
            last *= max(int(count[2] or count[1] or 0), int(count[1] or 0), 1)
            at = count.end()
        else:
            at, last = at + 1, last if character in "*+?" else 1
        groups[-1] = max(groups[-1], last)
        if last > MAX_REPETITIONS:
            raise GrammarError(
                f"a regular expression in it repeats {last} times; at most {MAX_REPETITIONS} are accepted"
            )


def check_lark(source: str) -> None:
    """The regular expressions, counts and schemas of a Lark grammar."""
    for token in _LARK_TOKEN.finditer(source):
        if token["literal"]:
            check_text(token["literal"])
        elif token["pattern"]:
            check_pattern(token["pattern"])
    for count in _LARK_COUNT.findall(_LARK_TOKEN.sub(" ", source)):
        most = max((int(number) for number in count if number), default=0)
        if most > MAX_REPETITIONS:
            raise GrammarError(f"it repeats a rule {most} times; at most {MAX_REPETITIONS} are accepted")


def schemas_in_lark(source: str) -> list[dict[str, Any]]:
    """The schemas behind `%json`; what cannot be read is left to the compiler."""
    found: list[dict[str, Any]] = []
    for start in _LARK_JSON.finditer(source):
        try:
            schema, _ = json.JSONDecoder().raw_decode(source, start.end())
        except (ValueError, RecursionError):
            continue
        if isinstance(schema, dict):
            found.append(schema)
    return found


def check_schema(schema: object) -> None:
    """The nesting, patterns, alternatives and prescribed texts of a JSON schema."""
    refs = 0
    waiting: list[tuple[object, int]] = [(schema, 1)]
    while waiting:
        node, depth = waiting.pop()
        if not isinstance(node, Mapping):
            continue
        if depth > MAX_NESTING:
            raise GrammarError(f"it is nested more than {MAX_NESTING} deep")
        refs += "$ref" in node
        if refs > MAX_BRANCHES:
            raise GrammarError(f"it has more than {MAX_BRANCHES} `$ref`s")
        if isinstance(pattern := node.get("pattern"), str):
            check_pattern(pattern)
        if isinstance(values := node.get("enum"), list):
            check_values(len(values))
            for value in values:
                _check_value(value)
        if "const" in node:
            _check_value(node["const"])
        for name in _SUBSCHEMAS:
            waiting.append((node.get(name), depth + 1))
        for name in _SUBSCHEMA_LISTS:
            if isinstance(branches := node.get(name), list):
                if len(branches) > MAX_BRANCHES:
                    raise GrammarError(f"`{name}` has {len(branches)} entries; at most {MAX_BRANCHES} are accepted")
                waiting += [(branch, depth + 1) for branch in branches]
        for name in _SUBSCHEMA_MAPS:
            if isinstance(entries := node.get(name), Mapping):
                if name == "patternProperties":
                    for pattern in entries:
                        check_pattern(pattern)
                waiting += [(entry, depth + 1) for entry in entries.values()]


def _check_value(value: object) -> None:
    """A value that is prescribed letter by letter."""
    waiting = [(value, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_NESTING:
            raise GrammarError(f"it is nested more than {MAX_NESTING} deep")
        if isinstance(value, str):
            check_text(value)
        elif isinstance(value, Mapping):
            for name in value:
                check_text(str(name))
            waiting += [(entry, depth + 1) for entry in value.values()]
        elif isinstance(value, list):
            waiting += [(entry, depth + 1) for entry in value]


def _class_end(pattern: str, at: int) -> int:
    """The position behind the character class that begins at `at`."""
    at += 1
    if pattern.startswith("^", at):
        at += 1
    if pattern.startswith("]", at):
        at += 1
    depth = 1
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif character == "[":
            depth += 1  # a nested class
        elif character == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return at
