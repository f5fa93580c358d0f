"""Parses a model's message into text and function calls, incrementally.

Invariants: the events of any sequence of pushes, then `flush`, add up to the same message, however the text was split;
and nothing is reported that later proves wrong. So text that may be the beginning of a call is held back, and released
as text if it is not. White space between text and calls belongs to neither. Once a call has been reported, what
follows it in the same brackets is either another call or dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from types import MappingProxyType

from penstock.tools.argument_values import Schemas
from penstock.tools.events import CallEnd, Event, Text
from penstock.tools.formats import ToolFormat
from penstock.tools.marked_calls import MarkedScanner
from penstock.tools.quoted_calls import QuotedScanner
from penstock.tools.scanner import CallScanner, Malformed, overlap
from penstock.tools.written_calls import PythonScanner, TagScanner
from penstock.tools.xml_calls import XmlScanner

_PIECE = 4096
"""Characters parsed at a time, so that the cost stays linear for long messages."""
_NAMED = re.compile(r"([\w.:-]{1,128})\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*(?=\{)")
_MAY_BE_NAMED = re.compile(r"[\w.:-]+\s*(?:\[[\w\]]*\s*(?:\[[A-Z]*\]?\s*)?)?")
_LONGEST_NAME = 300
"""Characters of a name, an id and what stands around them."""
_NAME_FIRST = re.compile(r"([\w.:-]{1,128})[ \t]{0,16}\n\s{0,32}(?=\{)")
_MAY_BE_FIRST = re.compile(r"([\w.:-]{0,128})(?:[ \t]{1,16}|[ \t]{0,16}\n\s{0,32})?")
_SEPARATORS = ";,"
"""Between objects that are not in a list."""


class ToolCallParser:
    """Parses one message. Streams push text as it arrives; a whole message is a single push."""

    __slots__ = (
        *("_buffer", "_events", "_form", "_names", "_openers", "_raw", "_scanner", "_schemas", "_skipped", "_state"),
        "calls",
    )

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        schemas: Schemas = MappingProxyType({}),
        *,
        openers: tuple[str, ...] | None = None,
    ) -> None:
        """`names`: the offered functions; a call of any other is text. `schemas`: of their arguments. `openers`: what
        calls inside the text begin with; None: whatever the model may write."""
        self.calls = 0
        """Calls reported so far."""
        self._form = form
        self._names = names
        self._schemas = schemas
        self._skipped = (form.opener, *form.also) if openers is None else openers
        self._openers = (*self._skipped, *(form.without_opener if openers is None else ()))
        self._buffer = ""
        """Text that has not been parsed yet."""
        self._raw: list[str] | None = None
        """The parsed part of a value without a call so far; becomes text if it contains none."""
        self._scanner: CallScanner | PythonScanner | TagScanner | QuotedScanner | MarkedScanner | XmlScanner | None = (
            None
        )
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._start if form.bare else self._text

    def push(self, text: str) -> list[Event]:
        """The events that are certain after `text`."""
        for at in range(0, len(text), _PIECE):
            self._buffer += text[at : at + _PIECE]
            while self._buffer and self._state():
                pass
        return self._take()

    def flush(self) -> list[Event]:
        """The remaining events, when no more text follows."""
        rest, self._buffer = self._buffer, ""
        if self._scanner is not None:
            if self._scanner.begun:
                self._events.append(CallEnd(self._scanner.index))
            if self._raw is not None:
                self._say("".join(self._raw) + rest)
        elif self._state == self._after:
            if not self._form.closer.startswith(rest.strip()):
                self._say(rest)
        elif self._state != self._drop and not (self.calls and rest.isspace()):
            self._say(rest)
        return self._take()

    @property
    def inside_call(self) -> bool:
        """Whether the text so far ends inside a call, or what may be one."""
        return self._scanner is not None

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _report(self, event: Event) -> None:
        self._events.append(event)

    def _say(self, text: str) -> None:
        if text:
            self._events.append(Text(text))

    # --- states: each reads from the buffer, and returns whether there is more to do with what is left

    def _start(self) -> bool:
        """The beginning of a message, which may be a call without an opener."""
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest[0] == "{" or (rest[0] == "[" and (self._form.syntax == "python" or self._form.listed)):
            self._enter(len(self._buffer) - len(rest), rest[0])
        elif self._form.name_first and (length := self._name_first(rest)) >= 0:
            if not length:
                return False
            self._enter_named(rest, length)
        else:
            self._state = self._text
        return True

    def _enter_named(self, rest: str, length: int) -> None:
        """A call begins with a name, in the first `length` characters of `rest`, which ends the buffer."""
        self._enter(len(self._buffer) - len(rest) + length)
        assert isinstance(self._scanner, CallScanner)
        self._scanner.expect_arguments(rest[:length].rstrip())

    def _name_first(self, rest: str) -> int:
        """The length of an offered function's name and the line break behind it, before an object; 0 where that may
        still come, -1 where there is none."""
        found = _NAME_FIRST.match(rest)
        if found is not None:
            return found.end() if found[1] in self._names else -1
        begun = _MAY_BE_FIRST.fullmatch(rest)
        if begun is None:
            return -1
        name = begun[1]
        whole = name in self._names
        return 0 if whole or (name == rest and any(each.startswith(name) for each in self._names)) else -1

    def _text(self) -> bool:
        buffer, marks = self._buffer, self._openers
        found = min((at for mark in marks if (at := buffer.find(mark)) >= 0), default=-1)
        end = len(buffer) - max((overlap(buffer, mark) for mark in marks), default=0) if found < 0 else found
        said = len(buffer[:end].rstrip())
        self._say(buffer[:said])
        self._buffer = buffer[said:]
        if found < 0:
            return False
        length = max((len(opener) for opener in self._skipped if buffer.startswith(opener, end)), default=0)
        if self._form.name_first and (known := self._name_first(rest := buffer[end + length :].lstrip())) >= 0:
            if known:
                self._enter_named(rest, known)
            return known > 0
        first = _first(buffer[end + length :])
        if self._form.syntax == "python" and not first:
            return False  # what follows says which kind of call it is
        self._enter(end - said + length, first)
        return True

    def _enter(self, length: int, first: str = "") -> None:
        """A call, whose first character is `first`, begins after `length` characters of the buffer."""
        self._raw, self._buffer = [self._buffer[:length]], self._buffer[length:]
        form, names, syntax = self._form, self._names, self._form.syntax
        if syntax == "python" and first != "{":
            closer = "" if form.bare or form.listed else form.closer
            self._scanner = PythonScanner(names, self.calls, self._report, closer)
        elif syntax == "tags":
            self._scanner = TagScanner(names, self.calls, self._report, form.closer, self._schemas)
        elif syntax == "quoted":
            self._scanner = QuotedScanner(names, self.calls, self._report, form.closer, self._schemas)
        elif form.marks is not None:
            self._scanner = MarkedScanner(names, self.calls, self._report, form.marks, form.closer)
        elif form.tags is not None:
            self._scanner = XmlScanner(names, self.calls, self._report, form.tags, form.closer, self._schemas)
        else:
            self._scanner = CallScanner(names, self.calls, self._report)
        self._state = self._named if form.named else self._call

    def _named(self) -> bool:
        """After the opener of a format in which the name may stand before the arguments: `name[ARGS]{...}`."""
        assert isinstance(self._scanner, CallScanner) and self._raw is not None
        rest = self._buffer.lstrip()
        if not rest:
            return False
        found = _NAMED.match(rest)
        if found is not None and found[1] in self._names:
            self._raw.append(self._buffer[: len(self._buffer) - len(rest) + found.end()])
            self._buffer = rest[found.end() :]
            self._scanner.expect_arguments(found[1])
        elif found is None and len(rest) < _LONGEST_NAME and _MAY_BE_NAMED.fullmatch(rest):
            return False
        self._state = self._call
        return True

    def _call(self) -> bool:
        scanner = self._scanner
        assert scanner is not None
        wrong = False
        try:
            at = scanner.scan(self._buffer, 0)
        except Malformed as malformed:
            at, wrong = malformed.at, True
            if not at and self._raw == [""]:
                at = 1  # no call begins here, whatever it looks like
        reported = scanner.index + scanner.begun
        if reported > self.calls:
            self._raw = None
        elif self._raw is not None:
            self._raw.append(self._buffer[:at])
        self.calls = reported
        self._buffer = self._buffer[at:]
        if wrong:
            if scanner.begun:
                self._events.append(CallEnd(scanner.index))
            self._state = self._drop if self._raw is None else self._text
            self._say("".join(self._raw or ()))
            self._raw, self._scanner = None, None
        elif scanner.done:
            self._raw, self._scanner = None, None
            self._state = self._after
        return at > 0 or wrong or scanner.done

    def _after(self) -> bool:
        """After a complete value: the closer, or another value."""
        rest, closer = self._buffer.lstrip(), self._form.closer
        if not rest or closer.startswith(rest):
            return False
        if closer and rest.startswith(closer):
            self._buffer = rest[len(closer) :]
            self._state = self._text
            return True
        if self._form.name_first and rest[0] not in _SEPARATORS:
            opener = self._form.opener
            if opener.startswith(rest) and rest != opener:
                return False
            self._buffer = self._buffer if not rest.startswith(opener) else rest[len(opener) :]
            self._state = self._start
            return True
        following = rest[1:].lstrip() if rest[0] in _SEPARATORS else rest
        if not following:
            return False
        if following[0] == "{":
            self._enter(len(self._buffer) - len(following), "{")
        else:
            self._state = self._text
        return True

    def _drop(self) -> bool:
        """Skips text after a malformed call, up to the closer."""
        closer = self._form.closer
        found = self._buffer.find(closer) if closer else -1
        if found < 0:
            self._buffer = self._buffer[len(self._buffer) - overlap(self._buffer, closer) :]
            return False
        self._buffer = self._buffer[found + len(closer) :]
        self._state = self._text
        return True


def _first(text: str) -> str:
    """The first character of a call, or of what a list of calls has in it; empty where it is still to come."""
    rest = text.lstrip()
    return (rest[1:].lstrip() if rest.startswith("[") else rest)[:1]
