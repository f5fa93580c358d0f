"""Files that a request hands to the model: of /v1/files by their id, in the request itself, or by their URL. Their
text, under their name, becomes part of the message, and is counted like everything else that the message says.

Invariants: a request reads at most as many bytes of files as a body may have, from at most `MOST_FILES` files, and only
those of its own tenant (and of its user, with a user's key). What is neither text nor a PDF is refused. Nothing is read
for a caller whose limits are used up, or for a model that does not exist for it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct

from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.app.exchange import ClientDisconnected, Exchange
from penstock.gateway.app.store_access import store_of
from penstock.gateway.app.uploads import AT_ONCE, UploadSlots
from penstock.gateway.generation.file_texts import FileTexts, Key, Owner
from penstock.gateway.generation.file_urls import FileUrls, NotFetched
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.resumption import goes_on
from penstock.gateway.generation.schemas import ChatMessage
from penstock.knowledge.entities import UnreadableDocument
from penstock.knowledge.readers import decoded
from penstock.knowledge.readers.media import PDF
from penstock.knowledge.readers.process import ReaderProcess
from penstock.protocol.errors import InvalidRequest, NotFound, ServiceUnavailable

T = TypeVar("T")
MOST_FILES = 100
"""Of one request."""
FETCHES_AT_ONCE, FETCHES_OF_A_TENANT = 16, 4
"""Files that are being fetched from URLs by a gateway process."""
READABLE = "text in UTF-8 (plain, Markdown, CSV, JSON, HTML, code) and PDF"
LONGEST_NAME = 256
_PDF_MARK = b"%PDF-"
_HERE = 64 * 1024
"""Bytes that are decoded without a thread."""


class StoredFile(Protocol):
    """A file without its content."""

    @property
    def id(self) -> str: ...
    @property
    def filename(self) -> str: ...
    @property
    def bytes(self) -> int: ...


class Files(Protocol):
    """The files of all tenants."""

    async def get(self, id: str, tenant: str, user: str | None = None) -> StoredFile | None: ...

    def pieces_of_any(self, id: str) -> AsyncIterator[bytes]: ...


class FileContent(Struct, forbid_unknown_fields=True, kw_only=True):
    file_id: str | None = None
    file_data: str | None = None
    """In base64, alone or as a data URL."""
    file_url: str | None = None
    filename: str | None = None


class FilePart(Struct, forbid_unknown_fields=True, kw_only=True):
    """A file among the parts of a chat message."""

    type: Literal["file"]
    file: FileContent


class UnreadableFile(InvalidRequest):
    """A file that no model here can read."""

    code = "unsupported_file"


class UnfetchedFile(UnreadableFile):
    """A file that cannot be fetched from its URL."""

    code = "file_not_fetched"


@dataclass(frozen=True, slots=True)
class FileText:
    """What a model reads of a file."""

    name: str
    text: str

    def part(self) -> str:
        """The file as a part of a message; what follows begins on a line of its own."""
        return f"File {self.name}:\n{self.text}\n\n"


_part = RequestDecoder(FilePart)


class InputFiles:
    """Reads the files of requests."""

    def __init__(
        self,
        files: Files | None,
        limit: int,
        *,
        permissions: Permissions,
        quotas: Quotas,
        texts: FileTexts,
        urls: FileUrls,
    ) -> None:
        """`files`: None where the gateway keeps none. `limit`: bytes that one request may read."""
        self._files = files
        self._limit = limit
        self._permissions = permissions
        self._quotas = quotas
        self._texts = texts
        self._urls = urls
        self._fetches = UploadSlots(FETCHES_AT_ONCE, FETCHES_OF_A_TENANT)
        """Apart from the following: a server that is slow holds up no file that is here already."""
        self._slots = UploadSlots()
        """Apart from those of uploads: a document that takes long to read holds up none of them."""
        self._readers = tuple(ReaderProcess() for _ in range(AT_ONCE))
        """One for every slot, so that no tenant waits for a document of another."""
        self._free = list(self._readers)

    async def close(self) -> None:
        for reader in self._readers:
            await reader.close()

    @asynccontextmanager
    async def reading(self, exchange: Exchange, model: str | None, *, free: bool = False) -> AsyncIterator[FileReading]:
        """For the files of one request to `model`. Take it only where there are some: it is counted. `free`: the
        request only counts tokens, or stores what it says; it counts against limits of its own. Without a `model`
        nothing follows that would be counted. What goes on with a stream was counted with it, and may still hold its
        place: its files count as if it were free."""
        exchange.documents = True
        counted_as = None if model is None else self._permissions.counted_as(exchange, model)
        again = goes_on(exchange)
        async with self._quotas.file_work(exchange, counted_as, only=free or again) as work:
            work.counted = model is None or again
            yield FileReading(
                exchange,
                self._files,
                self._limit,
                self._texts,
                self._urls,
                fetching=functools.partial(self._fetches.slot, exchange.caller.tenant),
                reading=functools.partial(self._slot, exchange.caller.tenant),
            )

    @asynccontextmanager
    async def _slot(self, tenant: str) -> AsyncIterator[ReaderProcess]:
        """One of the few places in which files are read, with the process for its PDFs."""
        async with self._slots.slot(tenant):
            reader = self._free.pop()
            try:
                yield reader
            finally:
                self._free.append(reader)  # the next to be taken: it may have a process already

    async def chat(
        self, exchange: Exchange, messages: Sequence[ChatMessage], model: str, *, free: bool = False
    ) -> list[ChatMessage]:
        """Messages of a chat, with the text of files in their place; `free`: see `reading`."""
        if not any(_is_file(part) for message in messages for part in _parts(message)):
            return list(messages)
        read: list[ChatMessage] = []
        async with self.reading(exchange, model, free=free) as files:
            for index, message in enumerate(messages):
                parts = list(_parts(message))
                for place, part in enumerate(parts):
                    if _is_file(part):
                        at = f"messages[{index}].content[{place}]"
                        if message.role != "user":
                            raise InvalidRequest("Files go into messages of the user.", param=f"{at}.type")
                        content = _part(exchange, msgspec.json.encode(part), at).file
                        found = await files.one(
                            f"{at}.file",
                            id=content.file_id,
                            data=content.file_data,
                            url=content.file_url,
                            name=content.filename,
                        )
                        parts[place] = {"type": "text", "text": found.part()}
                read.append(msgspec.structs.replace(message, content=parts) if parts else message)
        return read


class FileReading:
    """The files of one request."""

    def __init__(
        self,
        exchange: Exchange,
        files: Files | None,
        limit: int,
        texts: FileTexts,
        urls: FileUrls,
        *,
        fetching: Callable[[], AbstractAsyncContextManager[None]],
        reading: Callable[[], AbstractAsyncContextManager[ReaderProcess]],
    ) -> None:
        """`fetching`, `reading`: a file waits there for its turn to be fetched, and to be read. They are taken in this
        order, for one file at a time, so a request with many holds up none of others."""
        self._texts = texts
        self._urls = urls
        self._exchange = exchange
        self._files = files
        self._limit = limit
        self._fetching = fetching
        self._reading = reading
        self._count = self._size = 0

    async def one(
        self,
        at: str,
        *,
        id: str | None = None,
        data: str | None = None,
        url: str | None = None,
        name: str | None = None,
    ) -> FileText:
        """The file that exactly one of `id`, `data` and `url` says."""
        if sum(source is not None for source in (id, data, url)) != 1:
            raise InvalidRequest(f"`{at}` needs either `file_id`, `file_data` or `file_url`.", param=at)
        if id is not None:
            return await self.stored(id, f"{at}.file_id", name)
        if data is not None:
            return await self.sent(data, f"{at}.file_data", name)
        assert url is not None
        return await self.fetched(url, f"{at}.file_url", name)

    async def stored(self, id: str, at: str, name: str | None = None) -> FileText:
        """A file of the caller; 404 where it has no such file. `name`: another than it has."""
        if self._files is None:
            raise ServiceUnavailable("This gateway has no store for files.")
        caller = self._exchange.caller
        async with self._reading() as reader:
            with store_of("files"):
                found = await self._files.get(id, caller.tenant, caller.only_user)
                if found is None:
                    raise _unknown(id, at)
                self._add(found.bytes, at)
                body = b"".join([piece async for piece in self._files.pieces_of_any(found.id)])
                if len(body) != found.bytes:  # it is being deleted, piece by piece
                    raise _unknown(id, at)
            self._exchange.body_size += len(body)  # as if the client had sent it
            return await self._read(reader, body, name or found.filename, at)

    async def sent(self, data: str, at: str, name: str | None = None, media_type: str = "") -> FileText:
        """A file in base64, which is part of the request."""
        if data.startswith("data:"):
            head, _, data = data.partition(",")
            if not head.endswith(";base64"):
                raise InvalidRequest(f"`{at}` must be base64, alone or as a data URL.", param=at)
            media_type = media_type or head.removeprefix("data:").partition(";")[0]
        self._add(len(data) * 3 // 4, at)
        async with self._reading() as reader:
            try:
                body = await _somewhere(len(data), base64.b64decode, data, None, True)
            except (binascii.Error, ValueError):
                raise InvalidRequest(f"`{at}` is not base64.", param=at) from None
            return await self._read(reader, body, name or ("file.pdf" if media_type == PDF else "file"), at)

    async def fetched(self, url: str, at: str, name: str | None = None) -> FileText:
        """A file at a URL."""
        if not self._urls.enabled:
            raise UnfetchedFile(
                "Files are not fetched from URLs here (`input_files.url_hosts`): send the file to /v1/files and name "
                "it by its id, or send its content in base64.",
                param=at,
                code="unsupported_parameter",
            )
        self._add(0, at)
        left = self._limit - self._size
        async with self._fetching():  # until it is read: it is in memory
            try:
                found = await self._unless_left(self._urls.fetch(url, left), "a file of a URL")
            except NotFetched as error:
                raise UnfetchedFile(f"The file cannot be fetched. {error}", param=at) from None
            self._grow(len(found.body), at)
            self._exchange.body_size += len(found.body)  # as if the client had sent it
            async with self._reading() as reader:
                return await self._read(reader, found.body, name or found.name or "file", at)

    def _add(self, size: int, at: str) -> None:
        self._count += 1
        if self._count > MOST_FILES:
            raise InvalidRequest(f"A request has at most {MOST_FILES} files.", param=at)
        self._grow(size, at)

    def _grow(self, size: int, at: str) -> None:
        self._size += size
        if self._size > self._limit:
            raise InvalidRequest(
                f"The files of this request have {self._size:,} bytes or more; {self._limit:,} are allowed "
                "(`server.body_limit`). Put large documents into a vector store and search them with `file_search`.",
                param=at,
                code="file_too_large",
            )

    async def _read(self, reader: ReaderProcess, body: bytes, name: str, at: str) -> FileText:
        name = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())[:LONGEST_NAME]
        pdf = body[:1024].lstrip().startswith(_PDF_MARK)
        try:
            if pdf:
                text = await self._pdf(reader, body)
                unfolded = max(0, len(text.encode()) - len(body))
                self._grow(unfolded, at)
                self._exchange.body_size += unfolded
            else:
                text = await _somewhere(len(body), decoded, body)
        except UnreadableDocument as error:
            if pdf:
                raise UnreadableFile(f"The file `{name}` cannot be read: {error}", param=at) from None
            raise UnreadableFile(
                f"The file `{name}` cannot be read: it is not text. Models here read {READABLE}.", param=at
            ) from None
        return FileText(name or "file", text)

    async def _pdf(self, reader: ReaderProcess, body: bytes) -> str:
        """Its text. It is not read on for a client that has left."""
        caller = self._exchange.caller
        key = await _somewhere(len(body), Key.of, Owner(caller.tenant, caller.only_user), body)
        read = functools.partial(reader.text, body, PDF)
        return await self._unless_left(self._texts.text(key, read), "a file of a request")

    async def _unless_left(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """What comes of `work`, which is stopped when the client leaves."""
        task, left = asyncio.create_task(work, name=name), False

        def leave(error: Exception) -> None:
            nonlocal left
            left = True
            task.cancel()

        with self._exchange.watched(leave):
            try:
                return await task
            except asyncio.CancelledError:
                task.cancel()
                await asyncio.wait((task,))  # a reader's process is stopped before somebody else gets it
                if left:
                    raise ClientDisconnected from None
                raise


def _unknown(id: str, at: str) -> NotFound:
    return NotFound(f"There is no file `{id[:128]}`.", param=at, code="file_not_found")


async def _somewhere(size: int, work: Any, *about: Any) -> Any:
    """`work`, in a thread if it takes a while."""
    return work(*about) if size <= _HERE else await asyncio.to_thread(work, *about)


def _parts(message: ChatMessage) -> Sequence[dict[str, Any]]:
    return message.content if isinstance(message.content, list) else ()


def _is_file(part: dict[str, Any]) -> bool:
    return part.get("type") == "file"
