"""Scans function calls that are not JSON: Python calls in a list (Llama 4, LFM2) or one in a line (OLMo 3), and keys
and values in tags (GLM-4.5).

    [get_weather(city="Paris", days=3), now()]

    get_weather(city="Paris", days=3)
    now()
    </function_calls>

    get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

A call is reported when it is complete, its arguments as JSON. As for `CallScanner`, events depend on the text alone,
never on where it was split, and text that is no call is an error.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection
from typing import Any

from penstock.tools.argument_values import argument
from penstock.tools.events import Event
from penstock.tools.scanner import Malformed, overlap
from penstock.tools.whole_calls import ClosedScanner, WholeScanner

_LONGEST = 262_144
"""Characters of calls in Python: reading them takes a multiple of their memory."""
_HEAD = re.compile(r"\s*\[\s*([\w.-]{1,128})\s*\(")
_BEGUN = re.compile(r"\s*(\[\s*([\w.-]{1,128}\s*)?)?")
_HEAD_OF_LINES = re.compile(r"\s*\[?\s*([\w.-]{1,128})\s*\(")
_BEGUN_LINES = re.compile(r"\s*\[?\s*([\w.-]{1,128}\s*)?")
_CALL = re.compile(r"[\s,;]*([\w.-]{1,128})\s*\(\s*")
_KEYWORD = re.compile(r"([^\s\"'()\[\]{},=]{1,128})\s*=(?!=)")
_NEXT = re.compile(r"\s*,?\s*")
_REST = re.compile(r"[\s,;]*")
_PARTS = re.compile(r"[\"'\[\](){},]")
_MARKS = re.compile(r"[\"'\[\](){}]")
_PAIRS = {")": "(", "]": "[", "}": "{"}
_WORDS = {"true": True, "false": False, "null": None}
_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|$))", re.DOTALL)
_NAME = re.compile(r"\s*([^<>{}\[\]\"'\s]+)\s*(?=<arg_key>|$)")


class PythonScanner(WholeScanner):
    """Calls with keyword arguments that are literals: a list, or, where they end with a `closer`, which is read
    too, one in a line."""

    def __init__(self, names: Collection[str], first: int, emit: Callable[[Event], None], closer: str = "") -> None:
        super().__init__(names, first, emit)
        self._closer = closer
        self._head, self._begins = (_HEAD_OF_LINES, _BEGUN_LINES) if closer else (_HEAD, _BEGUN)
        self._marks = re.compile(f"{re.escape(closer)}|{_MARKS.pattern}") if closer else _MARKS
        self._at = 0
        self._nesting: list[str] = []
        self._quote = ""

    def scan(self, text: str, at: int) -> int:
        known = len(self._text)
        self._text += text[at:]
        head, shift = self._head.match(self._text), at - known
        if head is None:
            begun = self._begins.match(self._text)
            assert begun is not None
            if begun.end() < len(self._text):
                raise Malformed(begun.end() + shift)
            return len(text)
        if head[1] not in self._names:
            raise Malformed(head.end() + shift)
        end = self._end(shift)
        if (len(self._text) if end is None else end) > _LONGEST:
            raise Malformed(_LONGEST + shift)
        if end is None:
            return len(text)
        stop = end + shift
        calls = _python_calls(self._text[: end - len(self._closer)], lines=bool(self._closer))
        if calls is None or any(name not in self._names for name, _ in calls):
            raise Malformed(stop)
        for name, arguments in calls:
            self._call(name, arguments)
        self.done = True
        return stop

    def _end(self, shift: int) -> int | None:
        """Where the list ends; None where it has not."""
        while True:
            if self._quote:
                found = re.compile(rf"\\|{re.escape(self._quote)}").search(self._text, self._at)
                if found is None:
                    self._at = len(self._text)
                    return None
                if found[0] == "\\":
                    if found.end() >= len(self._text):
                        self._at = found.start()
                        return None
                    self._at = found.end() + 1
                    continue
                self._at, self._quote = found.end(), ""
            mark = self._marks.search(self._text, self._at)
            if mark is None:
                self._at = len(self._text) - overlap(self._text[self._at :], self._closer)
                return None
            char, self._at = mark[0], mark.end()
            if char == self._closer:
                if self._nesting:
                    raise Malformed(self._at + shift)
                return self._at
            if char in "\"'":
                self._quote = char
            elif char in "[({":
                self._nesting.append(char)
            elif not self._nesting or self._nesting.pop() != _PAIRS[char]:
                raise Malformed(self._at + shift)
            elif not self._nesting and not self._closer:
                return self._at


class TagScanner(ClosedScanner):
    """A name, then keys and values in tags."""

    def _is_inside(self, body: str) -> bool:
        return body.count("<arg_value>") > body.count("</arg_value>")

    def _read(self, body: str) -> tuple[str, dict[str, Any]] | None:
        name = _NAME.match(body)
        if name is None or name[1] not in self._names:
            return None
        arguments: dict[str, Any] = {}
        at = name.end()
        while (found := _ARGUMENT.match(body, at)) is not None:
            key, value = found[1].strip(), found[2]
            arguments[key] = argument(value, key, self._schemas.get(name[1], {}))
            at = found.end()
        return None if body[at:].strip() else (name[1], arguments)


def _python_calls(text: str, *, lines: bool) -> list[tuple[str, dict[str, Any]]] | None:
    """The calls in a text, also those that are no Python because of their names: `get-weather(from="Rome")`."""
    calls = _strict_calls(text, lines=lines)
    return _loose_calls(text, lines=lines) if calls is None else calls


def _strict_calls(text: str, *, lines: bool) -> list[tuple[str, dict[str, Any]]] | None:
    try:
        if lines and not text.lstrip().startswith("["):
            written = [each for line in ast.parse(text.strip()).body for each in _expressions(line)]
            return [(_python_name(call), _keywords(call)) for call in written]
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        return [(_python_name(call), _keywords(call)) for call in tree.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _loose_calls(text: str, *, lines: bool) -> list[tuple[str, dict[str, Any]]] | None:
    """Calls of any names with arguments of any names, whose values are Python."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    elif not lines:
        return None
    calls: list[tuple[str, dict[str, Any]]] = []
    at = 0
    try:
        while (head := _CALL.match(text, at)) is not None:
            arguments, at = {}, head.end()
            while text[at : at + 1] != ")":
                key = _KEYWORD.match(text, at)
                if key is None:
                    return None
                end = _value_end(text, key.end())
                value = text[key.end() : end].strip()
                if not value or key[1] in arguments:
                    return None
                arguments[key[1]] = _literal(ast.parse(f"({value}\n)", mode="eval").body)
                following = _NEXT.match(text, end)
                assert following is not None
                at = following.end()
            json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
            calls.append((head[1], arguments))
            at += 1
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    rest = _REST.match(text, at)
    assert rest is not None
    return calls if calls and rest.end() == len(text) else None


