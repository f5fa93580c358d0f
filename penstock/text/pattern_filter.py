"""Applies patterns to streamed text: matches are replaced, or end the text, before any part of them is shown.

Whether a match begins at a position is decided by the characters from there on, at most `reach` of them: the longest
possible match, or `LONGEST` for unbounded patterns. Text is released as soon as no match can begin in
it, which partial matching of the `regex` module decides; so the result never depends on how the text was split.
A pattern that times out counts as a match: the text is refused rather than shown unchecked.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, needs_extra

if TYPE_CHECKING:
    import regex

LONGEST = 256
"""Maximum length of a match of an unbounded pattern; also the maximum of text held back."""
LONGEST_PATTERN = 1000
LOOK_BEHIND = 64
"""Characters before a position that assertions can see."""
PUSH_S = 0.02
"""Time for one piece of a stream: other streams wait for it."""
INLINE_S = 0.01
"""Time for a whole request on the event loop."""
WHOLE_S = 1.0
WHOLE_S_PER_CHARACTER = 2e-6
"""Time for a whole request on a thread; usual patterns need a hundredth of it."""
_AFTER = 2
"""Characters after a match that decide about `\\b` and `$`."""


class TooSlow(Exception):
    """The pattern timed out."""


class Deadline:
    """How long patterns may take, all together."""

    __slots__ = ("_at", "_clock")

    def __init__(self, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        """`clock`: `thread_time` where a short time counts and one thread does the work, which may not get a core."""
        self._clock = clock
        self._at = clock() + seconds

    def left(self) -> float:
        """Seconds that are left; raises `TimeoutError` when none are."""
        left = self._at - self._clock()
        if left <= 0:
            raise TimeoutError
        return left


class TextPattern:
    """A compiled pattern and its reach."""

    __slots__ = ("compiled", "reach")

    def __init__(self, source: str, *, longest: int | None = None) -> None:
        """`longest`: maximum length of a match, if known better than from the pattern."""
        self.compiled: regex.Pattern[str] = _compile(source)
        bound = _longest(source) if longest is None else longest
        self.reach = LONGEST if bound is None else min(bound + _AFTER, LONGEST)

    @classmethod
    def of_words(cls, words: tuple[str, ...]) -> TextPattern:
        """Any of the words as a whole word, case-insensitive."""
        ordered = sorted(words, key=len, reverse=True)
        choice = "|".join(re.escape(word) for word in ordered)
        return cls(rf"(?i)(?<!\w)(?:{choice})(?!\w)", longest=len(ordered[0]))

    def found(self, text: str, deadline: Deadline) -> bool:
        """Whether a complete text contains a match."""
        try:
            return self.compiled.search(text, timeout=deadline.left(), concurrent=True) is not None
        except TimeoutError:
            raise TooSlow from None

    def replaced(self, text: str, replacement: str, deadline: Deadline) -> str:
        try:
            return str(self.compiled.sub(lambda _: replacement, text, timeout=deadline.left(), concurrent=True))
        except TimeoutError:
            raise TooSlow from None


class StreamFilter:
    """One pattern over one stream of text."""

    __slots__ = ("_buffer", "_pattern", "_reach", "_replacement", "_shown", "hits")

    def __init__(self, pattern: TextPattern, replacement: str | None) -> None:
        """`replacement`: None ends the text at a match."""
        self._pattern = pattern.compiled
        self._reach = pattern.reach
        self._replacement = replacement
        self._buffer = ""
        self._shown = 0
        """Length of the released part of the buffer, kept for assertions only."""
        self.hits = 0

    def push(self, text: str, *, final: bool = False) -> tuple[str, bool]:
        """Text that may be shown, and whether it ends here. `final`: no more follows, nothing is held back."""
        self._buffer += text
        shown: list[str] = []
        try:
            ended = self._advance(shown, final, Deadline(PUSH_S, thread_time))
        except TimeoutError:
            self.hits += 1
            ended = True
        spare = self._shown - LOOK_BEHIND
        if spare > 0:
            self._buffer = self._buffer[spare:]
            self._shown = LOOK_BEHIND
        return "".join(shown), ended

    def _advance(self, shown: list[str], final: bool, deadline: Deadline) -> bool:
        buffer, end = self._buffer, len(self._buffer)
        while self._shown < end:
            start = self._next(buffer, self._shown, end, final, deadline)
            shown.append(buffer[self._shown : start])
            self._shown = start
            if start == end or not (final or end >= start + self._reach):
                return False
            match = self._pattern.match(buffer, start, min(end, start + self._reach), timeout=deadline.left())
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

    def _next(self, buffer: str, start: int, end: int, final: bool, deadline: Deadline) -> int:
        """The first position of a match, or of a possible match with more text; `end` if there is none."""
        last = end
        if end - start <= self._reach:  # everything is within reach: one search finds any match
            match = self._pattern.search(buffer, start, end, partial=not final, timeout=deadline.left())
            if match is None:
                return end
            last = int(match.start())
            if final:
                return last
            # A complete match may hide the beginning of an earlier one.
        for position in range(start, last):
            bound = position + self._reach
            partial = not final and bound > end
            until = min(bound, end)
            if self._pattern.match(buffer, position, until, partial=partial, timeout=deadline.left()) is not None:
                return position
        return last


@functools.cache
def _compile(source: str) -> Any:
    try:
        import regex
    except ImportError as error:
        raise ConfigError(f"guardrails: a regular expression engine {needs_extra('guardrails')}") from error
    try:
        pattern = regex.compile(source)
    except regex.error as error:
        raise ConfigError(f"{source!r} is not a valid regular expression: {error}") from error
    if pattern.flags & regex.REVERSE:
        raise ConfigError(f"{source!r} searches backwards, which is not possible in streamed text")
    if pattern.match("") is not None:
        raise ConfigError(f"{source!r} matches the empty string, so it would match everywhere")
    return pattern


def _longest(source: str) -> int | None:
    """Length of the longest possible match; None when unbounded or unknown."""
    if re.search(r"\(\?<?[=!]|\{(?!\d*,?\d*\})", source):  # assertions that look ahead, and fuzzy matching
        return None
    try:
        from re import _parser  # type: ignore[attr-defined]

        longest = int(_parser.parse(source).getwidth()[1])
    except (ImportError, re.error, OverflowError, RecursionError):
        return None
    return longest if longest < LONGEST else None
