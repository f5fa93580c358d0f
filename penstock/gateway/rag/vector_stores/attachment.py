"""Files of /v1/files as documents of a vector store. The content is copied when a file is added, so that a store
depends on nothing that may expire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.store_access import store_of
from penstock.gateway.app.uploads import UploadSlots
from penstock.gateway.rag.collection_endpoints import guarded, storable
from penstock.gateway.rag.library import KnowledgeLibrary
from penstock.gateway.rag.retrieval import find_collection
from penstock.gateway.rag.vector_stores.shown import UNSUPPORTED_FILE
from penstock.identity import Caller
from penstock.knowledge.entities import Attribute, Collection, Document
from penstock.knowledge.readers import MEDIA_TYPES, media_type_of
from penstock.protocol.errors import InvalidRequest, NotFound, ServiceUnavailable

PURPOSES = ("assistants", "user_data")
PREFIX = "/v1/vector_stores/"


class File(Protocol):
    """A file without its content."""

    @property
    def id(self) -> str: ...
    @property
    def filename(self) -> str: ...
    @property
    def purpose(self) -> str: ...
    @property
    def bytes(self) -> int: ...


class Files(Protocol):
    """The files of all tenants."""

    async def get(self, id: str, tenant: str, user: str | None = None) -> File | None: ...

    def pieces_of(self, id: str) -> AsyncIterator[bytes]: ...


class Unreadable(InvalidRequest):
    """A file that can never become a document."""

    code = "unsupported_file"


class Attachment:
    """Adds files to stores."""

    def __init__(self, knowledge: KnowledgeLibrary, files: Files | None, uploads: UploadSlots) -> None:
        """`files`: None where the gateway keeps none."""
        self._knowledge = knowledge
        self._files = files
        self._uploads = uploads

    async def find(self, exchange: Exchange, id: str, param: str) -> File:
        """A file of the caller; 404 where it has no such file."""
        if self._files is None:
            raise ServiceUnavailable("This gateway has no store for files.")
        with store_of("files"):
            found = await self._files.get(storable(id), exchange.caller.tenant, exchange.caller.only_user)
        if found is None:
            raise NotFound(f"There is no file `{id[:128]}`.", param=param, code="file_not_found")
        if found.purpose not in PURPOSES:
            raise InvalidRequest(
                f"`{found.id}` was sent with the purpose `{found.purpose}`; files of vector stores have the purpose "
                "`assistants` or `user_data`.",
                param=param,
            )
        return found

    async def add(
        self,
        exchange: Exchange,
        store: Collection,
        file: File,
        attributes: Mapping[str, Attribute],
        chunks: tuple[int, int],
        *,
        refuse: bool,
    ) -> Document:
        """Copy a file into a store, where it is ingested. One that cannot be a document is refused, or recorded as
        failed."""
        self._knowledge.permit(exchange)
        library = await self._knowledge.library()
        name = storable(file.filename)
        attributes = {
            storable(key): storable(value) if isinstance(value, str) else value for key, value in attributes.items()
        }
        async with self._uploads.slot(exchange.caller.tenant):  # its content is in memory meanwhile
            try:
                body = await self._content(file)
                media_type = await asyncio.to_thread(_media_type, file.filename, body)
            except Unreadable as error:
                if refuse:
                    raise
                made: Document = await guarded(
                    library.refuse_document(store, file.id, name=name, metadata=attributes, error=error.message)
                )
                return made
            document, _ = await guarded(
                library.put_document(
                    store,
                    body,
                    name=name,
                    media_type=media_type,
                    id=file.id,
                    metadata=attributes,
                    chunks=chunks,
                    distinct=True,
                )
            )
        added: Document = document
        return added

    async def _content(self, file: File) -> bytes:
        limit = self._knowledge.config.document_limit
        if file.bytes > limit:
            raise Unreadable(
                f"`{file.filename}` has {file.bytes:,} bytes; a document has at most {limit:,}.", code="invalid_file"
            )
        assert self._files is not None
        with store_of("files"):
            return b"".join([piece async for piece in self._files.pieces_of(file.id)])


async def find_store(knowledge: KnowledgeLibrary, caller: Caller, id: str, *, param: str | None = None) -> Collection:
    """A store that exists for the caller; another tenant's is answered like one that does not exist."""
    try:
        return await find_collection(knowledge, caller, id, param=param)
    except NotFound as error:
        if error.code != "collection_not_found":
            raise
        raise NotFound(f"There is no vector store `{id[:128]}`.", param=param, code="vector_store_not_found") from None


async def named_store(knowledge: KnowledgeLibrary, exchange: Exchange) -> tuple[Collection, list[str]]:
    """The store of the path, and what follows it."""
    id, *rest = exchange.path.removeprefix(PREFIX).split("/")
    return await find_store(knowledge, exchange.caller, id), rest


def _media_type(name: str, body: bytes) -> str:
    """By the name; anything else that is text is plain text, such as source code."""
    if not body.strip():
        raise Unreadable(f"`{name}` is empty.", code="invalid_file")
    if (known := media_type_of("", name)) is not None:
        return known
    try:
        if "\0" not in body.decode():
            return "text/plain"
    except UnicodeDecodeError:
        pass
    raise Unreadable(f"{UNSUPPORTED_FILE}`{name}` is neither text nor one of {', '.join(MEDIA_TYPES)}.")
