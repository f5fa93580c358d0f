"""/v1/vector_stores/{vector_store}/file_batches: many files at once. All files are copied into the store before the
batch exists, so a batch never waits for anything that only the gateway that made it knows."""

from __future__ import annotations

import msgspec

from penstock.gateway.app.decoding import decode, decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.pagination import NoQuery
from penstock.gateway.rag.collection_endpoints import storable
from penstock.gateway.rag.library import KnowledgeLibrary
from penstock.gateway.rag.retrieval import guard
from penstock.gateway.rag.vector_stores.attachment import Attachment, named_store
from penstock.gateway.rag.vector_stores.file_endpoints import reply_files
from penstock.gateway.rag.vector_stores.schemas import FileBatchRequest, StoreFileRequest, chunk_sizes
from penstock.gateway.rag.vector_stores.shown import POLL_AFTER, batch_body
from penstock.knowledge.document_batches import Batch
from penstock.knowledge.entities import Collection
from penstock.protocol.errors import InvalidRequest, NotFound

_create = msgspec.json.Decoder(FileBatchRequest)


class FileBatchEndpoints:
    """The batches of a store."""

    def __init__(self, knowledge: KnowledgeLibrary, attachment: Attachment, body_limit: int) -> None:
        self._knowledge = knowledge
        self._attachment = attachment
        self._body_limit = body_limit

    async def create_file_batch(self, exchange: Exchange) -> None:
        wanted = _files(decode(_create, await exchange.body(self._body_limit)))
        store, _ = await named_store(self._knowledge, exchange)
        chunks = [chunk_sizes(one.chunking_strategy) for one in wanted]
        found = [await self._attachment.find(exchange, one.file_id, "file_ids") for one in wanted]
        for file, one, sizes in zip(found, wanted, chunks, strict=True):
            await self._attachment.add(exchange, store, file, one.attributes or {}, sizes, refuse=False)
        library = await self._knowledge.library()
        await self._reply(exchange, store, await guard(library.batches.add(store.id, [file.id for file in found])))

    async def get_file_batch(self, exchange: Exchange) -> None:
        decode_query(NoQuery, exchange.scope)
        await self._reply(exchange, *await self._named(exchange))

    async def cancel_file_batch(self, exchange: Exchange) -> None:
        decode_query(NoQuery, exchange.scope)
        store, batch = await self._named(exchange)
        library = await self._knowledge.library()
        body = batch_body(store, batch, await guard(library.batches.counts(batch)))
        if body["status"] == "in_progress":
            await guard(library.cancel(store, batch))
        await self._reply(exchange, *await self._named(exchange))

    async def list_batch_files(self, exchange: Exchange) -> None:
        store, batch = await self._named(exchange)
        await reply_files(self._knowledge, exchange, store, batch.id)

    async def _named(self, exchange: Exchange) -> tuple[Collection, Batch]:
        store, rest = await named_store(self._knowledge, exchange)
        library = await self._knowledge.library()
        found = await guard(library.batches.get(store.id, storable(rest[1])))
        if found is None:
            raise NotFound(f"There is no file batch `{rest[1][:128]}` in this vector store.")
        return store, found

    async def _reply(self, exchange: Exchange, store: Collection, batch: Batch) -> None:
        library = await self._knowledge.library()
        body = batch_body(store, batch, await guard(library.batches.counts(batch)))
        if body["status"] == "in_progress":
            exchange.extra_headers.append(POLL_AFTER)
        await exchange.reply_json(body)


def _files(request: FileBatchRequest) -> list[StoreFileRequest]:
    """The files of a batch, each once."""
    if (request.file_ids is None) is (request.files is None):
        raise InvalidRequest("A batch has either `file_ids` or `files`.", param="file_ids")
    if request.files is None:
        return [
            StoreFileRequest(file_id=id, attributes=request.attributes, chunking_strategy=request.chunking_strategy)
            for id in dict.fromkeys(request.file_ids or ())
        ]
    for name in ("attributes", "chunking_strategy"):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"With `files`, `{name}` is given for each file.", param=name)
    if len({one.file_id for one in request.files}) < len(request.files):
        raise InvalidRequest("`files` names a file twice.", param="files")
    return request.files
