"""What scanners of calls that are reported whole share: the text so far, where a call ends, and how it is reported."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

from penstock.tools.argument_values import Schemas
from penstock.tools.events import CallArguments, CallBegin, CallEnd, Event
from penstock.tools.scanner import CallScanner, Malformed


class WholeScanner:
    """The text so far, and how calls are reported."""

    def __init__(self, names: Collection[str], first: int, emit: Callable[[Event], None]) -> None:
        self.done = False
        self.index = first
        self.begun = False
        """Never: calls are reported whole."""
        self._names = names
        self._emit = emit
        self._text = ""

    def _call(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._emit(CallBegin(self.index, name))
        self._emit(CallArguments(self.index, json.dumps(arguments, ensure_ascii=False)))
        self._emit(CallEnd(self.index))
        self.index += 1


class ClosedScanner(WholeScanner, ABC):
    """One call up to the closer, which is read too; or JSON in its place."""

    def __init__(
        self,
        names: Collection[str],
        first: int,
        emit: Callable[[Event], None],
        closer: str,
        schemas: Schemas,
    ) -> None:
        super().__init__(names, first, emit)
        self._closer = closer
        self._schemas = schemas
        self._inner: CallScanner | None = None

    def scan(self, text: str, at: int) -> int:
        if self._inner is None and not self._text.strip() and text[at:].lstrip()[:1] in ("{", "["):
            self._inner = CallScanner(self._names, self.index, self._emit)
        if self._inner is not None:
            return self._scan_json(self._inner, text, at)
        known = len(self._text)
        self._text += text[at:]
        if not self._is_begun(at - known):
            return len(text)
        begin = max(0, known - len(self._closer))
        while (found := self._text.find(self._closer, begin)) >= 0:
            begin = found + len(self._closer)
            body = self._text[:found]
            if self._is_inside(body):
                continue  # the closer is part of a value
            stop = begin - known + at
            call = self._read(body)
            if call is None:
                raise Malformed(stop)
            self._call(*call)
            self.done = True
            return stop
        return len(text)

    def _scan_json(self, inner: CallScanner, text: str, at: int) -> int:
        try:
            return inner.scan(text, at)
        finally:
            self.done, self.index, self.begun = inner.done, inner.index, inner.begun

    def _is_begun(self, shift: int) -> bool:
        """Whether the text so far has the beginning of a call. Malformed where it cannot become one; `shift`: from
        places in it to those in the text that is being scanned."""
        return True

    @abstractmethod
    def _is_inside(self, body: str) -> bool:
        """Whether what follows `body` is part of a value."""

    @abstractmethod
    def _read(self, body: str) -> tuple[str, dict[str, Any]] | None:
        """The function's name and its arguments; None where the text is no call."""
