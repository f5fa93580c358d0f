"""Finds stop strings in streamed text.

The match that is complete first ends the text, so the result does not depend on how the text was split.
Text that may be the beginning of a stop string is held back until it is known not to be.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Searches one stream of text for several stop strings."""

    __slots__ = ("_held", "_include", "_matched", "_stops")

    def __init__(self, stops: Iterable[str], *, include: bool = False) -> None:
        """`include`: the match itself is shown too."""
        self._include = include
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown, and the matched stop string, if any. After a match nothing more is shown."""
        if self._matched is not None:
            return "", self._matched
        if not self._stops:
            return text, None
        text = self._held + text
        match = self._first_complete(text)
        if match is not None:
            start, self._matched = match
            self._held = ""
            return text[: start + len(self._matched) if self._include else start], self._matched
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """The text that was held back, when no more follows."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, text: str) -> tuple[int, str] | None:
        """Start of the match that ends first; of several that end together, the longest."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                if best is None or candidate < best:
                    best = candidate
        return (best[1], best[2]) if best else None

    def _possible_start(self, text: str) -> int:
        """The first position from which the rest of the text is the beginning of a stop string."""
        first = len(text)
        for stop in self._stops:
            position = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= position < first:
                if stop.startswith(text[position:]):
                    first = position
                    break
                position = text.find(stop[0], position + 1)
        return first
