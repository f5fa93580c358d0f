"""Search of vector stores: several queries and stores at once, filtered by attributes, with scores from 0 to 1."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.rag.library import KnowledgeLibrary
from penstock.gateway.rag.retrieval import guard
from penstock.gateway.rag.vector_stores.schemas import RankingOptions
from penstock.knowledge.entities import Collection, Passage, SearchMode
from penstock.knowledge.filters import AttributeFilter
from penstock.protocol.errors import InvalidRequest

MOST_CANDIDATES = 200


@dataclass(frozen=True, slots=True)
class StoreSearch:
    """What is searched for."""

    filter: AttributeFilter | None
    most: int
    rerank: bool = True
    threshold: float = 0.0
    weights: tuple[float, float] = (1.0, 1.0)
    """Of vectors and of words."""

    @classmethod
    def of(cls, filter: AttributeFilter | None, most: int, ranking: RankingOptions | None, at: str) -> StoreSearch:
        if ranking is None:
            return cls(filter, most)
        weights = (1.0, 1.0)
        if ranking.hybrid_search is not None:
            weights = (ranking.hybrid_search.embedding_weight, ranking.hybrid_search.text_weight)
            if not any(weights):
                raise InvalidRequest("One of the weights has to be more than 0.", param=f"{at}.hybrid_search")
        return cls(filter, most, ranking.ranker != "none", ranking.score_threshold or 0.0, weights)

    @property
    def mode(self) -> SearchMode:
        by_vectors, by_words = self.weights
        return "bm25" if not by_vectors else "vector" if not by_words else "hybrid"


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that was found, and how well it fits."""

    passage: Passage
    score: float

    def body(self) -> dict[str, Any]:
        """The file, its attributes and the score, as all replies have them."""
        document = self.passage.document
        return {
            "file_id": document.id,
            "filename": document.name,
            "score": round(self.score, 6),
            "attributes": dict(document.metadata),
        }


async def search_stores(
    knowledge: KnowledgeLibrary, stores: Sequence[Collection], queries: Sequence[str], wanted: StoreSearch
) -> list[Hit]:
    """The best passages for any of the queries in any of the stores; each passage once, with its best score."""
    best: dict[tuple[str, int], Hit] = {}
    for store in stores:
        for hit in await _search(knowledge, store, queries, wanted):
            key = (store.id, hit.passage.stored.key)
            if hit.score >= wanted.threshold and (key not in best or best[key].score < hit.score):
                best[key] = hit
    return sorted(best.values(), key=lambda hit: -hit.score)[: wanted.most]


async def _search(
    knowledge: KnowledgeLibrary, store: Collection, queries: Sequence[str], wanted: StoreSearch
) -> list[Hit]:
    library = await knowledge.library()
    await guard(library.use(store))
    among = None
    if wanted.filter is not None:
        among = await guard(library.matching_documents(store, wanted.filter))
        if not among:
            return []
    candidates = min(max(knowledge.config.candidates, wanted.most), MOST_CANDIDATES)
    retriever = library.retriever

    async def one(query: str) -> list[Hit]:
        found = await guard(
            retriever.search(
                store,
                query,
                mode=wanted.mode,
                candidates=candidates,
                keep=wanted.most,
                rerank=wanted.rerank,
                among=among,
                weights=wanted.weights,
            )
        )
        knowledge.metrics.searched(found.seconds)
        return [Hit(passage, retriever.relevance(passage, wanted.weights)) for passage in found.passages]

    hits = await asyncio.gather(*map(one, queries))
    return [hit for each in hits for hit in each]
