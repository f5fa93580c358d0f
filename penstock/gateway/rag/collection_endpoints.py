"""/v1/collections: the collections of a tenant, and search.

A collection is addressed by its id or its name, and looked up among the caller's own: a collection of another tenant is
answered exactly like one that does not exist.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.accounting.encoder_work import EncoderWork
from penstock.gateway.accounting.targets import in_time
from penstock.gateway.app.decoding import decode, decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.pagination import listed
from penstock.gateway.generation.schemas import Metadata
from penstock.gateway.rag.library import KnowledgeLibrary
from penstock.gateway.rag.retrieval import allowed, find_collection, guard, passage_body, search
from penstock.gateway.rag.schemas import SearchRequest
from penstock.identity import Caller
from penstock.knowledge.entities import (
    STATUSES,
    Collection,
    CollectionExists,
    TooMany,
)
from penstock.protocol.errors import InvalidRequest, PermissionDenied, RateLimitExceeded
from penstock.routing.remote_embedder import RemoteEmbedder, estimate

PREFIX = "/v1/collections/"
PAGE = 100


class CollectionRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/collections"""

    name: Annotated[str, Meta(pattern="^(?!col_)[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    description: Annotated[str, Meta(max_length=2048)] = ""
    metadata: Metadata | None = None
    chunk_tokens: Annotated[int, Meta(ge=32, le=8192)] | None = None
    overlap_tokens: Annotated[int, Meta(ge=0, le=4096)] | None = None


class PageQuery(Struct, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=PAGE)] = PAGE
    after: Annotated[str, Meta(max_length=128)] = ""
    """The last id of the previous page."""


_collection_request = msgspec.json.Decoder(CollectionRequest)
_search_request = msgspec.json.Decoder(SearchRequest)


class CollectionEndpoints:
    """The collections of a tenant."""

    def __init__(self, knowledge: KnowledgeLibrary, encoder_work: EncoderWork, body_limit: int) -> None:
        self._knowledge = knowledge
        self._encoder_work = encoder_work
        self._body_limit = body_limit

    async def create_collection(self, exchange: Exchange) -> None:
        request = decode(_collection_request, await exchange.body(self._body_limit))
        config = self._knowledge.config
        chunk, overlap = request.chunk_tokens or config.chunk_tokens, request.overlap_tokens
        if overlap is None:
            overlap = min(config.overlap_tokens, chunk // 4)
        if overlap * 2 > chunk:
            raise InvalidRequest("`overlap_tokens` is at most half of `chunk_tokens`.", param="overlap_tokens")
        library = await self._knowledge.library()
        if not exchange.caller.access.allows("collection", request.name, exchange.caller.tenant):
            # Whether one of this name exists already must not show.
            raise PermissionDenied(f"You may not create a collection called `{request.name}`.", param="name")
        made = await guarded(
            library.create_collection(
                exchange.caller.tenant,
                request.name,
                description=storable(request.description),
                metadata=request.metadata,
                chunk_tokens=chunk,
                overlap_tokens=overlap,
            )
        )
        await exchange.reply_json(self._described(exchange.caller, made))

    async def list_collections(self, exchange: Exchange) -> None:
        asked = decode_query(PageQuery, exchange.scope)
        catalogue = (await self._knowledge.library()).catalogue
        caller, limit, after = exchange.caller, asked.limit, storable(asked.after)
        if after and (known := await guard(catalogue.collection(caller.tenant, after))) is not None:
            after = known.name if allowed(caller, known) else after
        found: list[Collection] = []
        while len(found) <= limit:
            page = await guard(catalogue.collections(caller.tenant, limit=PAGE + 1, after=after))
            found += [one for one in page if allowed(caller, one)]
            if len(page) <= PAGE:
                break
            after = page[-1].name
        await exchange.reply_json(listed([self._described(caller, one) for one in found[: limit + 1]], limit))

    async def get_collection(self, exchange: Exchange) -> None:
        collection, _ = await named_collection(self._knowledge, exchange)
        counts, chunks, tokens = await guard((await self._knowledge.library()).catalogue.counts(collection.id))
        documents = {status: counts.get(status, 0) for status in STATUSES}
        await exchange.reply_json(
            {
                **self._described(exchange.caller, collection),
                "documents": {**documents, "total": sum(documents.values())},
                "chunks": chunks,
                "tokens": tokens,
            }
        )

    async def delete_collection(self, exchange: Exchange) -> None:
        collection, _ = await named_collection(self._knowledge, exchange)
        await guard((await self._knowledge.library()).remove_collection(collection))
        await exchange.reply_json({"id": collection.id, "object": "collection", "deleted": True})

    async def search_collection(self, exchange: Exchange) -> None:
        request = decode(_search_request, await exchange.body(self._body_limit))
        collection, _ = await named_collection(self._knowledge, exchange)
        self._knowledge.permit(exchange)
        encoder = self._knowledge.encoder()
        if isinstance(encoder, RemoteEmbedder):
            tokens = estimate([request.query])
        else:
            async with in_time(exchange):
                most = (await encoder.open()).max_model_len
                tokens = sum(map(len, await encoder.tokenize([request.query], most, tenant=exchange.caller.tenant)))
        work = search(self._knowledge, collection, request.query, request)
        found = await self._encoder_work.run(exchange, encoder, 1, tokens, work)
        await exchange.reply_json(
            {
                "object": "list",
                "collection": collection.id,
                "data": [{**passage_body(passage), "text": passage.stored.chunk.text} for passage in found.passages],
                "timings_ms": {step: round(seconds * 1000, 2) for step, seconds in found.seconds.items()},
            }
        )

    def _described(self, caller: Caller, collection: Collection) -> dict[str, Any]:
        """A collection. The encoder serves it whether or not the caller may use it by itself, but has no name then."""
        encoder = collection.embedding_model
        return {
            "id": collection.id,
            "object": "collection",
            "name": collection.name,
            "description": collection.description,
            "metadata": collection.metadata,
            "embedding_model": encoder if self._knowledge.names_encoder(caller, encoder) else None,
            "dimensions": collection.dimensions,
            "chunk_tokens": collection.chunk_tokens,
            "overlap_tokens": collection.overlap_tokens,
            "created_at": int(collection.created_at),
        }


async def named_collection(knowledge: KnowledgeLibrary, exchange: Exchange) -> tuple[Collection, list[str]]:
    """The collection of the path, and the ids that follow it."""
    name, *rest = exchange.path.removeprefix(PREFIX).split("/")
    return await find_collection(knowledge, exchange.caller, name), rest[1:2]


async def guarded(work: Any) -> Any:
    try:
        return await guard(work)
    except InvalidRequest as error:
        if isinstance(error.__cause__, CollectionExists):
            raise InvalidRequest(error.message, param="name", code="name_taken") from error
        if isinstance(error.__cause__, TooMany):
            raise RateLimitExceeded(error.message, code="too_many", retry_after=30) from error
        raise


def storable(text: str) -> str:
    """The text without what some stores cannot hold: NUL and lone surrogates."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()