def _value_end(text: str, at: int) -> int:
    """Where the value of an argument ends: at a comma or the bracket of the call."""
    nesting = 0
    while (found := _PARTS.search(text, at)) is not None:
        char, at = found[0], found.end()
        if char in "\"'":
            closing = re.compile(rf"(?:[^{char}\\]|\\.)*{char}", re.DOTALL).match(text, at)
            if closing is None:
                break
            at = closing.end()
        elif char in "[({":
            nesting += 1
        elif nesting and char != ",":
            nesting -= 1
        elif not nesting:
            return found.start()
    raise ValueError


def _expressions(statement: ast.stmt) -> list[ast.expr]:
    """What stands in a line, with commas between where there is more than one call."""
    if not isinstance(statement, ast.Expr):
        raise ValueError
    return statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]


def _python_name(call: ast.expr) -> str:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError
    name = ast.unparse(call.func)
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        raise ValueError
    return name


def _keywords(call: ast.expr) -> dict[str, Any]:
    assert isinstance(call, ast.Call)
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError
        found[keyword.arg] = _literal(keyword.value)
    json.dumps(found, allow_nan=False, ensure_ascii=False).encode()  # sets, bytes and the like are no arguments
    return found


def _literal(node: ast.expr) -> Any:
    """A literal, in which JSON's words stand for what they mean."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else ast.literal_eval(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError
        return {key: _literal(value) for key, value in zip(keys, node.values, strict=True)}
    return ast.literal_eval(node)
