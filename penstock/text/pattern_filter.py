"""Patterns applied to text that arrives in pieces: matches are replaced, or end the text, before any part is shown.

Whether a match begins at a position is decided by the characters from there on, at most `reach` of them: the longest
match there can be, or `LONGEST` for patterns without a longest one. Text is handed out as soon as no match can begin in
it any more, which the `regex` module tells (partial matching); so the result never depends on where the text was cut.
A pattern that takes too long is a match: the text is refused rather than shown unchecked.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    import regex

LONGEST = 256
"""Characters of a match that has no longest length; also the most text that is ever held back."""
LONGEST_PATTERN = 1000
LOOK_BEHIND = 64
"""Characters before a position that assertions can see."""
TIMEOUT_S = 0.1
WHOLE_TIMEOUT_S = 1.0
_AFTER = 2
"""Characters behind a match that decide about `\\b` and `$`."""


class TooSlow(Exception):
    """The pattern did not come to an end in time."""


class TextPattern:
    """A compiled pattern and how far it can see."""

    __slots__ = ("compiled", "reach")

    def __init__(self, source: str, *, longest: int | None = None) -> None:
        """`longest`: of a match, when it is known better than from the pattern."""
        self.compiled: regex.Pattern[str] = _compile(source)
        bound = _longest(source) if longest is None else longest
        self.reach = LONGEST if bound is None else min(bound + _AFTER, LONGEST)

    @classmethod
    def of_words(cls, words: tuple[str, ...]) -> TextPattern:
        """Any of the words, whole, in upper or lower case."""
        ordered = sorted(words, key=len, reverse=True)
        choice = "|".join(re.escape(word) for word in ordered)
        return cls(rf"(?i)(?<!\w)(?:{choice})(?!\w)", longest=len(ordered[0]))

    def found(self, text: str) -> bool:
        """Does whole text hold a match?"""
        try:
            return self.compiled.search(text, timeout=WHOLE_TIMEOUT_S, concurrent=True) is not None
        except TimeoutError:
            raise TooSlow from None

    def replaced(self, text: str, replacement: str) -> str:
        try:
            return str(self.compiled.sub(lambda _: replacement, text, timeout=WHOLE_TIMEOUT_S, concurrent=True))
        except TimeoutError:
            raise TooSlow from None


class StreamFilter:
    """One pattern over one stream of text."""

    __slots__ = ("_buffer", "_pattern", "_reach", "_replacement", "_shown", "hits")

    def __init__(self, pattern: TextPattern, replacement: str | None) -> None:
        """`replacement`: None ends the text where a match begins."""
        self._pattern = pattern.compiled
        self._reach = pattern.reach
        self._replacement = replacement
        self._buffer = ""
        self._shown = 0
        """How much of the buffer was handed out and is kept for assertions only."""
        self.hits = 0

    def push(self, text: str, *, final: bool = False) -> tuple[str, bool]:
        """Text that may be shown, and whether it ends here. `final`: no more follows, nothing is held back."""
        self._buffer += text
        shown: list[str] = []
        try:
            ended = self._advance(shown, final)
        except TimeoutError:
            self.hits += 1
            ended = True
        spare = self._shown - LOOK_BEHIND
        if spare > 0:
            self._buffer = self._buffer[spare:]
            self._shown = LOOK_BEHIND
        return "".join(shown), ended

    def _advance(self, shown: list[str], final: bool) -> bool:
        buffer, end = self._buffer, len(self._buffer)
        while self._shown < end:
            start = self._next(buffer, self._shown, end, final)
            shown.append(buffer[self._shown : start])
            self._shown = start
            if start == end or not (final or end >= start + self._reach):
                return False
            match = self._pattern.match(buffer, start, min(end, start + self._reach), timeout=TIMEOUT_S)
            if match is None or match.end() == start:
                shown.append(buffer[start])
                self._shown += 1
                continue
            self.hits += 1
            if self._replacement is None:
                return True
            shown.append(self._replacement)
            self._shown = match.end()
        return False

    def _next(self, buffer: str, start: int, end: int, final: bool) -> int:
        """The first position at which there is a match, or could be one when more text comes; `end` when nowhere."""
        last = end
        if end - start <= self._reach:  # all of it is in sight: one search tells whether there is anything at all
            match = self._pattern.search(buffer, start, end, partial=not final, timeout=TIMEOUT_S)
            if match is None:
                return end
            last = int(match.start())
            if final:
                return last
            # A whole match there may hide the beginning of one before it.
        for position in range(start, last):
            bound = position + self._reach
            partial = not final and bound > end
            if self._pattern.match(buffer, position, min(bound, end), partial=partial, timeout=TIMEOUT_S) is not None:
                return position
        return last


@functools.cache
def _compile(source: str) -> Any:
    try:
        import regex
    except ImportError as error:
        raise ConfigError("guardrails need a regular expression engine: pip install 'penstock[guardrails]'") from error
    try:
        pattern = regex.compile(source)
    except regex.error as error:
        raise ConfigError(f"{source!r} is no regular expression: {error}") from error
    if pattern.flags & regex.REVERSE:
        raise ConfigError(f"{source!r} searches backwards, which text that arrives in pieces cannot be")
    if pattern.match("") is not None:
        raise ConfigError(f"{source!r} matches everywhere, since it matches nothing at all")
    return pattern


def _longest(source: str) -> int | None:
    """Characters of the longest match; None when there is none, or this cannot tell."""
    if re.search(r"\(\?<?[=!]|\{(?!\d*,?\d*\})", source):  # assertions that look ahead, and fuzzy matching
        return None
    try:
        from re import _parser  # type: ignore[attr-defined]

        longest = int(_parser.parse(source).getwidth()[1])
    except (ImportError, re.error, OverflowError, RecursionError):
        return None
    return longest if longest < LONGEST else None
