"""Late interaction: every token of the question looks for its best match among the tokens of a passage.

One vector per chunk says what it is about; it cannot say whether the one thing asked for is in it. The vectors of its
tokens can. They are computed when a document is read and kept as one bit per dimension (48 bytes a token), which ranks
as well as whole numbers do: `bench/retrieval.py` measures it. When a question comes, no model runs but for the
question itself.
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
"""What the cosine of the whole chunk counts for beside its tokens; chosen on the half of the questions of
`bench/retrieval.py` that its figures are not taken from."""
_HEADER = struct.Struct("<HH")


def pack(tokens: Sequence[str], by_token: Vectors, vector: Vectors) -> bytes:
    """The vector of a chunk, and the signs of those of its tokens; punctuation is left out."""
    telling = [any(map(str.isalnum, token)) for token in tokens[: len(by_token)]]
    rows = by_token[: len(telling)][np.array(telling, bool)]
    return joined(vector, np.packbits(rows >= 0, axis=1))


def joined(vector: Vectors, signs: NDArray[np.uint8]) -> bytes:
    """The bytes that are stored: of the chunk's vector, and of its tokens' signs, a row each."""
    return _HEADER.pack(len(signs), len(vector)) + vector.astype(np.float16).tobytes() + signs.tobytes()


def unpack(data: bytes) -> tuple[Vectors, Vectors]:
    """The tokens' directions, of length one, and the vector of the chunk."""
    rows, width = _HEADER.unpack_from(data)
    vector = np.frombuffer(data, np.float16, width, _HEADER.size).astype(np.float32)
    packed = np.frombuffer(data, np.uint8, offset=_HEADER.size + 2 * width).reshape(rows, -(-width // 8))
    signs = np.unpackbits(packed, axis=1, count=width).astype(np.float32)
    return (signs * 2 - 1) / np.float32(math.sqrt(width)), vector


def max_sim(question: Vectors, passage: Vectors) -> float:
    """The mean over the question's tokens of the best cosine each finds in the passage."""
    return float((question @ passage.T).max(axis=1).mean()) if len(question) and len(passage) else 0.0


class LateInteraction(Reranker):
    """Needs nothing but what the embedder made of the documents."""

    async def ready(self, question: Question) -> Scorer:
        embedded = await question.embedded()
        vector, by_token = embedded.vectors[0], embedded.by_token[0]

        async def score(store: ChunkStore, candidates: Sequence[Candidate]) -> list[float]:
            packed = await store.late([one.stored.key for one in candidates])
            return await asyncio.to_thread(_scores, by_token, vector, packed, candidates)

        return score


def _scores(
    by_token: Vectors, vector: Vectors, packed: Mapping[int, bytes], candidates: Sequence[Candidate]
) -> list[float]:
    scores = []
    for candidate in candidates:
        data = packed.get(candidate.stored.key)
        if data is None:  # removed a moment ago
            scores.append(-math.inf)
            continue
        directions, whole = unpack(data)
        scores.append(max_sim(by_token, directions) + SIMILARITY * float(vector @ whole))
    return scores
