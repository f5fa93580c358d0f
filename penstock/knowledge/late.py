"""Late interaction: every word of the question looks for its best match among the words of a passage.

One vector per chunk says what it is about; it cannot say whether the one thing asked for is in it. The vectors of its
tokens can. They are computed when a document is read, kept as signed bytes, and compared when a question comes: no
model runs at that time but for the question itself.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.knowledge.embedder import Embedder
from penstock.knowledge.retrieval import Candidate
from penstock.knowledge.terms import STOP_WORDS

if TYPE_CHECKING:
    from penstock.knowledge.chunks.base import ChunkStore
    from penstock.knowledge.embedder import Vectors

_HEADER = struct.Struct("<HH")


def pack(tokens: Sequence[str], vectors: Vectors) -> bytes:
    kept = [row for row, token in zip(vectors, tokens, strict=False) if any(map(str.isalnum, token))]
    rows = np.stack(kept) if kept else np.zeros((0, vectors.shape[1]), np.float32)
    return _HEADER.pack(*rows.shape) + np.round(rows * 127).astype(np.int8).tobytes()


def unpack(data: bytes) -> Vectors:
    rows, width = _HEADER.unpack_from(data)
    signed = np.frombuffer(data, np.int8, offset=_HEADER.size).reshape(rows, width)
    return signed.astype(np.float32) / np.float32(127)


def max_sim(question: Vectors, weights: NDArray[np.float32], passage: Vectors) -> float:
    """The weighted mean over the question's tokens of the best cosine each finds in the passage."""
    if not len(question) or not len(passage):
        return 0.0
    return float((question @ passage.T).max(axis=1) @ weights / weights.sum())


class LateInteraction:
    name = "late interaction"

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    async def scores(self, query: str, store: ChunkStore, candidates: Sequence[Candidate]) -> list[float]:
        keys = [candidate.stored.key for candidate in candidates]
        (question,), packed = await asyncio.gather(self._embedder.token_vectors([query]), store.late(keys))
        tokens = self._embedder.tokens(query)[: len(question)]
        weights = np.array([0.2 if token in STOP_WORDS or not token.isalnum() else 1.0 for token in tokens], np.float32)
        return [max_sim(question, weights, unpack(packed[key])) if key in packed else -math.inf for key in keys]
