"""/v1/vector_stores/{vector_store}/files: documents of a store, by the ids of the files they were made from. Documents
that came through /v1/collections are there too, under their own ids."""

from __future__ import annotations

import msgspec

from penstock.gateway.app.decoding import decode, decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.pagination import NoQuery
from penstock.gateway.rag.collection_endpoints import storable
from penstock.gateway.rag.library import KnowledgeLibrary
from penstock.gateway.rag.retrieval import guard
from penstock.gateway.rag.vector_stores.attachment import Attachment, named_store
from penstock.gateway.rag.vector_stores.schemas import (
    StoreFileChange,
    StoreFileRequest,
    StoreFilesQuery,
    chunk_sizes,
)
from penstock.gateway.rag.vector_stores.shown import POLL_AFTER, content_page, file_body, page_body, statuses
from penstock.knowledge.entities import Collection, Document
from penstock.knowledge.pages import Page
from penstock.protocol.errors import NotFound

_create = msgspec.json.Decoder(StoreFileRequest)
_change = msgspec.json.Decoder(StoreFileChange)


class VectorStoreFileEndpoints:
    """The files of a store."""

    def __init__(self, knowledge: KnowledgeLibrary, attachment: Attachment, body_limit: int) -> None:
        self._knowledge = knowledge
        self._attachment = attachment
        self._body_limit = body_limit

    async def add_store_file(self, exchange: Exchange) -> None:
        request = decode(_create, await exchange.body(self._body_limit))
        store, _ = await named_store(self._knowledge, exchange)
        chunks = chunk_sizes(request.chunking_strategy)
        file = await self._attachment.find(exchange, request.file_id, "file_id")
        made = await self._attachment.add(exchange, store, file, request.attributes or {}, chunks, refuse=True)
        await self._reply(exchange, store, made)

    async def list_store_files(self, exchange: Exchange) -> None:
        store, _ = await named_store(self._knowledge, exchange)
        await reply_files(self._knowledge, exchange, store, None)

    async def get_store_file(self, exchange: Exchange) -> None:
        decode_query(NoQuery, exchange.scope)
        store, document = await self._named(exchange)
        await self._reply(exchange, store, document)

    async def change_store_file(self, exchange: Exchange) -> None:
        change = decode(_change, await exchange.body(self._body_limit))
        _, document = await self._named(exchange)
        catalogue = (await self._knowledge.library()).catalogue
        attributes = {
            storable(key): storable(value) if isinstance(value, str) else value
            for key, value in (change.attributes or {}).items()
        }
        await guard(catalogue.describe_document(document, name=document.name, url=document.url, metadata=attributes))
        await self._reply(exchange, *await self._named(exchange))

    async def remove_store_file(self, exchange: Exchange) -> None:
        """The file itself stays."""
        decode_query(NoQuery, exchange.scope)
        store, document = await self._named(exchange)
        await guard((await self._knowledge.library()).remove_document(store, document))
        await exchange.reply_json({"id": document.id, "object": "vector_store.file.deleted", "deleted": True})

    async def store_file_content(self, exchange: Exchange) -> None:
        """The text that was read from the file, by chunks."""
        decode_query(NoQuery, exchange.scope)
        store, document = await self._named(exchange)
        found = await guard((await self._knowledge.library()).chunks(store, document))
        texts = [{"type": "text", "text": stored.chunk.text} for stored in found]
        about = {"file_id": document.id, "filename": document.name, "attributes": dict(document.metadata)}
        await exchange.reply_json({**content_page("file_content", texts), **about})

    async def _named(self, exchange: Exchange) -> tuple[Collection, Document]:
        store, rest = await named_store(self._knowledge, exchange)
        return store, await find_document(self._knowledge, store, rest[1])

    async def _reply(self, exchange: Exchange, store: Collection, document: Document) -> None:
        body = file_body(store, document)
        if body["status"] == "in_progress":
            exchange.extra_headers.append(POLL_AFTER)
        await exchange.reply_json(body)


async def find_document(
    knowledge: KnowledgeLibrary, store: Collection, id: str, *, param: str | None = None
) -> Document:
    library = await knowledge.library()
    found = await guard(library.catalogue.document(store.id, storable(id)))
    if found is None:
        raise NotFound(f"There is no file `{id[:128]}` in this vector store.", param=param, code="file_not_found")
    return found


async def reply_files(knowledge: KnowledgeLibrary, exchange: Exchange, store: Collection, batch: str | None) -> None:
    """A page of the files of a store, or of one batch."""
    asked = decode_query(StoreFilesQuery, exchange.scope)
    marks = {}
    for name in ("after", "before"):
        if (id := getattr(asked, name)) is not None:
            cursor = await find_document(knowledge, store, id, param=name)
            marks[name] = (cursor.created_at, cursor.id)
    page = Page(asked.limit, asked.order == "desc", **marks)
    listing = (await knowledge.library()).listing
    found = await guard(listing.documents(store.id, page, statuses=statuses(asked.filter), batch=batch))
    bodies = [file_body(store, document) for document in found]
    await exchange.reply_json(page_body(bodies, asked.limit, backwards=page.backwards))
