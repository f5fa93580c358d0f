"""Cached document frequencies of words, and the choice of words that a search can afford.

A full-text search scores every chunk with any of its words. In a large collection a common word adds tens of
thousands of chunks and almost no information, so the rarest words are taken first and the rest is dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

REMEMBERED = 4096
AFFORDABLE = 8_000
"""Maximum of chunks to score, unless the rarest word alone has more."""
STALE = 0.1
"""Counts are refreshed when the collection has grown by this share."""


class Frequencies:
    """Counts of recently used words."""

    def __init__(self) -> None:
        self.size = 0
        """Of the collection, now."""
        self._known: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def unknown(self, terms: Sequence[str]) -> list[str]:
        return [term for term in terms if term not in self._known or self._stale(self._known[term][1])]

    def put(self, term: str, count: int) -> None:
        self._known[term] = (count, self.size)
        self._known.move_to_end(term)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def get(self, term: str) -> int:
        return self._known[term][0]

    def _stale(self, size_then: int) -> bool:
        return abs(self.size - size_then) > STALE * size_then


def affordable(terms: Sequence[str], counts: Sequence[int], total: int, most: int = AFFORDABLE) -> list[str]:
    """The terms to search for, rarest first, until `most` chunks (or a hundredth of all) are to be scored; those that
    are nowhere are left out."""
    chosen: list[str] = []
    scored = 0
    for count, term in sorted((count, term) for count, term in zip(counts, terms, strict=True) if count):
        scored += count
        if chosen and scored > max(most, total // 100):
            break
        chosen.append(term)
    return chosen
