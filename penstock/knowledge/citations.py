"""Resolves `[n]` citations in a streamed answer, and attributes sentences that come from a source without citing it.

Small models forget to cite. A sentence without a number, most of whose words are in one source, some of them
not in the question, gets that source's number; the citation is marked as attributed, not written. Only white space
after a sentence is held back, until it is known whether the model adds a number itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.knowledge.passage_prompt import Source
from penstock.knowledge.terms import STOP_WORDS, words

SUPPORT = 0.6
"""Share of a sentence's words that must be in a source for it to be attributed."""
LEAST_WORDS = 3
_MARKER = re.compile(r"\[\s*(\d{1,3}(?:\s*[,;]\s*\d{1,3})*)\s*\]")
_OPEN = re.compile(r"\[[\d\s,;]{0,32}$")
_NUMBER = re.compile(r"\d+")
_ENDED = r"(?:(?<![\s.]\w)[.!?…][\"'”’)]*(?:\s*\[[\d\s,;]+\])*|(?<=\S)(?=[^\S\n]*\n))"
"""After the end of a sentence, with the numbers that follow it, or of a line; `e.g.` and `1.` end nothing."""
_SENTENCE_END = re.compile(rf"{_ENDED}(?P<gap>\s+)(?=[^\s\[]|\[[^\d\s,;])")
_UNDECIDED = re.compile(r"(?P<gap>\s+(?:\[[\d\s,;]*)?)$")
"""White space at the end, after which a number or another sentence may follow."""
_TRAILING = re.compile(r"(?P<gap>\s+)$")
_SUFFIXES = ("ing", "ies", "es", "ed", "s")


@dataclass(frozen=True, slots=True)
class Citation:
    """A citation in the text; `start` and `end` are character positions in the answer."""

    source: Source
    start: int
    end: int
    origin: Literal["model", "attributed"]


class Citer:
    """Processes one answer from beginning to end."""

    def __init__(self, sources: Sequence[Source], *, attribute: bool, question: str = "") -> None:
        """`question`: the user's question; its words appear in answers anyway and say nothing about the source."""
        self._asked = _stems(question)
        self._sources = {source.number: source for source in sources}
        self._vocabularies = [(source, _vocabulary(source)) for source in sources] if attribute else []
        self._length = 0
        """Characters released so far."""
        self._tail = ""
        """The released text from an open bracket on."""
        self._sentence = ""
        """The released part of the unfinished sentence."""
        self._held = ""

    def push(self, text: str, *, final: bool = False) -> tuple[str, list[Citation]]:
        """The text that may be shown now, and the citations it completes."""
        out: list[str] = []
        found: list[Citation] = []
        if not self._vocabularies:
            self._show(text, out, found)
            return text, found
        unshown = len(self._sentence)
        text = self._sentence + self._held + text
        while end := _SENTENCE_END.search(text):
            self._show(text[unshown : end.start("gap")], out, found)
            self._attribute(text[: end.start("gap")], out, found)
            self._show(end["gap"], out, found)
            text, unshown = text[end.end() :], 0
        undecided = _UNDECIDED.search(text) if not final else _TRAILING.search(text)
        at = max(undecided.start("gap") if undecided else len(text), unshown)
        self._show(text[unshown:at], out, found)
        if final:
            self._attribute(text[:at], out, found)
            self._show(text[at:], out, found)
        self._sentence, self._held = text[:at], text[at:]
        return "".join(out), found

    def _attribute(self, sentence: str, out: list[str], found: list[Citation]) -> None:
        """Adds a number after an uncited sentence that comes from a source."""
        if any(int(number) in self._sources for match in _MARKER.finditer(sentence) for number in _numbers(match)):
            return
        said = _stems(sentence)
        if len(said) < LEAST_WORDS or sentence.rstrip().endswith("?"):
            return
        support, source, vocabulary = max(
            ((len(said & vocabulary) / len(said), source, vocabulary) for source, vocabulary in self._vocabularies),
            key=lambda found: found[0],
        )
        if support >= SUPPORT and (said & vocabulary) - self._asked:
            marker = f" [{source.number}]"
            out.append(marker)
            self._length += len(marker)
            self._tail = ""
            found.append(Citation(source, self._length - len(marker) + 1, self._length, "attributed"))

    def _show(self, text: str, out: list[str], found: list[Citation]) -> None:
        """Releases text unchanged, with the citations it completes."""
        seen = self._tail + text
        offset = self._length - len(self._tail)
        for match in _MARKER.finditer(seen):
            sources = [self._sources.get(int(number)) for number in _numbers(match)]
            found += (
                Citation(source, offset + match.start(), offset + match.end(), "model")
                for source in sources
                if source is not None
            )
        self._length += len(text)
        open_marker = _OPEN.search(seen)
        self._tail = open_marker[0] if open_marker else ""
        out.append(text)


def _numbers(marker: re.Match[str]) -> list[str]:
    return _NUMBER.findall(marker[1])


def _vocabulary(source: Source) -> frozenset[str]:
    return frozenset(_stems(f"{source.passage.stored.chunk.heading} {source.text}"))


def _stems(text: str) -> set[str]:
    return {_stem(word) for word in words(text) if word not in STOP_WORDS and (len(word) > 2 or word.isdigit())}


def _stem(word: str) -> str:
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            return word[: -len(suffix)]
    return word
