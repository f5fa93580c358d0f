"""A text as the sparse vector that the complexity model weighs.

Three groups of features, each scaled so that it counts about as much as the others: hashed character and word n-grams,
concepts (see `concepts`) with their pairs, and the shape of the text (length, numbers, code marks, quotations).
Vectorized and bounded: of a long text the beginning and the end are read, so that it takes less than a millisecond.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.routing.selection.concepts import UNSPACED, lexicon, plain

BUCKET_BITS: Final = 16
BUCKETS: Final = 1 << BUCKET_BITS
"""Buckets of hashed n-grams."""
_HEAD, _TAIL = 600, 400
"""Characters read at the beginning and the end of a text."""
_COUNTED: Final = 1 << 16
"""Characters whose words are counted; those beyond are estimated."""
_SIZES: Final = (2, 3, 4)
"""Lengths of character n-grams."""
_CHARACTERS, _WORDS, _CONCEPT, _PAIR, _SHAPE = 1.0, 1.0, 0.5, 0.3, 0.7
"""Scales of the groups."""
_LONG_WORD = 0.6
"""Words per character in scripts without spaces."""

_TOKEN = re.compile(r"[^\W\d_]+|\d+|[^\w\s]")
_DIGITS = re.compile(r"\d+")
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_QUOTED = re.compile(r'"[^"]{12,}"|„[^“”"]{12,}[“”"]|「[^」]{6,}」|“[^”]{12,}”|«[^»]{12,}»|```.*?```', re.DOTALL)
_AFTER_COLON = re.compile(r"[:：]\s*\S.{16,}", re.DOTALL)
_TRANSFORMS: Final = ("translate", "rewrite", "summarise", "extract", "save")
"""Concepts that ask for a change of the text that follows, whatever that text is about."""
_CODE_MARK = re.compile(r"[{}();=<>\[\]`_\\|]|=>|->|::|//|\w\.\w+\(")
_OPERATOR = re.compile(r"[-+*/^=<>²³√∫∑≤≥×÷%]")
_SENTENCE = re.compile(r"[.!?;:。！？；؟।]+(?:\s|$)|[。！？；]|\n")
_QUESTION = re.compile("[?？؟]")
_UNSPACED = re.compile(f"[{UNSPACED}]")
_NAME = re.compile(r"\b[a-z]+[A-Z]\w*|\b[A-Z]{2,}\b|\b\w+_\w+")

SHAPES: Final = (
    "bias", "words", "words squared", "characters", "sentences", "questions", "ends with a question", "one number",
    "two numbers", "three numbers", "numbers", "operators", "code marks", "names", "lines", "quoted", "commas",
    "long words", "no concept", "one word", "few words", "many words", "exclamation",
)  # fmt: skip


def word_count(text: str) -> int:
    """Words of a text; in scripts without spaces, as many as it would have."""
    if text.isascii():
        return len(text.split())
    unspaced = len(_UNSPACED.findall(text))
    if not unspaced:
        return len(text.split())
    return len(_UNSPACED.sub(" ", text).split()) + math.ceil(unspaced * _LONG_WORD)


class Layout:
    """Where each group of features lies in the vector: n-grams, concepts, concepts by length, pairs, shapes."""

    def __init__(self, concepts: int) -> None:
        self.concepts = BUCKETS
        self.by_length = self.concepts + concepts
        """Three for each concept: in a short, a usual and a long text."""
        self.pairs = self.by_length + 3 * concepts
        """Of the concepts i < j at j (j - 1) / 2 + i."""
        self.shapes = self.pairs + concepts * (concepts - 1) // 2
        self.size = self.shapes + len(SHAPES)


@cache
def layout() -> Layout:
    return Layout(len(lexicon().names))


@dataclass(frozen=True, slots=True)
class Vector:
    """A sparse vector. Its entries: `ngrams` n-grams; two for each concept; one for each pair of concepts, in the order
    (1, 0), (2, 0), (2, 1)...; one for each shape."""

    at: NDArray[np.int64]
    values: NDArray[np.float64]
    ngrams: int
    concepts: tuple[int, ...]
    """In the order of the text."""
    words: int


def represent(text: str) -> Vector:
    if len(text) > _HEAD + _TAIL:
        cut = f"{text[:_HEAD]}\n{text[-_TAIL:]}"
        words = word_count(text[:_COUNTED]) + max(len(text) - _COUNTED, 0) // 6
    else:
        cut, words = text, word_count(text)
    asked, quoted = _instruction(cut)
    asked_words = words if asked is cut else word_count(asked)
    lowered = plain(asked)
    characters = _character_ngrams(lowered)
    tokens = _word_ngrams(lowered)
    places = layout()
    concepts = list(dict.fromkeys(concept for concept, _ in lexicon().find(lowered)))
    length = 0 if asked_words < 8 else 1 if asked_words < 25 else 2
    at: list[int] = []
    for concept in concepts:
        at += (places.concepts + concept, places.by_length + 3 * concept + length)
    values = [_CONCEPT] * len(at)
    for place, concept in enumerate(concepts):
        for other in concepts[:place]:
            low, high = (other, concept) if other < concept else (concept, other)
            at.append(places.pairs + high * (high - 1) // 2 + low)
    values += [_PAIR] * (len(at) - len(values))
    at += range(places.shapes, places.size)
    values += _shape(asked, cut, asked_words, quoted, bool(concepts))
    hashed = len(characters) + len(tokens)
    weights = np.empty(hashed + len(at))
    weights[: len(characters)] = _CHARACTERS / math.sqrt(max(len(characters), 1))
    weights[len(characters) : hashed] = _WORDS / math.sqrt(max(len(tokens), 1))
    weights[hashed:] = values
    return Vector(np.concatenate([characters, tokens, np.array(at, np.int64)]), weights, hashed, tuple(concepts), words)


def _character_ngrams(text: str) -> NDArray[np.int64]:
    codes = np.frombuffer(f" {_DIGITS.sub('0', text)} ".encode("utf-32-le"), np.uint32)
    found = []
    for size in _SIZES:
        count = len(codes) - size + 1
        if count < 1:
            break
        hashed = np.full(count, size * 0x9E3779B1 & 0xFFFFFFFF, np.uint32)
        for place in range(size):
            hashed ^= codes[place : place + count]
            hashed *= np.uint32(0x01000193)
        hashed ^= hashed >> np.uint32(15)
        hashed *= np.uint32(0x2C1B3C6D)
        found.append(hashed >> np.uint32(32 - BUCKET_BITS))
    return np.concatenate(found).astype(np.int64) if found else np.zeros(0, np.int64)


def _word_ngrams(text: str) -> NDArray[np.int64]:
    words = [word if not word[0].isdigit() else "0" for word in _TOKEN.findall(text)]
    grams = {f"w {word}" for word in words}
    grams.update(f"w {one} {other}" for one, other in pairwise(words))
    return np.array([zlib.crc32(gram.encode()) & (BUCKETS - 1) for gram in sorted(grams)], np.int64)


def _instruction(text: str) -> tuple[str, float]:
    """What is asked, without the text that it is asked about, and the share of that text. Quotations are left out, and
    what follows the colon of a request to translate, correct, summarize or note something."""
    asked = _QUOTED.sub(" ", text)
    after = _AFTER_COLON.search(asked)
    if after is not None:
        names = lexicon().names
        before = {names[concept] for concept, _ in lexicon().find(plain(asked[: after.start()]))}
        if before.intersection(_TRANSFORMS):
            asked = asked[: after.start() + 1]
    if len(asked) == len(text) or word_count(asked) < 2:
        return text, 0.0
    return asked, 1 - len(asked) / len(text)


def _shape(asked: str, text: str, words: int, quoted: float, known: bool) -> list[float]:
    numbers = len(_NUMBER.findall(asked))
    size = math.log1p(words)
    stripped = text.rstrip()
    spaced = [word for word in asked.split() if len(word) >= 9]
    found = [
        size / 3,
        (size / 3) ** 2,
        math.log1p(len(asked)) / 5,
        min(len(_SENTENCE.findall(asked)), 6) / 3,
        min(len(_QUESTION.findall(asked)), 4) / 2,
        float(stripped[-1:] in "?？؟") if stripped else 0.0,
        float(numbers == 1),
        float(numbers == 2),
        float(numbers >= 3),
        min(numbers, 10) / 5,
        min(len(_OPERATOR.findall(text)), 10) / 5,
        min(len(_CODE_MARK.findall(text)), 20) / 10,
        min(len(_NAME.findall(text)), 6) / 3,
        min(text.count("\n"), 10) / 5,
        quoted,
        min(sum(map(asked.count, ",，、،")), 8) / 4,
        min(len(spaced), 12) / 6,
        float(not known),
        float(words <= 1),
        float(words <= 4),
        float(words >= 40),
        float("!" in text or "！" in text),
    ]
    return [1.0, *(value * _SHAPE for value in found)]
