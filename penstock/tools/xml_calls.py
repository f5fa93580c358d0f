"""Scans function calls in XML: Qwen3-Coder and Qwen3.5, Seed-OSS, MiniMax M2, DeepSeek V3.2 (DSML).

    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>

Values are plain text, without the one newline at either side, and typed by the function's schema; in DSML the tag says
whether a value is text (`string="true"`) or JSON. A value ends with its tag only where another tag of the call follows,
so it may contain any of them. A call is reported when it is complete. All its arguments may also be one JSON object in
place of their tags, which is passed on as it arrives.
`scan` may leave text unread that more text decides about; as for `CallScanner`, events depend on the text alone, never
on where it was split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from penstock.tools.argument_values import Schemas, argument, stated_argument
from penstock.tools.events import CallArguments, CallBegin, CallEnd, Event
from penstock.tools.scanner import CallScanner, Malformed, StepScanner, overlap

_LONGEST_NAME = 256
_SPACES = 64
"""White space between the end of a value and what follows it."""
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Tags:
    """How calls and their arguments begin, before the name, and end."""

    call: str
    call_end: str
    value: str
    value_end: str
    stated: bool = False
    """Whether the tag of a value says behind the name if the value is text."""
    inner: tuple[str, ...] = ()
    """Texts inside the tags that may be control tokens."""


FUNCTION_TAGS = Tags("<function=", "</function>", "<parameter=", "</parameter>")
INVOKE_TAGS = Tags("<invoke name=", "</invoke>", "<parameter name=", "</parameter>")
DSML_TAGS = Tags(
    "<｜DSML｜invoke name=",
    "</｜DSML｜invoke>",
    "<｜DSML｜parameter name=",
    "</｜DSML｜parameter>",
    stated=True,
    inner=("｜DSML｜",),
)
_STATED = re.compile(r"(.*?)\s+string=[\"']?(true|false)[\"']?\s*", re.DOTALL)


class XmlScanner(StepScanner):
    """Scans the calls between opener and closer; or JSON in their place."""

    def __init__(
        self,
        names: Collection[str],
        first: int,
        emit: Callable[[Event], None],
        tags: Tags,
        closer: str,
        schemas: Schemas,
    ) -> None:
        self.done = False
        self._names = names
        self._emit = emit
        self._tags = tags
        self._closer = closer
        self._schemas = schemas
        self._index = first
        self._called = False
        self._inner: CallScanner | None = None
        self._step: Callable[[str, int], int] = self._begin
        self._name = self._key = ""
        self._as_text: bool | None = None
        """Whether the value is text, where its tag says so."""
        self._value: list[str] = []
        self._arguments: dict[str, Any] = {}

    def _begin(self, text: str, at: int) -> int:
        """Before a call."""
        at = _skipped(text, at)
        if at == len(text):
            return at
        if not self._called and text[at] in "{[":
            self._inner = CallScanner(self._names, self._index, self._emit)
            self._step = self._in_json
            return at
        found = self._named(text, at, self._tags.call)
        if found is None:
            if self._called:
                rest = text[at : at + len(self._closer)]
                self.done = rest == self._closer or not self._closer.startswith(rest)
                return at
            raise Malformed(at)
        name, end = found
        if not end:
            return at
        name = _bare(name)
        if name not in self._names:
            raise Malformed(end)
        self._name, self._arguments = name, {}
        self._step = self._within
        return end

    def _in_json(self, text: str, at: int) -> int:
        assert self._inner is not None
        at = self._inner.scan(text, at)
        self.done = self._inner.done
        return at

    def _within(self, text: str, at: int) -> int:
        """Inside a call, between its arguments."""
        at = _skipped(text, at)
        ended = text.startswith(self._tags.call_end, at)
        if ended or text.startswith(self._closer, at):
            self._report()
            self._step = self._begin
            return at + len(self._tags.call_end) if ended else at
        if not self._arguments and text[at : at + 1] == "{":
            self._inner = CallScanner(self._names, self._index, self._emit)
            self._inner.expect_arguments(self._name)
            self._step = self._in_body
            return at
        found = self._named(text, at, self._tags.value)
        if found is None:
            if any(mark.startswith(text[at:]) for mark in (self._tags.call_end, self._closer)):
                return at
            raise Malformed(at)
        key, end = found
        if not end:
            return at
        self._as_text = None
        if self._tags.stated and (stated := _STATED.fullmatch(key)) is not None:
            key, self._as_text = stated[1], stated[2] == "true"
        self._key, self._value = _bare(key), []
        self._step = self._in_value
        return end

    def _in_body(self, text: str, at: int) -> int:
        """In the JSON object that stands in place of tags."""
        assert self._inner is not None
        at = self._inner.scan(text, at)
        if self._inner.done:
            self._index, self._inner = self._inner.index, None
            self._called = True
            self._step = self._after_body
        return at

    def _after_body(self, text: str, at: int) -> int:
        at = _skipped(text, at)
        for mark in (self._tags.call_end, self._closer):
            if text.startswith(mark, at):
                self._step = self._begin
                return at + len(mark) if mark == self._tags.call_end else at
            if mark.startswith(text[at:]):
                return at
        raise Malformed(at)

    def _in_value(self, text: str, at: int) -> int:
        mark = self._tags.value_end
        found = text.find(mark, at)
        if found < 0:
            end = len(text) - overlap(text[at:], mark)
            self._value.append(text[at:end])
            return end
        self._value.append(text[at:found])
        rest = _skipped(text, found + len(mark))
        following = (self._tags.value, self._tags.call_end, self._closer)
        if rest - found - len(mark) <= _SPACES:
            if any(text.startswith(tag, rest) for tag in following):
                self._arguments[self._key] = self._typed("".join(self._value))
                self._step = self._within
                return rest
            if any(tag.startswith(text[rest:]) for tag in following):
                return found
        self._value.append(mark)
        return found + len(mark)

    def _typed(self, value: str) -> Any:
        schema = self._schemas.get(self._name, {})
        if self._as_text is not None:
            return stated_argument(value, self._key, schema, as_text=self._as_text)
        return argument(value.removeprefix("\n").removesuffix("\n"), self._key, schema)

    def _named(self, text: str, at: int, mark: str) -> tuple[str, int] | None:
        """What stands in a tag and where that ends, 0 where it has not; None where there is no such tag."""
        if not text.startswith(mark, at):
            return ("", 0) if mark.startswith(text[at:]) else None
        begin = at + len(mark)
        end = text.find(">", begin, begin + _LONGEST_NAME)
        name = text[begin : end if end >= 0 else begin + _LONGEST_NAME]
        if "\n" in name or "<" in name or (end < 0 and len(name) == _LONGEST_NAME):
            return None
        return name, end + 1

    def _report(self) -> None:
        self._emit(CallBegin(self._index, self._name))
        self._emit(CallArguments(self._index, json.dumps(self._arguments, ensure_ascii=False)))
        self._emit(CallEnd(self._index))
        self._index += 1
        self._called = True


def _bare(name: str) -> str:
    """A name without its quotes."""
    return name.strip().strip("\"'")


def _skipped(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
