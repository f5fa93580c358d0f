"""Scans the JSON of function calls incrementally: `{"name": ..., "arguments": {...}}`, one object or a list.

A state machine over characters: its events depend on the text alone, never on where it was split. Arguments are passed
on as written once the name is known; if they come first, they are buffered. Invalid text is an error, reported at
the first invalid character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from penstock.tools.events import CallArguments, CallBegin, CallEnd, Event

_SPACE = re.compile(r"[ \t\n\r]*")
_IN_STRING = re.compile(r'["\\]')
_OUT_OF_STRING = re.compile(r'["{}\[\]]')
_SCALAR = re.compile(r"[^,}\] \t\n\r]*")
_PAIRS = {"}": "{", "]": "["}
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")

_Step = Callable[[str, int], int]


class Malformed(Exception):
    """The text is not a call. `at`: the first invalid character."""

    def __init__(self, at: int) -> None:
        self.at = at


class CallScanner:
    """Scans one value: an object, or a list of objects. `done` once it is complete."""

    def __init__(self, names: Collection[str], first: int, emit: Callable[[Event], None]) -> None:
        """`names`: known functions. `first`: index of the next call. Events go to `emit`."""
        self.done = False
        self.index = first
        self.begun = False
        """Whether a reported call has not ended."""
        self._names = names
        self._emit = emit
        self._listed = False
        self._alone = False
        """Whether the value is the arguments, without an object around them."""
        self._step: _Step = self._value
        self._name: str | None = None
        self._key = ""
        self._waiting: list[str] = []
        """Arguments before the name."""
        self._has_arguments = self._argued = False
        self._string: list[str] = []
        self._escaped = False
        self._then: Callable[[str, int], None] = self._on_key
        self._nesting: list[str] = []
        self._quoted = False
        self._keep = False
        """Whether the nested value being scanned is the arguments."""

    def scan(self, text: str, at: int) -> int:
        """Scans from `text[at]`; returns where it stopped, at the end of the text or the value. Raises `Malformed`."""
        while at < len(text) and not self.done:
            at = self._step(text, at)
        return at

    def expect_arguments(self, name: str) -> None:
        """What follows is only the arguments of a call of `name`, an object."""
        self._name, self._key, self._alone = name, _ARGUMENTS[0], True
        self._step = self._member

    # --- the skeleton: each step reads from `at` and returns how far it came

    def _value(self, text: str, at: int) -> int:
        at, char = _skip(text, at)
        if char == "[":
            self._listed = True
            self._step = self._item
            return at + 1
        return self._open(char, at)

    def _item(self, text: str, at: int) -> int:
        at, char = _skip(text, at)
        return self._open(char, at)

    def _open(self, char: str, at: int) -> int:
        if not char:
            return at
        if char != "{":
            raise Malformed(at)
        self._name, self._has_arguments = None, False
        self._argued = False
        self._waiting.clear()
        self._step = self._first_key
        return at + 1

    def _first_key(self, text: str, at: int) -> int:
        at, char = _skip(text, at)
        if char == "}":
            return self._close(at)
        return self._quote(char, at, self._on_key)

    def _next_key(self, text: str, at: int) -> int:
        at, char = _skip(text, at)
        return self._quote(char, at, self._on_key)

    def _on_key(self, key: str, at: int) -> None:
        self._key = key
        self._step = self._colon

    def _colon(self, text: str, at: int) -> int:
        at, char = _skip(text, at)
        if not char:
            return at
        if char != ":":
            raise Malformed(at)
        self._step = self._member
        return at + 1

    def _member(self, text: str, at: int) -> int:
        """The value of a key."""
        at, char = _skip(text, at)
        if not char:
            return at
        if self._key in _NAMES and self._name is None:
            return self._quote(char, at, self._on_name)
        self._keep = self._key in _ARGUMENTS and not self._has_arguments
        if self._keep:
            if char not in '{"n':
                raise Malformed(at)
            self._has_arguments = True
            if self._name is not None and char == "{":
                self._begin()
        if char == '"':
            return self._quote(char, at, self._on_string)
        if char in "{[":
            self._step = self._nested
            return at
        self._string.clear()
        self._step = self._scalar
        return at

    def _after_member(self, text: str, at: int) -> int:
        at, char = _skip(text, at)
        if char == ",":
            self._step = self._next_key
            return at + 1
        if char == "}":
            return self._close(at)
        if char:
            raise Malformed(at)
        return at

    def _close(self, at: int) -> int:
        """The end of an object: a call, if it has a name."""
        if self._name is None:
            raise Malformed(at)
        if not self.begun:
            self._begin()
        if not self._argued:
            self._argue("{}")
        self._end()
        self.done = not self._listed
        self._step = self._after_item
        return at + 1

    def _after_item(self, text: str, at: int) -> int:
        at, char = _skip(text, at)
        if char == ",":
            self._step = self._item
            return at + 1
        if char == "]":
            self.done = True
            return at + 1
        if char:
            raise Malformed(at)
        return at

    # --- values

    def _quote(self, char: str, at: int, then: Callable[[str, int], None]) -> int:
        if not char:
            return at
        if char != '"':
            raise Malformed(at)
        self._string.clear()
        self._escaped = False
        self._then = then
        self._step = self._in_string
        return at + 1

    def _in_string(self, text: str, at: int) -> int:
        start = at
        if self._escaped:
            self._escaped = False
            at += 1
        while True:
            match = _IN_STRING.search(text, at)
            if match is None:
                self._string.append(text[start:])
                return len(text)
            if match[0] == "\\":
                at = match.end() + 1
                if at > len(text):
                    self._string.append(text[start:])
                    self._escaped = True
                    return len(text)
                continue
            self._string.append(text[start : match.start()])
            try:
                value = json.loads(f'"{"".join(self._string)}"', strict=False)
            except ValueError:
                raise Malformed(match.start()) from None
            self._then(value, match.start())
            return match.end()

    def _on_name(self, name: str, at: int) -> None:
        if name not in self._names:
            raise Malformed(at)
        self._name = name
        self._step = self._after_member
        if self._argued:
            self._begin()

    def _on_string(self, value: str, at: int) -> None:
        """Arguments written as a string hold their JSON inside it."""
        if self._keep and value:
            if not _is_text(value):
                raise Malformed(at)
            if self._name is not None:
                self._begin()
            self._argue(value)
        self._step = self._after_member

    def _scalar(self, text: str, at: int) -> int:
        match = _SCALAR.match(text, at)
        assert match is not None
        self._string.append(match[0])
        if match.end() < len(text):
            if self._keep and "".join(self._string) != "null":
                raise Malformed(match.end())
            self._step = self._after_member
        return match.end()

    def _nested(self, text: str, at: int) -> int:
        """An object or list inside the call, passed on or skipped."""
        start = at
        if self._escaped:
            self._escaped = False
            at += 1
        while at <= len(text):
            match = (_IN_STRING if self._quoted else _OUT_OF_STRING).search(text, at)
            if match is None:
                break
            char, at = match[0], match.end()
            if char == "\\":
                at += 1
            elif char == '"':
                self._quoted = not self._quoted
            elif char in "{[":
                self._nesting.append(char)
            else:
                if self._nesting.pop() != _PAIRS[char]:
                    self._pass(text[start : at - 1])
                    raise Malformed(at - 1)
                if not self._nesting:
                    self._pass(text[start:at])
                    self._step = self._after_member
                    return self._close(at - 1) if self._alone else at
        self._escaped = at > len(text)
        self._pass(text[start:])
        return len(text)

    # --- what is reported

    def _pass(self, text: str) -> None:
        if self._keep:
            self._argue(text)

    def _argue(self, text: str) -> None:
        if text:
            self._argued = True
            if self.begun:
                self._emit(CallArguments(self.index, text))
            else:
                self._waiting.append(text)

    def _begin(self) -> None:
        assert self._name is not None
        self.begun = True
        self._emit(CallBegin(self.index, self._name))
        if self._waiting:
            self._emit(CallArguments(self.index, "".join(self._waiting)))

    def _end(self) -> None:
        self.begun = False
        self._emit(CallEnd(self.index))
        self.index += 1


def _skip(text: str, at: int) -> tuple[int, str]:
    """Skips white space; returns the position and the character there (empty at the end of the text)."""
    match = _SPACE.match(text, at)
    assert match is not None
    at = match.end()
    return at, text[at] if at < len(text) else ""


def overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


def _is_text(value: str) -> bool:
    """Whether a string can be encoded as UTF-8: escapes may leave half a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in value)


class StepScanner:
    """A scanner of calls that are not JSON, step by step; the arguments, or whole calls, may be JSON all the same."""

    done: bool
    _index: int
    _inner: CallScanner | None
    """Reads the JSON, once there is any."""
    _step: Callable[[str, int], int]
    """Takes the text and where to begin; returns how far it came, and may choose another step."""

    @property
    def index(self) -> int:
        return self._index if self._inner is None else self._inner.index

    @property
    def begun(self) -> bool:
        return self._inner is not None and self._inner.begun

    def scan(self, text: str, at: int) -> int:
        """Scans from `text[at]`; returns how far it came. Raises `Malformed`."""
        while at < len(text) and not self.done:
            before, step = at, self._step
            at = self._step(text, at)
            if at == before and self._step == step:
                break
        return at
