"""/v1/collections/{collection}/documents: sent as JSON, a form or a plain file, processed in the background."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.app.decoding import convert_query, decode, decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.multipart import FORM_ROOM, read_form
from penstock.gateway.app.pagination import NoQuery, listed
from penstock.gateway.app.uploads import UploadSlots
from penstock.gateway.generation.schemas import Metadata
from penstock.gateway.rag.collection_endpoints import PageQuery, guarded, named_collection, storable
from penstock.gateway.rag.library import KnowledgeLibrary
from penstock.gateway.rag.retrieval import guard, position_body
from penstock.knowledge.entities import Collection, Document, StoredChunk
from penstock.knowledge.readers import MEDIA_TYPES, media_type_of
from penstock.protocol.errors import InvalidRequest, NotFound, PayloadTooLarge, UnsupportedMediaType

FORM = "multipart/form-data"
DocumentName = Annotated[str, Meta(min_length=1, max_length=512)]
Link = Annotated[str, Meta(max_length=2048)]
DOCUMENT_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "Text, Markdown, HTML or PDF, by its name."},
        "name": {"type": "string", "minLength": 1, "maxLength": 512},
        "url": {"type": "string", "maxLength": 2048},
    },
}
_ID = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
_LINK = re.compile(r"(?:https?://|(?![^/?#]*:))[^\x00-\x20\x7f]*|", re.I)
"""Clients turn the URLs of citations into links, so schemes that execute code (`javascript:`) are refused."""


class DocumentRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """A document as JSON; files are sent with their own content type instead."""

    name: DocumentName
    text: str
    media_type: str = "text/plain"
    url: Link = ""
    metadata: Metadata | None = None


class FileQuery(Struct, forbid_unknown_fields=True):
    """Describes a file that is sent as the request body."""

    name: DocumentName = "document"
    url: Link = ""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A document as it was received."""

    body: bytes
    name: str
    charset: str
    media_type: str
    url: str
    metadata: dict[str, str] = field(default_factory=dict)


class DocumentsQuery(PageQuery):
    status: Literal["queued", "processing", "ready", "failed", "duplicate", "cancelled"] | None = None


_document_request = msgspec.json.Decoder(DocumentRequest)


class DocumentEndpoints:
    """The documents of a collection."""

    def __init__(self, knowledge: KnowledgeLibrary, uploads: UploadSlots) -> None:
        self._knowledge = knowledge
        self._uploads = uploads

    async def add_document(self, exchange: Exchange) -> None:
        collection, _ = await named_collection(self._knowledge, exchange)
        await self._put(exchange, collection, None)

    async def put_document(self, exchange: Exchange) -> None:
        collection, (id,) = await named_collection(self._knowledge, exchange)
        if not _ID.fullmatch(id):
            raise InvalidRequest(
                "The id of a document has letters, digits and . _ : @ - (at most 128).", param="document"
            )
        await self._put(exchange, collection, id)

    async def list_documents(self, exchange: Exchange) -> None:
        collection, _ = await named_collection(self._knowledge, exchange)
        asked = decode_query(DocumentsQuery, exchange.scope)
        catalogue = (await self._knowledge.library()).catalogue
        found = await guard(
            catalogue.documents(collection.id, limit=asked.limit + 1, after=storable(asked.after), status=asked.status)
        )
        await exchange.reply_json(listed([_document(one) for one in found], asked.limit))

    async def get_document(self, exchange: Exchange) -> None:
        _, document = await self._named_document(exchange)
        await exchange.reply_json(_document(document))

    async def delete_document(self, exchange: Exchange) -> None:
        collection, document = await self._named_document(exchange)
        await guard((await self._knowledge.library()).remove_document(collection, document))
        await exchange.reply_json({"id": document.id, "object": "collection.document", "deleted": True})

    async def list_chunks(self, exchange: Exchange) -> None:
        collection, document = await self._named_document(exchange)
        found = await guard((await self._knowledge.library()).chunks(collection, document))
        await exchange.reply_json(listed([_chunk(one, document) for one in found], len(found)))

    async def get_chunk(self, exchange: Exchange) -> None:
        collection, (id,) = await named_collection(self._knowledge, exchange)
        found = await guard((await self._knowledge.library()).chunk(collection, id))
        if found is None:
            raise NotFound(f"There is no chunk `{id[:128]}` in this collection.")
        await exchange.reply_json(_chunk(*found))

    async def _put(self, exchange: Exchange, collection: Collection, id: str | None) -> None:
        self._knowledge.permit(exchange)
        limit = self._knowledge.config.document_limit + (FORM_ROOM if _media_type(exchange) == FORM else 0)
        async with exchange.upload(limit) as arrived, self._uploads.slot(exchange.caller.tenant):
            sent = await self._sent(exchange, await arrived.read())
            library = await self._knowledge.library()
            document, queued = await guarded(
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

    async def _sent(self, exchange: Exchange, body: bytes) -> _Sent:
        """A document that was sent as JSON, as a form with a file, or as the file itself."""
        said = (exchange.header(b"content-type") or b"").decode("latin-1")
        kind, limit = _media_type(exchange), self._knowledge.config.document_limit
        if kind in ("application/json", FORM):
            decode_query(NoQuery, exchange.scope)  # these formats have no query parameters
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
                f"Documents are {', '.join(MEDIA_TYPES)}, not `{said[:128] or 'unknown'}`; say which in "
                "`content-type`.",
                param="media_type",
            )
        if not sent.body.strip():
            raise InvalidRequest("The document is empty.", param="text")
        if not _LINK.fullmatch(sent.url):
            raise InvalidRequest("`url` begins with http:// or https://, or is a path.", param="url")
        if len(sent.body) > limit:
            raise PayloadTooLarge(limit=limit, size=len(sent.body))
        return sent

    async def _named_document(self, exchange: Exchange) -> tuple[Collection, Document]:
        collection, (id,) = await named_collection(self._knowledge, exchange)
        catalogue = (await self._knowledge.library()).catalogue
        found = await guard(catalogue.document(collection.id, id)) if _ID.fullmatch(id) else None
        if found is None:
            raise NotFound(f"There is no document `{id[:128]}` in this collection.")
        return collection, found


def _media_type(exchange: Exchange) -> str:
    return (exchange.header(b"content-type") or b"").decode("latin-1").partition(";")[0].strip().lower()


def _charset(content_type: str) -> str:
    for part in content_type.split(";")[1:]:
        name, _, value = part.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip('"')[:32]
    return ""


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
