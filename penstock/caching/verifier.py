"""Verifies that two similar questions ask the same thing, before a cached answer is used.

Vectors of "enable" and "disable", or of 404 and 403, are similar. So a hit needs more: the same numbers, the same
negations, the same kind of question, and for every word of one question a match in the other: the same word, a
synonym, or a word with a similar vector that no list marks as different. When in doubt the answer is no: a miss costs
a computation, a false hit costs trust.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.caching.lexicon import OPPOSITE
from penstock.caching.question import ParsedQuestion, Word, stem

Refusal = Literal["number", "negation", "question", "person", "literal", "name", "opposite", "wording", "order"]

WORD_LIKENESS = 0.74
"""Minimum cosine of two words that may replace each other."""
_SPELLED_ALIKE = 0.72
_PREFIXES = ("un", "in", "im", "il", "ir", "dis", "non", "non-", "de")
_OPPOSITE = frozenset(frozenset(map(stem, pair)) for pair in OPPOSITE)


@dataclass(frozen=True, slots=True)
class Leftover:
    """Words of each question without a match in the other; their vectors decide."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]


def compare(asked: ParsedQuestion, known: ParsedQuestion) -> Refusal | Leftover | None:
    """Why the questions differ; the words left to compare by vector; or None when they ask the same."""
    if asked.literals != known.literals:
        return "literal"
    if asked.numbers != known.numbers:
        return "number"
    if asked.negations != known.negations:
        return "negation"
    if not _same_kind(asked.kind, known.kind):
        return "question"
    if asked.owners and known.owners and asked.owners != known.owners:
        return "person"
    ours, theirs = _unmatched(asked.words, known.words), _unmatched(known.words, asked.words)
    if _opposed(ours, theirs):
        return "opposite"
    if any(word.name for word in (*ours, *theirs)):
        return "name"
    if not _same_order(asked, known):
        return "order"
    if len(ours) != len(theirs):
        return "wording"
    if not ours:
        return None
    return Leftover(tuple(word.stem for word in ours), tuple(word.stem for word in theirs))


def match_leftover(leftover: Leftover, likeness: Sequence[Sequence[float]]) -> Refusal | None:
    """Pairs the left-over words; `likeness[i][j]` is the cosine of our word i and their word j. Each word needs its own
    partner."""
    free = set(range(len(leftover.theirs)))
    for row, word in enumerate(leftover.ours):
        close = [
            column
            for column in free
            if likeness[row][column] >= WORD_LIKENESS and not _spelled_alike(word, leftover.theirs[column])
        ]
        if not close:
            return "wording"
        free.discard(max(close, key=lambda column: likeness[row][column]))
    return None


def _same_kind(asked: str, known: str) -> bool:
    if asked == known or {asked, known} == {"how", "where"}:
        return True
    # "What" is compatible with every kind but yes/no questions.
    return "" in (asked, known) and "yes" not in (asked, known)


def _unmatched(words: Sequence[Word], others: Sequence[Word]) -> list[Word]:
    spare = Counter(word.concept for word in others)
    found = []
    for word in words:
        if spare[word.concept]:
            spare[word.concept] -= 1
        elif not any(word.concept == other.concept for other in others):
            found.append(word)
    return found


def _opposed(ours: Sequence[Word], theirs: Sequence[Word]) -> bool:
    return any(
        frozenset((a.stem, b.stem)) in _OPPOSITE
        or frozenset((a.concept, b.concept)) in _OPPOSITE
        or any(b.stem == prefix + a.stem or a.stem == prefix + b.stem for prefix in _PREFIXES)
        for a in ours
        for b in theirs
    )


def _same_order(asked: ParsedQuestion, known: ParsedQuestion) -> bool:
    """Whether names are in the same order; for directed questions, all words."""
    ours, theirs = [word.concept for word in asked.words], [word.concept for word in known.words]
    shared = set(ours) & set(theirs)
    names = {word.concept for word in (*asked.words, *known.words) if word.name}
    if not (asked.directed and known.directed and Counter(ours) == Counter(theirs)):
        shared &= names
    return [word for word in ours if word in shared] == [word for word in theirs if word in shared]


def _spelled_alike(a: str, b: str) -> bool:
    """Words that differ by a letter or two are different things (ethanol, methanol), unless one is an inflection."""
    return not (a.startswith(b) or b.startswith(a)) and difflib.SequenceMatcher(None, a, b).ratio() > _SPELLED_ALIKE
