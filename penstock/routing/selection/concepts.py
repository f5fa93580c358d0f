"""What the words of a text are about: a lexicon of stems in many languages (`concepts.txt`), grouped into concepts.

A concept means the same in every language (`why`, `fault`, `thanks`), so what a model learns about it in one language
holds in the others. Pure and fast: some microseconds for a usual question.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Final

from penstock.errors import ConfigError

_MARKS = re.compile("[\u0300-\u036f]")
_WORD = re.compile(r"[^\W_]+")
UNSPACED: Final = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Scripts that put no spaces between words: a stem may begin at any character."""
_UNSPACED = re.compile(f"[{UNSPACED}]")
_KEY: Final = 3
"""Characters by which stems are looked up."""
_MOST_KEYS: Final = 1 << 15
_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u00ab": '"', "\u00bb": '"'})


def plain(text: str) -> str:
    """In lower case, with single spaces, without the diacritics that people often leave out."""
    text = " ".join(text.lower().split())
    if text.isascii():
        return text
    decomposed = _MARKS.sub("", unicodedata.normalize("NFD", text.translate(_QUOTES)))
    return unicodedata.normalize("NFC", decomposed)


class Lexicon:
    """Stems and the concepts that they show."""

    def __init__(self, lines: Iterable[str]) -> None:
        names: dict[str, int] = {}
        self._stems: dict[str, list[tuple[str, bool, int]]] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith(("#", "[")):
                continue
            name, colon, stems = line.partition(":")
            if not colon or not stems.strip():
                raise ConfigError(f"concepts.txt, line {number}: expected a concept, a colon and its stems")
            concept = names.setdefault(name.strip(), len(names))
            for written in stems.split(", "):
                whole = written.rstrip().endswith("_")
                stem = plain(written.strip().rstrip("_"))
                if stem:
                    self._stems.setdefault(stem[:_KEY], []).append((stem, whole, concept))
        self.names = tuple(names)
        self._near: dict[str, tuple[tuple[str, bool, int], ...]] = {}
        """Stems that may begin with the first characters of a word; of those that were asked for."""

    def find(self, text: str) -> list[tuple[int, int]]:
        """The concepts in a text that is `plain`, in the order of the text, each with its place. A stem that occurs
        twice counts once."""
        found: list[tuple[int, int]] = []
        seen: set[str] = set()
        near = self._near
        for begin in _beginnings(text):
            key = text[begin : begin + _KEY]
            stems = near.get(key)
            for stem, whole, concept in self._look_up(key) if stems is None else stems:
                if not text.startswith(stem, begin) or stem in seen:
                    continue
                end = begin + len(stem)
                if whole and end < len(text) and text[end].isalnum():
                    continue
                seen.add(stem)
                found.append((concept, begin))
        return found

    def _look_up(self, key: str) -> tuple[tuple[str, bool, int], ...]:
        sizes = range(1, len(key) + 1)
        found = tuple(stem for size in sizes for stem in self._stems.get(key[:size], ()))
        if len(self._near) >= _MOST_KEYS:
            self._near.clear()
        self._near[key] = found
        return found


def _beginnings(text: str) -> Iterable[int]:
    for word in _WORD.finditer(text):
        begin = word.start()
        yield begin
        if not word.group().isascii():
            for later in _UNSPACED.finditer(text, begin + 1, word.end()):
                yield later.start()


@cache
def lexicon() -> Lexicon:
    source = files("penstock.routing.selection") / "concepts.txt"
    return Lexicon(source.read_text(encoding="utf-8").splitlines())
