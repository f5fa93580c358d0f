"""/v1/vector_stores: create, list, change, delete, search.

A vector store has a name that people choose freely; the collection behind it has one that is unique and fits into
paths, made from that. Rules about who may use which collection apply to the latter.
"""

from __future__ import annotations

import dataclasses
import re
import uuid
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.gateway.accounting.encoder_work import EncoderWork
from penstock.gateway.accounting.targets import in_time
from penstock.gateway.app.decoding import decode, decode_query, not_supported
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.pagination import NoQuery
from penstock.gateway.rag.collection_endpoints import guarded, storable
from penstock.gateway.rag.library import KnowledgeLibrary
from penstock.gateway.rag.retrieval import allowed, guard
from penstock.gateway.rag.vector_stores.attachment import Attachment, find_store, named_store
from penstock.gateway.rag.vector_stores.schemas import (
    StoresQuery,
    VectorStoreChange,
    VectorStoreRequest,
    VectorStoreSearchRequest,
    attribute_filter,
    chunk_sizes,
)
from penstock.gateway.rag.vector_stores.search import StoreSearch, search_stores
from penstock.gateway.rag.vector_stores.shown import POLL_AFTER, content_page, page_body, store_body
from penstock.identity import Caller
from penstock.knowledge.entities import Collection
from penstock.knowledge.pages import Page
from penstock.protocol.errors import InvalidRequest, PermissionDenied
from penstock.routing.remote_embedder import RemoteEmbedder, estimate

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_NAME = 48
"""Characters of a chosen name in that of a collection."""
PAGE = 100
_create = msgspec.json.Decoder(VectorStoreRequest)
_change = msgspec.json.Decoder(VectorStoreChange)
_search = msgspec.json.Decoder(VectorStoreSearchRequest)


