"""Scans function calls whose parts stand between marks: DeepSeek, Kimi K2 and Solar Open.

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜>

    <|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>

One scanner reads all calls of a section. Arguments are passed on as they arrive. `scan` may leave text unread that more
text decides about; as for `CallScanner`, events depend on the text alone, never on where it was split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from penstock.tools.events import CallArguments, CallBegin, CallEnd, Event
from penstock.tools.scanner import CallScanner, Malformed, StepScanner

_LONGEST_HEAD = 400
"""Characters of a call before its arguments."""
_SPACE = re.compile(r"\s*")
_TAIL_SPACE = re.compile(r"[\s`]*")


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The text around a name and its arguments."""

    begin: str
    end: str
    head: re.Pattern[str]
    """What may stand before the arguments, from `begin` on; the first group is the name."""
    before_name: str
    after_name: str
    after_arguments: str
    """What is written there."""
    inner: tuple[str, ...] = ()
    """Further marks in the head."""
    id_end: str = ""
    """What stands between an id that the model makes up and the name."""
    numbered: bool = False
    """Whether the name is followed by the number of the call, which together are its id in templates."""


_NAME = r"([^\s<>{}`:｜|]{1,128})"
_DEEPSEEK = re.compile(
    rf"<｜tool▁call▁begin｜>\s*(?:function\s*<｜tool▁sep｜>)?\s*{_NAME}\s*(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?\s*"
)
_KIMI = re.compile(rf"<\|tool_call_begin\|>\s*(?:functions\.)?{_NAME}(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*")
DEEPSEEK_V3 = CallMarks(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    _DEEPSEEK,
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    ("<｜tool▁sep｜>",),
)
DEEPSEEK_V31 = CallMarks(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    _DEEPSEEK,
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    ("<｜tool▁sep｜>",),
)
KIMI_K2 = CallMarks(
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    _KIMI,
    "<|tool_call_begin|>functions.",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    ("<|tool_call_argument_begin|>",),
    numbered=True,
)


SOLAR_OPEN = CallMarks(
    "<|tool_call:begin|>",
    "<|tool_call:end|>",
    re.compile(rf"<\|tool_call:begin\|>[^<>]{{0,64}}<\|tool_call:name\|>\s*{_NAME}\s*<\|tool_call:args\|>\s*"),
    "<|tool_call:begin|>",
    "<|tool_call:args|>",
    "<|tool_call:end|>",
    ("<|tool_call:name|>", "<|tool_call:args|>"),
    id_end="<|tool_call:name|>",
)


class MarkedScanner(StepScanner):
    """Scans the calls of a section up to its closer; or JSON in their place."""

    def __init__(
        self, names: Collection[str], first: int, emit: Callable[[Event], None], marks: CallMarks, closer: str
    ) -> None:
        self.done = False
        self._names = names
        self._emit = emit
        self._marks = marks
        self._closer = closer
        self._stops = re.compile("|".join(map(re.escape, ("{", marks.end, closer))))
        self._index = first
        self._first = True
        self._alone = False
        """Whether JSON stands in place of marked calls."""
        self._inner: CallScanner | None = None
        self._step: Callable[[str, int], int] = self._head

    def _head(self, text: str, at: int) -> int:
        """From the beginning of a call to its arguments."""
        at = _end(_SPACE, text, at)
        if at == len(text):
            return at
        marks = self._marks
        if self._first and text[at] in "{[":
            self._alone = True
            self._inner = CallScanner(self._names, self._index, self._emit)
            self._step = self._json
            return at
        if not text.startswith(marks.begin, at):
            if marks.begin.startswith(text[at:]):
                return at
            raise Malformed(at)
        found = self._stops.search(text, at, at + _LONGEST_HEAD)
        if found is None:
            if len(text) - at >= _LONGEST_HEAD:
                raise Malformed(at + _LONGEST_HEAD)
            return at
        head = marks.head.fullmatch(text, at, found.start())
        if head is None or head[1] not in self._names or found[0] == self._closer:
            raise Malformed(found.start())
        self._first = False
        if found[0] == "{":
            self._inner = CallScanner(self._names, self._index, self._emit)
            self._inner.expect_arguments(head[1])
            self._step = self._json
        else:  # a call without arguments
            self._emit(CallBegin(self._index, head[1]))
            self._emit(CallArguments(self._index, "{}"))
            self._emit(CallEnd(self._index))
            self._index += 1
            self._step = self._tail
        return found.start()

    def _json(self, text: str, at: int) -> int:
        assert self._inner is not None
        at = self._inner.scan(text, at)
        if self._inner.done:
            self._index, self._inner = self._inner.index, None
            self.done = self._alone
            self._step = self._tail
        return at

    def _tail(self, text: str, at: int) -> int:
        """After the arguments."""
        at = _end(_TAIL_SPACE, text, at)
        match self._mark(text, at, self._marks.end, self._marks.begin, self._closer):
            case None:
                raise Malformed(at)
            case "":
                return at
            case self._marks.end:
                self._step = self._next
                return at + len(self._marks.end)
        self._step = self._next
        return at

    def _next(self, text: str, at: int) -> int:
        """After a call: another one, or the end of the section."""
        at = _end(_SPACE, text, at)
        match self._mark(text, at, self._marks.begin, self._closer):
            case "":
                return at
            case self._marks.begin:
                self._step = self._head
            case _:
                self.done = True
        return at

    def _mark(self, text: str, at: int, *marks: str) -> str | None:
        """The mark at a place; empty where one may be arriving, None where there is none."""
        for mark in marks:
            if text.startswith(mark, at):
                return mark
        return "" if any(mark.startswith(text[at : at + len(mark)]) for mark in marks) else None


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None
    return found.end()
