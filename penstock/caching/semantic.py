"""Finds earlier questions that ask the same in other words: similar vectors are candidates, the verifier decides.

An index is a local copy of one partition's questions, with their vectors in one matrix; it reads only new questions
from the store. Vectors are never compared across partitions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from penstock.caching.question import ParsedQuestion, parse_question
from penstock.caching.store import AnswerStore, CacheKey
from penstock.caching.verifier import Leftover, Refusal, compare, match_leftover

if TYPE_CHECKING:
    from penstock.backends.embedder import Embeddings

MOST_INDEXES = 256
MOST_CANDIDATES = 4
"""Maximum of similar questions checked by the verifier."""
MOST_WORDS = 8192


class Embeds(Protocol):
    async def embed(self, texts: Sequence[str], *, priority: int = 0) -> Embeddings: ...


class StoredQuestion(msgspec.Struct, frozen=True):
    """A question as stored."""

    text: str
    digest: str
    """Digest of the answer's key."""
    vector: bytes


@dataclass(slots=True)
class _Index:
    epoch: str = ""
    questions: list[StoredQuestion] = field(default_factory=list)
    readings: dict[int, ParsedQuestion] = field(default_factory=dict)
    matrix: Any = None


@dataclass(frozen=True, slots=True)
class Match:
    digest: str
    likeness: float


@dataclass(slots=True)
class SearchResult:
    """The result of a lookup; reused when the answer is stored."""

    vector: bytes = b""
    matches: list[Match] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)


_decode = msgspec.msgpack.Decoder(StoredQuestion).decode
_encode = msgspec.msgpack.Encoder().encode


class SemanticIndex:
    """The indexes of recently used partitions."""

    def __init__(self, store: AnswerStore, embedder: Embeds, threshold: float) -> None:
        self._store = store
        self._embedder = embedder
        self._threshold = threshold
        self._indexes: OrderedDict[CacheKey, _Index] = OrderedDict()
        self._words: OrderedDict[str, Any] = OrderedDict()

    async def search(self, partition: CacheKey, text: str) -> SearchResult:
        """Finds answers to the same question, best first."""
        vector = (await self._embedder.embed([text])).vectors[0]
        found = SearchResult(vector.tobytes())
        index = await self._synced(partition)
        if index.matrix is None:
            return found
        likeness = index.matrix @ vector
        near = (likeness >= self._threshold).nonzero()[0]
        asked = parse_question(text)
        for i in near[(-likeness[near]).argsort(kind="stable")][:MOST_CANDIDATES].tolist():
            known = index.readings.get(i)
            if known is None:
                known = index.readings[i] = parse_question(index.questions[i].text)
            refusal = await self._refusal(asked, known)
            if refusal is None:
                found.matches.append(Match(index.questions[i].digest, float(likeness[i])))
            else:
                found.refusals.append(refusal)
        return found

    async def add(self, partition: CacheKey, text: str, digest: str, vector: bytes) -> None:
        await self._store.note(partition, _encode(StoredQuestion(text, digest, vector)))

    async def _refusal(self, asked: ParsedQuestion, known: ParsedQuestion) -> Refusal | None:
        difference = compare(asked, known)
        if not isinstance(difference, Leftover):
            return difference
        words = await self._vectors((*difference.ours, *difference.theirs))
        ours, theirs = words[: len(difference.ours)], words[len(difference.ours) :]
        return match_leftover(difference, [[float(a @ b) for b in theirs] for a in ours])

    async def _vectors(self, words: Sequence[str]) -> list[Any]:
        missing = [word for word in dict.fromkeys(words) if word not in self._words]
        if missing:
            rows = (await self._embedder.embed(missing)).vectors
            self._words.update(zip(missing, rows, strict=True))
        found = [self._words[word] for word in words]
        while len(self._words) > MOST_WORDS:
            self._words.popitem(last=False)
        return found

    async def _synced(self, partition: CacheKey) -> _Index:
        """The local index, updated from the store."""
        index = self._indexes.setdefault(partition, _Index())
        self._indexes.move_to_end(partition)
        while len(self._indexes) > MOST_INDEXES:
            self._indexes.popitem(last=False)
        while True:
            held = index.epoch, len(index.questions)
            epoch, fresh = await self._store.questions(partition, *held)
            if held == (index.epoch, len(index.questions)):
                break  # no concurrent lookup has updated it meanwhile
        if epoch != index.epoch:
            index.epoch, index.questions, index.readings, index.matrix = epoch, [], {}, None
        if fresh:
            import numpy as np

            new = [_decode(entry) for entry in fresh]
            rows = np.stack([np.frombuffer(question.vector, np.float32) for question in new])
            index.questions += new
            index.matrix = rows if index.matrix is None else np.concatenate((index.matrix, rows))
        return index
