"""Vectors and scores of texts from a remote model, in the terms of an encoder that runs here.

An embedding model scores pairs by the cosine of their vectors; a rerank model is asked for scores. Invariant: lists of
any length are sent in bounded requests, a few at a time, and come back in order; vectors all have one length, the
configured one where there is one.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, TypeVar

from penstock.backends.embedder import Embeddings, Scores
from penstock.identity.labels import NO_DEMAND, Demand, Requirement
from penstock.protocol.errors import EngineUnavailable, InvalidRequest
from penstock.routing.remotes import RemoteModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Matrix = NDArray[np.float32]

T = TypeVar("T")

AT_ONCE = 4
"""Requests of one list that servers have at a time."""
CHARACTERS_PER_TOKEN = 4
"""For texts whose server does not tell its tokens."""


class RemoteEmbedder:
    """A remote model that is declared as an embedding or rerank model."""

    def __init__(self, model: RemoteModel) -> None:
        self.model = model
        self._dimensions = model.dimensions

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def up(self) -> bool:
        return self.model.ready

    @property
    def waiting(self) -> int:
        return self.model.in_flight

    def unmet(self, demand: Demand) -> list[Requirement]:
        """What of a demand one of its servers does not meet; empty: any of them may get the request's texts, as the
        gateway's own uses need it, which do not say for whom they ask. `vectors` and `rerank` choose a server."""
        lacking = (demand.unmet(member.labels) for member in self.model.members)
        return next((missing for missing in lacking if missing), [])

    async def open(self) -> None:
        """It is there, or a request will say that it is not."""

    async def close(self) -> None:
        """Its servers are closed with the registry."""

    async def embed(self, texts: Sequence[str], *, priority: int = 0) -> Embeddings:
        """Unit vectors, for the gateway's own use; the caller has checked `unmet`."""
        import numpy as np

        rows, tokens = await self.vectors(texts, demand=NO_DEMAND)
        matrix = np.asarray(rows, dtype=np.float32)
        lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
        each = max(tokens // max(len(texts), 1), 1)
        return Embeddings(matrix / np.maximum(lengths, 1e-12), [each] * len(texts))

    async def vectors(
        self,
        texts: Sequence[str],
        *,
        dimensions: int | None = None,
        request_id: str = "",
        demand: Demand,
    ) -> tuple[list[list[float]], int]:
        """The vectors as the server gives them, and the tokens of all texts. `dimensions`: of shortened vectors."""
        if self.model.kind != "embedding":
            raise InvalidRequest(
                f"`{self.name}` scores documents for a query (/v1/rerank) and has no vectors.", param="model"
            )
        size, id = self.model.texts_per_request, request_id or uuid.uuid4().hex
        turns = asyncio.Semaphore(AT_ONCE)

        async def part(some: Sequence[str]) -> tuple[list[list[float]], int]:
            async with turns:
                found = await self.model.embed(some, id, demand, dimensions=dimensions)
            return found.vectors, found.prompt_tokens or estimate(some)

        parts = await gathered([part(texts[start : start + size]) for start in range(0, len(texts), size)])
        rows = [row for vectors, _ in parts for row in vectors]
        wanted = dimensions or self._dimensions or len(rows[0])
        if any(len(row) != wanted for row in rows):
            raise EngineUnavailable(
                f"`{self.name}` gave vectors of {len(rows[0])} numbers instead of {wanted}.", retry_after=60.0
            )
        if dimensions is None:
            self._dimensions = wanted
        return rows, sum(tokens for _, tokens in parts)

    async def rerank(self, query: str, documents: Sequence[str], *, demand: Demand, request_id: str = "") -> Scores:
        """The score of each document for a query."""
        if self.model.kind == "rerank":
            size, id = self.model.texts_per_request, request_id or uuid.uuid4().hex
            parts = await gathered(
                [
                    self.model.rerank(query, documents[start : start + size], id, demand)
                    for start in range(0, len(documents), size)
                ]
            )
            values = [value for part in parts for value in part.scores]
            tokens = sum(part.prompt_tokens for part in parts)
            return Scores(values, tokens or estimate([query] * len(documents)) + estimate(documents))
        return await self.score_pairs([query] * len(documents), documents, request_id=request_id, demand=demand)

    async def score_pairs(
        self, queries: Sequence[str], documents: Sequence[str], *, demand: Demand, request_id: str = ""
    ) -> Scores:
        """The score of each query with the document beside it."""
        import numpy as np

        if self.model.kind == "rerank":
            by_query: dict[str, list[int]] = {}
            for index, query in enumerate(queries):
                by_query.setdefault(query, []).append(index)
            values, tokens = [0.0] * len(documents), 0
            for query, places in by_query.items():
                found = await self.rerank(
                    query, [documents[place] for place in places], request_id=request_id, demand=demand
                )
                tokens += found.tokens
                for place, value in zip(places, found.values, strict=True):
                    values[place] = value
            return Scores(values, tokens)
        sides = list(dict.fromkeys((*queries, *documents)))
        rows, tokens = await self.vectors(sides, request_id=request_id, demand=demand)
        matrix = np.asarray(rows, dtype=np.float32)
        matrix /= np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-12)
        at = {text: index for index, text in enumerate(sides)}
        pairs = zip(queries, documents, strict=True)
        return Scores([float(matrix[at[query]] @ matrix[at[document]]) for query, document in pairs], tokens)


def estimate(texts: Sequence[str]) -> int:
    return sum(len(text) // CHARACTERS_PER_TOKEN + 1 for text in texts)


async def gathered(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results; when one fails the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
