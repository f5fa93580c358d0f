"""/v1/collections: a tenant's documents, and searching them.

A collection is named by its id or its name, and always looked up among the caller's own: one that belongs to somebody
else is answered exactly as one that does not exist.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.api.files import FORM_ROOM
from penstock.gateway.api.pages import listed
from penstock.gateway.batches.multipart import read_form
from penstock.gateway.decoding import convert_query, decode, decode_query
from penstock.gateway.encoding import metered
from penstock.gateway.exchange import Exchange
from penstock.gateway.rag import SearchRequest
from penstock.gateway.retrieving import find_collection, guard, passage_body, position_body, search
from penstock.gateway.schemas import Metadata
from penstock.gateway.service import Service
from penstock.knowledge.model import (
    STATUSES,
    Collection,
    CollectionExists,
    Document,
    StoredChunk,
    TooMany,
)
from penstock.knowledge.reading import MEDIA_TYPES, media_type_of
from penstock.protocol.errors import InvalidRequest, NotFound, PayloadTooLarge, RateLimitExceeded, UnsupportedMediaType

PREFIX = "/v1/collections/"
PAGE = 100
FORM = "multipart/form-data"
DocumentName = Annotated[str, Meta(min_length=1, max_length=512)]
Link = Annotated[str, Meta(max_length=2048)]


class CollectionRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/collections"""

    name: Annotated[str, Meta(pattern="^(?!col_)[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    description: Annotated[str, Meta(max_length=2048)] = ""
    metadata: Metadata | None = None
    chunk_tokens: Annotated[int, Meta(ge=32, le=8192)] | None = None
    overlap_tokens: Annotated[int, Meta(ge=0, le=4096)] | None = None


class DocumentRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """A document as JSON; files are sent as they are, under their own content type."""

    name: DocumentName
    text: str
    media_type: str = "text/plain"
    url: Link = ""
    metadata: Metadata | None = None


class FileQuery(Struct, forbid_unknown_fields=True):
    """What a file that is sent as it is says about itself."""

    name: DocumentName = "document"
    url: Link = ""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A document as it arrived."""

    body: bytes
    name: str
    charset: str
    media_type: str
    url: str
    metadata: dict[str, str] = field(default_factory=dict)


class PageQuery(Struct, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=PAGE)] = PAGE
    after: Annotated[str, Meta(max_length=128)] = ""
    """The last id of the page before."""


class DocumentsQuery(PageQuery):
    status: Literal["queued", "processing", "ready", "failed", "duplicate"] | None = None


_ID = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
_collection_request = msgspec.json.Decoder(CollectionRequest)
_document_request = msgspec.json.Decoder(DocumentRequest)
_search_request = msgspec.json.Decoder(SearchRequest)


async def create_collection(service: Service, exchange: Exchange) -> None:
    request = decode(_collection_request, await exchange.body(service.settings.body_limit))
    config = service.knowledge.config
    chunk, overlap = request.chunk_tokens or config.chunk_tokens, request.overlap_tokens
    if overlap is None:
        overlap = min(config.overlap_tokens, chunk // 4)
    if overlap * 2 > chunk:
        raise InvalidRequest("`overlap_tokens` is at most half of `chunk_tokens`.", param="overlap_tokens")
    library = await service.knowledge.library()
    made = await _guard(
        library.create_collection(
            exchange.caller.tenant,
            request.name,
            description=storable(request.description),
            metadata=request.metadata,
            chunk_tokens=chunk,
            overlap_tokens=overlap,
        )
    )
    await exchange.reply_json(_collection(made))


async def list_collections(service: Service, exchange: Exchange) -> None:
    asked = decode_query(PageQuery, exchange.scope)
    catalogue = (await service.knowledge.library()).catalogue
    tenant, limit, after = exchange.caller.tenant, asked.limit, storable(asked.after)
    if after and (known := await guard(catalogue.collection(tenant, after))) is not None:
        after = known.name
    found = await guard(catalogue.collections(tenant, limit=limit + 1, after=after))
    await exchange.reply_json(listed([_collection(one) for one in found], limit))


async def get_collection(service: Service, exchange: Exchange) -> None:
    collection, _ = await _named(service, exchange)
    counts, chunks, tokens = await guard((await service.knowledge.library()).catalogue.counts(collection.id))
    documents = {status: counts.get(status, 0) for status in STATUSES}
    await exchange.reply_json(
        {
            **_collection(collection),
            "documents": {**documents, "total": sum(documents.values())},
            "chunks": chunks,
            "tokens": tokens,
        }
    )


async def delete_collection(service: Service, exchange: Exchange) -> None:
    collection, _ = await _named(service, exchange)
    await guard((await service.knowledge.library()).remove_collection(collection))
    await exchange.reply_json({"id": collection.id, "object": "collection", "deleted": True})


async def search_collection(service: Service, exchange: Exchange) -> None:
    request = decode(_search_request, await exchange.body(service.settings.body_limit))
    collection, _ = await _named(service, exchange)
    encoder = service.knowledge.encoder()
    tokens = sum(map(len, await encoder.tokenize([request.query])))
    work = search(service.knowledge, collection, request.query, request)
    found = await metered(service, exchange, encoder, 1, tokens, work)
    await exchange.reply_json(
        {
            "object": "list",
            "collection": collection.id,
            "data": [{**passage_body(passage), "text": passage.stored.chunk.text} for passage in found.passages],
            "timings_ms": {step: round(seconds * 1000, 2) for step, seconds in found.seconds.items()},
        }
    )


async def add_document(service: Service, exchange: Exchange) -> None:
    collection, _ = await _named(service, exchange)
    await _put(service, exchange, collection, None)


async def put_document(service: Service, exchange: Exchange) -> None:
    collection, (id,) = await _named(service, exchange)
    if not _ID.fullmatch(id):
        raise InvalidRequest("The id of a document has letters, digits and . _ : @ - (at most 128).", param="document")
    await _put(service, exchange, collection, id)


async def list_documents(service: Service, exchange: Exchange) -> None:
    collection, _ = await _named(service, exchange)
    asked = decode_query(DocumentsQuery, exchange.scope)
    catalogue = (await service.knowledge.library()).catalogue
    found = await guard(
        catalogue.documents(collection.id, limit=asked.limit + 1, after=storable(asked.after), status=asked.status)
    )
    await exchange.reply_json(listed([_document(one) for one in found], asked.limit))


async def get_document(service: Service, exchange: Exchange) -> None:
    _, document = await _named_document(service, exchange)
    await exchange.reply_json(_document(document))


async def delete_document(service: Service, exchange: Exchange) -> None:
    collection, document = await _named_document(service, exchange)
    await guard((await service.knowledge.library()).remove_document(collection, document))
    await exchange.reply_json({"id": document.id, "object": "collection.document", "deleted": True})


async def list_chunks(service: Service, exchange: Exchange) -> None:
    collection, document = await _named_document(service, exchange)
    found = await guard((await service.knowledge.library()).chunks(collection, document))
    await exchange.reply_json(listed([_chunk(one, document) for one in found], len(found)))


async def get_chunk(service: Service, exchange: Exchange) -> None:
    collection, (id,) = await _named(service, exchange)
    found = await guard((await service.knowledge.library()).chunk(collection, id))
    if found is None:
        raise NotFound(f"There is no chunk `{id[:128]}` in this collection.")
    await exchange.reply_json(_chunk(*found))


async def _put(service: Service, exchange: Exchange, collection: Collection, id: str | None) -> None:
    async with service.uploads:
        sent = await _sent(service, exchange)
        library = await service.knowledge.library()
        document, queued = await _guard(
            library.put_document(
                collection,
                sent.body,
                name=storable(sent.name),
                media_type=sent.media_type,
                charset=sent.charset,
                id=id,
                url=storable(sent.url),
                metadata=sent.metadata,
            )
        )
    await exchange.reply_json({**_document(document), "unchanged": not queued})


async def _sent(service: Service, exchange: Exchange) -> _Sent:
    """A document in whichever of the three forms it came: JSON, a form with a file, or the file itself."""
    said = (exchange.header(b"content-type") or b"").decode("latin-1")
    kind, limit = said.partition(";")[0].strip().lower(), service.knowledge.config.document_limit
    body = await exchange.body(limit + (FORM_ROOM if kind == FORM else 0))
    if kind == "application/json":
        request = decode(_document_request, body)
        media_type = request.media_type if request.media_type in MEDIA_TYPES else None
        body, said = request.text.encode("utf-8", "replace"), request.media_type
        sent = _Sent(body, request.name, "", media_type or "", request.url, request.metadata or {})
    elif kind == FORM:
        form = await asyncio.to_thread(read_form, said.encode("latin-1"), body)
        fields = {name: field.content.decode("utf-8", "replace") for name, field in form.items() if name != "file"}
        if "file" not in form:
            raise InvalidRequest("Missing required parameter: `file`.", param="file", code="missing_parameter")
        file = form["file"]
        named = convert_query(FileQuery, {"name": file.filename or "document", **fields})
        said, media_type = file.filename, media_type_of("", named.name) or media_type_of("", file.filename)
        sent = _Sent(file.content, named.name, "", media_type or "", named.url)
    else:
        named = decode_query(FileQuery, exchange.scope)
        media_type = media_type_of(said, named.name)
        sent = _Sent(body, named.name, _charset(said), media_type or "", named.url)
    if not sent.media_type:
        raise UnsupportedMediaType(
            f"Documents are {', '.join(MEDIA_TYPES)}, not `{said[:128] or 'unknown'}`; say which in `content-type`.",
            param="media_type",
        )
    if not sent.body.strip():
        raise InvalidRequest("The document is empty.", param="text")
    if len(sent.body) > limit:
        raise PayloadTooLarge(limit=limit, size=len(sent.body))
    return sent


async def _guard(work: Any) -> Any:
    try:
        return await guard(work)
    except InvalidRequest as error:
        if isinstance(error.__cause__, CollectionExists):
            raise InvalidRequest(error.message, param="name", code="name_taken") from error
        if isinstance(error.__cause__, TooMany):
            raise RateLimitExceeded(error.message, code="too_many", retry_after=30) from error
        raise


async def _named(service: Service, exchange: Exchange) -> tuple[Collection, list[str]]:
    """The collection of the path, and the ids that follow it."""
    name, *rest = exchange.path.removeprefix(PREFIX).split("/")
    if exchange.method != "PUT" and any(not _ID.fullmatch(id) for id in rest[1:2]):
        raise NotFound(f"There is no `{rest[1][:128]}` in a collection.")
    return await find_collection(service.knowledge, exchange.caller.tenant, name), rest[1:2]


async def _named_document(service: Service, exchange: Exchange) -> tuple[Collection, Document]:
    collection, (id,) = await _named(service, exchange)
    found = await guard((await service.knowledge.library()).catalogue.document(collection.id, id))
    if found is None:
        raise NotFound(f"There is no document `{id[:128]}` in this collection.")
    return collection, found


def storable(text: str) -> str:
    """What every store can hold."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def _charset(content_type: str) -> str:
    for part in content_type.split(";")[1:]:
        name, _, value = part.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip('"')[:32]
    return ""


def _collection(collection: Collection) -> dict[str, Any]:
    return {
        "id": collection.id,
        "object": "collection",
        "name": collection.name,
        "description": collection.description,
        "metadata": collection.metadata,
        "embedding_model": collection.embedding_model,
        "dimensions": collection.dimensions,
        "chunk_tokens": collection.chunk_tokens,
        "overlap_tokens": collection.overlap_tokens,
        "created_at": int(collection.created_at),
    }


def _document(document: Document) -> dict[str, Any]:
    return {
        "id": document.id,
        "object": "collection.document",
        "collection": document.collection,
        "name": document.name,
        "url": document.url or None,
        "media_type": document.media_type,
        "bytes": document.size,
        "sha256": document.digest,
        "metadata": document.metadata,
        "status": document.status,
        "error": document.error or None,
        "duplicate_of": document.duplicate_of or None,
        "chunks": document.chunks,
        "chunks_done": document.chunks_done,
        "tokens": document.tokens,
        "created_at": int(document.created_at),
        "updated_at": int(document.updated_at),
    }


def _chunk(stored: StoredChunk, document: Document) -> dict[str, Any]:
    chunk = stored.chunk
    return {
        "id": stored.id,
        "object": "collection.chunk",
        "document_id": document.id,
        "document": document.name,
        "heading": chunk.heading,
        "text": chunk.text,
        "tokens": chunk.tokens,
        "position": position_body(chunk),
    }