class VectorStoreEndpoints:
    """The vector stores of a tenant."""

    def __init__(
        self, knowledge: KnowledgeLibrary, attachment: Attachment, encoder_work: EncoderWork, body_limit: int
    ) -> None:
        self._knowledge = knowledge
        self._attachment = attachment
        self._encoder_work = encoder_work
        self._body_limit = body_limit

    async def create_vector_store(self, exchange: Exchange) -> None:
        request = decode(_create, await exchange.body(self._body_limit))
        config = self._knowledge.config
        size, overlap = chunk_sizes(request.chunking_strategy)
        if not size:
            size, overlap = config.chunk_tokens, min(config.overlap_tokens, config.chunk_tokens // 4)
        found = [await self._attachment.find(exchange, id, "file_ids") for id in dict.fromkeys(request.file_ids or ())]
        store = await self._created(
            exchange.caller,
            storable(request.name or ""),
            description=storable(request.description or ""),
            metadata=request.metadata,
            chunk_tokens=size,
            overlap_tokens=overlap,
            expires_days=0 if request.expires_after is None else request.expires_after.days,
        )
        try:
            for file in found:
                await self._attachment.add(exchange, store, file, {}, (0, 0), refuse=False)
        except BaseException:  # the client never learns its id
            await guard((await self._knowledge.library()).remove_collection(store))
            raise
        await self._reply(exchange, store)

    async def list_vector_stores(self, exchange: Exchange) -> None:
        asked = decode_query(StoresQuery, exchange.scope)
        library, caller, limit = await self._knowledge.library(), exchange.caller, asked.limit
        marks = {}
        for name in ("after", "before"):
            if (id := getattr(asked, name)) is not None:
                cursor = await find_store(self._knowledge, caller, id, param=name)
                marks[name] = (cursor.created_at, cursor.id)
        page = Page(PAGE, asked.order == "desc", **marks)
        found: list[Collection] = []
        while len(found) <= limit:  # some may not exist for the caller
            rows = await guard(library.listing.collections(caller.tenant, page))
            more = len(rows) > PAGE
            rows = rows[-PAGE:] if page.backwards else rows[:PAGE]
            seen = [one for one in rows if allowed(caller, one)]
            found = [*seen, *found] if page.backwards else [*found, *seen]
            if not more:
                break
            edge = rows[0] if page.backwards else rows[-1]
            mark = (edge.created_at, edge.id)
            page = dataclasses.replace(page, before=mark) if page.backwards else dataclasses.replace(page, after=mark)
        found = found[-limit - 1 :] if page.backwards else found[: limit + 1]
        totals = await guard(library.listing.totals([one.id for one in found]))
        bodies = [store_body(one, totals[one.id], expired=library.expired(one)) for one in found]
        await exchange.reply_json(page_body(bodies, limit, backwards=page.backwards))

    async def get_vector_store(self, exchange: Exchange) -> None:
        decode_query(NoQuery, exchange.scope)
        store, _ = await named_store(self._knowledge, exchange)
        await self._reply(exchange, store)

    async def change_vector_store(self, exchange: Exchange) -> None:
        change = decode(_change, await exchange.body(self._body_limit))
        store, _ = await named_store(self._knowledge, exchange)
        title, metadata, days = store.title, store.metadata, store.expires_days
        if change.name is not UNSET:
            title = storable(change.name or "")
        if change.metadata is not UNSET:
            metadata = change.metadata or {}
        if change.expires_after is not UNSET:
            days = 0 if change.expires_after is None else change.expires_after.days
        library = await self._knowledge.library()
        if library.expired(store):
            raise InvalidRequest(f"`{store.id}` has expired.")
        await guard(library.catalogue.describe_collection(store, title=title, metadata=metadata, expires_days=days))
        await self._reply(exchange, await find_store(self._knowledge, exchange.caller, store.id))

    async def delete_vector_store(self, exchange: Exchange) -> None:
        decode_query(NoQuery, exchange.scope)
        store, _ = await named_store(self._knowledge, exchange)
        await guard((await self._knowledge.library()).remove_collection(store))
        await exchange.reply_json({"id": store.id, "object": "vector_store.deleted", "deleted": True})

    async def search_vector_store(self, exchange: Exchange) -> None:
        request = decode(_search, await exchange.body(self._body_limit))
        if request.rewrite_query:
            raise not_supported("rewrite_query", "the query is searched as it is")
        wanted = StoreSearch.of(
            attribute_filter(request.filters), request.max_num_results, request.ranking_options, "ranking_options"
        )
        store, _ = await named_store(self._knowledge, exchange)
        self._knowledge.permit(exchange)
        queries = [request.query] if isinstance(request.query, str) else request.query
        encoder = self._knowledge.encoder()
        if isinstance(encoder, RemoteEmbedder):
            tokens = estimate(queries)
        else:
            async with in_time(exchange):
                most = (await encoder.open()).max_model_len
                tokens = sum(map(len, await encoder.tokenize(queries, most, tenant=exchange.caller.tenant)))
        work = search_stores(self._knowledge, [store], queries, wanted)
        hits = await self._encoder_work.run(exchange, encoder, len(queries), tokens, work)
        entries = [{**hit.body(), "content": [{"type": "text", "text": hit.passage.stored.chunk.text}]} for hit in hits]
        await exchange.reply_json({**content_page("search_results", entries), "search_query": queries})

    async def _created(self, caller: Caller, title: str, **described: Any) -> Collection:
        """A collection under a name that is free."""
        stem, mark = _NOT_IN_NAMES.sub("-", title)[:_NAME].strip("-._"), uuid.uuid4().hex[:12]
        if not stem or stem.startswith("col_"):
            return await self._made(caller, f"store-{mark}", title=title, **described)
        try:
            return await self._made(caller, stem, title=title, **described)
        except InvalidRequest as error:
            if error.code != "name_taken":
                raise
        return await self._made(caller, f"{stem}-{mark}", title=title, **described)

    async def _made(self, caller: Caller, name: str, **described: Any) -> Collection:
        if not caller.access.allows("collection", name, caller.tenant):
            raise PermissionDenied(f"You may not create a collection called `{name}`.", param="name")
        library = await self._knowledge.library()
        made: Collection = await guarded(library.create_collection(caller.tenant, name, **described))
        return made

    async def _reply(self, exchange: Exchange, store: Collection) -> None:
        library = await self._knowledge.library()
        totals = await guard(library.listing.totals([store.id]))
        body = store_body(store, totals[store.id], expired=library.expired(store))
        if body["status"] == "in_progress":
            exchange.extra_headers.append(POLL_AFTER)
        await exchange.reply_json(body)
