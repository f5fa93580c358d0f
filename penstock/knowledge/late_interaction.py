"""Late interaction (MaxSim): every token of the question is matched with its best token of a passage.

One vector per chunk captures its topic, but not whether it contains the detail that was asked for. The vectors of its
tokens do. They are computed at ingestion and stored as one bit per dimension (48 bytes per token), which ranks
as well as full vectors: `penstock bench retrieval` measures it. At query time the model runs only on the question
itself.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.knowledge.retrieval import Candidate, Question, Reranker, Scorer

if TYPE_CHECKING:
    from penstock.knowledge.chunks.base import ChunkStore
    from penstock.knowledge.embedder import Vectors

SIMILARITY = 0.25
"""Weight of the whole chunk's cosine relative to its tokens; tuned on the half of the questions of
`penstock bench retrieval` that is not used for its results."""
_HEADER = struct.Struct("<HH")


def pack(tokens: Sequence[str], by_token: Vectors, vector: Vectors) -> bytes:
    """Packs the vector of a chunk and the signs of its token vectors; punctuation is left out."""
    telling = [any(map(str.isalnum, token)) for token in tokens[: len(by_token)]]
    rows = by_token[: len(telling)][np.array(telling, bool)]
    return joined(vector, np.packbits(rows >= 0, axis=1))


def joined(vector: Vectors, signs: NDArray[np.uint8]) -> bytes:
    """The bytes that are stored: of the chunk's vector, and of its tokens' signs, a row each."""
    return _HEADER.pack(len(signs), len(vector)) + vector.astype(np.float16).tobytes() + signs.tobytes()


def unpack(data: bytes) -> tuple[NDArray[np.uint8], Vectors]:
    """The tokens' signs, packed as they are stored, and the vector of the chunk."""
    rows, width = _HEADER.unpack_from(data)
    vector = np.frombuffer(data, np.float16, width, _HEADER.size).astype(np.float32)
    return np.frombuffer(data, np.uint8, offset=_HEADER.size + 2 * width).reshape(rows, -(-width // 8)), vector


def max_sims(question: Vectors, passages: Sequence[NDArray[np.uint8]]) -> list[float]:
    """For each passage the mean over the question's tokens of the best cosine each finds in it.

    All passages go through one product. A sign s of a bit is 2 bit - 1, so q·s = 2 q·bits - sum(q): the bits need not
    become signs, nor signs directions of length one, before they are multiplied."""
    counts = [len(passage) for passage in passages]
    if not len(question) or not sum(counts):
        return [0.0] * len(counts)
    width = question.shape[1]
    bits = np.unpackbits(np.concatenate([passage for passage in passages if len(passage)]), axis=1, count=width)
    cosines = (2.0 * (question @ bits.astype(np.float32).T) - question.sum(axis=1, keepdims=True)) / math.sqrt(width)
    starts = np.cumsum([0, *(count for count in counts if count)])[:-1]
    best = iter(np.maximum.reduceat(cosines, starts, axis=1).mean(axis=0).tolist())
    return [next(best) if count else 0.0 for count in counts]


class LateInteraction(Reranker):
    """A reranker that uses only the stored token vectors."""

    async def ready(self, question: Question) -> Scorer:
        embedded = await question.embedded()
        vector, by_token = embedded.vectors[0], embedded.by_token[0]

        async def score(store: ChunkStore, candidates: Sequence[Candidate]) -> list[float]:
            packed = await store.late([one.stored.key for one in candidates])
            return await asyncio.to_thread(_scores, by_token, vector, packed, candidates)

        return score

    def relevance(self, score: float) -> float:
        return super().relevance(score / (1.0 + SIMILARITY))


def _scores(
    by_token: Vectors, vector: Vectors, packed: Mapping[int, bytes], candidates: Sequence[Candidate]
) -> list[float]:
    keys = [one.stored.key for one in candidates]
    there = {key: unpack(packed[key]) for key in keys if key in packed}
    sims = dict(zip(there, max_sims(by_token, [signs for signs, _ in there.values()]), strict=True))
    # Missing ones were removed a moment ago.
    return [sims[key] + SIMILARITY * float(vector @ there[key][1]) if key in there else -math.inf for key in keys]
