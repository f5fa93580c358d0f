"""Scans function calls whose arguments are keys and values with a token for quotes: Gemma 4.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,units:{metric:true}}<tool_call|>

Nothing is escaped inside of quotes. A call is reported when it is complete, its arguments as JSON; JSON is read in its
place. As for `CallScanner`, events depend on the text alone, never on where it was split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from penstock.tools.argument_values import Schemas, argument
from penstock.tools.scanner import Malformed
from penstock.tools.whole_calls import ClosedScanner

QUOTE = '<|"|>'
_HEAD = re.compile(r"\s*(?:call\s*:\s*)?([^\s{}<>:|]{1,128})\s*\{")
_BEGUN = re.compile(r"\s*(?:c(?:a(?:l(?:l\s*(?::\s*)?)?)?)?)?[^\s{}<>:|]{0,128}\s*")
_KEY = re.compile(r"\s*([^\s{}\[\]<>,:|\"]{1,256})\s*:")
_PLAIN = re.compile(r"[^{}\[\],<]*")
_SPACE = re.compile(r"\s*")
_DEPTH = 32


class _NoCall(Exception):
    """The text is no call."""


class QuotedScanner(ClosedScanner):
    """A name, then keys and values in braces."""

    def _is_begun(self, shift: int) -> bool:
        if _HEAD.match(self._text) is not None:
            return True
        begun = _BEGUN.match(self._text)
        assert begun is not None
        if begun.end() < len(self._text):
            raise Malformed(begun.end() + shift)
        return False

    def _is_inside(self, body: str) -> bool:
        return body.count(QUOTE) % 2 == 1

    def _read(self, body: str) -> tuple[str, dict[str, Any]] | None:
        try:
            return _Reader(body, self._names, self._schemas).call()
        except _NoCall:
            return None


class _Reader:
    """Reads the text of one call."""

    def __init__(self, text: str, names: Collection[str], schemas: Schemas) -> None:
        self._text = text
        self._names = names
        self._schemas = schemas
        self._at = 0

    def call(self) -> tuple[str, dict[str, Any]]:
        head = _HEAD.match(self._text)
        if head is None or head[1] not in self._names:
            raise _NoCall
        self._at = head.end()
        found = self._object(self._schemas.get(head[1], {}), 0)
        if self._text[self._at :].strip():
            raise _NoCall
        return head[1], found

    def _object(self, schema: Mapping[str, Any] | None, depth: int) -> dict[str, Any]:
        """Behind the brace. `schema`: of the function's arguments, where these are they."""
        found: dict[str, Any] = {}
        while not self._take("}"):
            key = self._key()
            found[key] = self._value(key, schema, depth)
            if not self._take(",") and not self._text.startswith("}", self._at):
                raise _NoCall
        return found

    def _key(self) -> str:
        if self._take(QUOTE):
            key = self._quoted()
            if not self._take(":"):
                raise _NoCall
            return key
        found = _KEY.match(self._text, self._at)
        if found is None:
            raise _NoCall
        self._at = found.end()
        return found[1]

    def _value(self, key: str, schema: Mapping[str, Any] | None, depth: int) -> Any:
        if depth > _DEPTH:
            raise _NoCall
        if self._take(QUOTE):
            return self._quoted()
        if self._take("{"):
            return self._object(None, depth + 1)
        if self._take("["):
            listed: list[Any] = []
            while not self._take("]"):
                listed.append(self._value(key, None, depth + 1))
                if not self._take(",") and not self._text.startswith("]", self._at):
                    raise _NoCall
            return listed
        found = _PLAIN.match(self._text, self._at)
        assert found is not None
        self._at, written = found.end(), found[0].strip()
        if not written:
            raise _NoCall
        if schema is not None:
            return argument(written, key, schema)
        try:
            return json.loads(written)
        except (ValueError, RecursionError):
            return written

    def _quoted(self) -> str:
        end = self._text.find(QUOTE, self._at)
        if end < 0:
            raise _NoCall
        begin, self._at = self._at, end + len(QUOTE)
        return self._text[begin:end]

    def _take(self, mark: str) -> bool:
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        if not self._text.startswith(mark, space.end()):
            return False
        self._at = space.end() + len(mark)
        space = _SPACE.match(self._text, self._at)
        if mark != QUOTE and space is not None:
            self._at = space.end()
        return True


def quoted_call(name: str, arguments: Any) -> str:
    """A call as the model writes it."""
    return f"call:{name}{_written(arguments if isinstance(arguments, dict) else {})}"


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_written(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return json.dumps(value)
