"""Retrieval: finds passages for a question by hybrid search (full text and vectors), rank fusion and reranking.

Independent steps run in parallel: the full-text search runs while the question is embedded.
If the embedder is down, a vector search is an error, not a silent
half of a search.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.knowledge.catalogue import Catalogue
from penstock.knowledge.embedder import Embedded, Embedder
from penstock.knowledge.entities import Collection, Document, KnowledgeError, Passage, SearchMode, StoredChunk
from penstock.knowledge.fusion import RANK_OFFSET, fuse
from penstock.knowledge.terms import search_terms

if TYPE_CHECKING:
    from penstock.knowledge.chunks.base import ChunkStore, ChunkStores, Ranked


class Question:
    """A question; embedded once, on first use of its vector. Close it when done."""

    def __init__(self, text: str, embedder: Embedder) -> None:
        self.text = text
        self._embedder = embedder
        self._embedding: asyncio.Task[Embedded] | None = None

    async def embedded(self) -> Embedded:
        if self._embedding is None:
            self._embedding = asyncio.create_task(self._embed(), name="embedding of a question")
        return await asyncio.shield(self._embedding)

    async def close(self) -> None:
        if self._embedding is not None and not self._embedding.done():
            self._embedding.cancel()
            with suppress(asyncio.CancelledError):
                await self._embedding

    async def _embed(self) -> Embedded:
        return await self._embedder.embed([self.text])


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk for the reranker, with its search scores."""

    stored: StoredChunk
    scores: Mapping[str, float]


class Scorer(Protocol):
    async def __call__(self, store: ChunkStore, candidates: Sequence[Candidate]) -> list[float]:
        """The relevance of each candidate; higher is better."""


class Reranker(ABC):
    @abstractmethod
    async def ready(self, question: Question) -> Scorer:
        """Work that needs no candidates; it runs while they are searched for."""

    def relevance(self, score: float) -> float:
        """A score as a number from 0 to 1."""
        return min(max(score, 0.0), 1.0)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search. `seconds` by step; steps overlap."""

    passages: list[Passage]
    seconds: Mapping[str, float]


class Retriever:
    def __init__(self, catalogue: Catalogue, stores: ChunkStores, embedder: Embedder, reranker: Reranker) -> None:
        self._catalogue = catalogue
        self._stores = stores
        self._embedder = embedder
        self._reranker = reranker

    async def search(
        self,
        collection: Collection,
        query: str,
        *,
        mode: SearchMode = "hybrid",
        candidates: int = 20,
        keep: int = 4,
        rerank: bool = True,
        among: Sequence[str] | None = None,
        weights: tuple[float, float] = (1.0, 1.0),
    ) -> Found:
        """The best `keep` of the `candidates` found. `among`: only in these documents; `weights`: of vectors and of
        words, where both are searched."""
        if collection.embedding_model != self._embedder.name and mode != "bm25":
            raise KnowledgeError(
                f"The collection `{collection.name}` was embedded with `{collection.embedding_model}`, and this server "
                f"embeds with `{self._embedder.name}`. Ingest it again, or search with the mode `bm25`."
            )
        rerank = rerank and collection.embedding_model == self._embedder.name
        question, watch = Question(query, self._embedder), _Watch()
        try:
            async with self._stores.use(collection) as store:
                ranked, scorer = await asyncio.gather(
                    self._candidates(store, question, mode, candidates, watch, among, weights),
                    self._reranker.ready(question) if rerank else _no_scorer(),
                )
                keys = list(ranked)
                chunks = await store.fetch(keys)
                documents = await self._documents(collection, chunks)
                found = [
                    Candidate(chunks[key], ranked[key])
                    for key in keys
                    if key in chunks and chunks[key].document in documents
                ]
                if scorer is not None and found:
                    with watch("rerank"):
                        scores = await scorer(store, found)
                    found = [
                        Candidate(one.stored, {**one.scores, "rerank": score})
                        for one, score in zip(found, scores, strict=True)
                    ]
        finally:
            await question.close()
        by = "fused" if scorer is None else "rerank"
        best = sorted(found, key=lambda one: -one.scores[by])[:keep]
        passages = [Passage(one.stored, documents[one.stored.document], one.scores[by], one.scores) for one in best]
        watch.seconds["total"] = watch.elapsed
        return Found(passages, watch.seconds)

    async def _candidates(
        self,
        store: ChunkStore,
        question: Question,
        mode: SearchMode,
        count: int,
        watch: _Watch,
        among: Sequence[str] | None,
        weights: tuple[float, float],
    ) -> dict[int, dict[str, float]]:
        """Keys in the order of the search, with their scores."""
        nearest, matching = await asyncio.gather(
            self._nearest(store, question, count if mode != "bm25" else 0, watch, among),
            self._matching(store, question.text, count if mode != "vector" else 0, watch, among),
        )
        fused = fuse([[key for key, _ in ranking] for ranking in (nearest, matching)], weights)[:count]
        similar, worded = dict(nearest), dict(matching)
        return {
            key: {
                "fused": score,
                **({"similarity": similar[key]} if key in similar else {}),
                **({"bm25": worded[key]} if key in worded else {}),
            }
            for key, score in fused
        }

    def relevance(self, passage: Passage, weights: tuple[float, float] = (1.0, 1.0)) -> float:
        """How well a passage fits, from 0 to 1; by its ranks where nothing was reranked."""
        if "rerank" in passage.scores:
            return self._reranker.relevance(passage.score)
        most = max(sum(weights), 1e-9) / (RANK_OFFSET + 1)
        return min(passage.score / most, 1.0)

    async def _nearest(
        self, store: ChunkStore, question: Question, count: int, watch: _Watch, among: Sequence[str] | None
    ) -> Ranked:
        if not count:
            return []
        with watch("embed"):
            vector = (await question.embedded()).vectors[0]
        with watch("vector"):
            return await store.nearest(vector, count, among)

    async def _matching(
        self, store: ChunkStore, query: str, count: int, watch: _Watch, among: Sequence[str] | None
    ) -> Ranked:
        if not count:
            return []
        with watch("bm25"):
            return await store.matching(search_terms(query), count, among)

    async def _documents(self, collection: Collection, chunks: Mapping[int, StoredChunk]) -> dict[str, Document]:
        """The documents of chunks; chunks without a document are being deleted and not shown."""
        names = list(dict.fromkeys(stored.document for stored in chunks.values()))
        return await self._catalogue.some_documents(collection.id, names)


async def _no_scorer() -> None:
    return None


class _Watch:
    """Times the steps of one search."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._began

    def __call__(self, step: str) -> _Lap:
        return _Lap(self.seconds, step)


class _Lap:
    def __init__(self, seconds: dict[str, float], step: str) -> None:
        self._seconds, self._step = seconds, step

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._step] = time.perf_counter() - self._began
