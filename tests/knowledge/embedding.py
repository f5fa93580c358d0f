"""An embedder without a model: every word has a fixed random direction, and a text points to the mean of its words."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.knowledge.embedder import Embedded, EmbedderFacts
from penstock.knowledge.terms import STOP_WORDS, words

if TYPE_CHECKING:
    from penstock.knowledge.embedder import Vectors

DIMENSIONS = 64


class HashingEmbedder:
    """See `penstock.knowledge.embedder.Embedder`."""

    def __init__(self, name: str = "hashing") -> None:
        self.name = name
        self.texts = 0
        self._up = False

    async def facts(self) -> EmbedderFacts:
        self._up = True
        return EmbedderFacts(DIMENSIONS, 256)

    def tokens(self, texts: Sequence[str]) -> list[list[str]]:
        assert self._up, "there is no tokenizer before `facts`"
        return [words(text) for text in texts]

    async def embed(self, texts: Sequence[str], *, bulk: bool = False) -> Embedded:
        self.texts += len(texts)
        rows = []
        for text in texts:
            telling = [word for word in words(text) if word not in STOP_WORDS] or ["nothing"]
            rows.append(np.mean([_direction(word) for word in telling], axis=0))
        stacked = np.stack(rows)
        vectors = np.asarray(stacked / np.linalg.norm(stacked, axis=1, keepdims=True), np.float32)
        return Embedded(vectors, [np.stack([_direction(word) for word in words(text) or [""]]) for text in texts])


def _direction(word: str) -> Vectors:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big")
    row = np.random.default_rng(seed).standard_normal(DIMENSIONS).astype(np.float32)
    return row / np.linalg.norm(row)
