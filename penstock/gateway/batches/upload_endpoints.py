"""/v1/uploads: files that arrive in parts, for what is too large for one request or a bad connection. The result is a
file like any other."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec

from penstock.config.batches import BatchesConfig
from penstock.gateway.app.decoding import decode, decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.multipart import FORM_ROOM, read_form
from penstock.gateway.app.pagination import NoQuery
from penstock.gateway.app.store_access import store_of
from penstock.gateway.app.uploads import UploadSlots
from penstock.gateway.batches.file_endpoints import (
    LEAST_S,
    MOST_S,
    check_purpose,
    check_room,
    file_name,
    media_type,
    refuse_binary,
    refuse_nul,
)
from penstock.gateway.batches.files import DOCUMENT_PURPOSES, DocumentWriter, FileStore, FileWriter
from penstock.gateway.batches.uploads import MOST_PARTS, Upload
from penstock.protocol.errors import ApiError, InvalidRequest, NotFound, PayloadTooLarge, RateLimitExceeded

PART_LIMIT = 64 * 2**20
"""Bytes of one part: what the official SDK sends."""
MOST_OPEN = 256
"""Uploads of one tenant that are open at a time."""
PART_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["data"],
    "additionalProperties": False,
    "properties": {"data": {"type": "string", "format": "binary", "description": "The bytes of the part."}},
}
Word = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """When the file is deleted."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=LEAST_S, le=MOST_S)]


class UploadRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """POST /v1/uploads"""

    bytes: Annotated[int, msgspec.Meta(ge=1)]
    """Of the whole file."""
    filename: Word
    mime_type: Word
    """Kept with the upload; nothing depends on it."""
    purpose: Word
    expires_after: ExpiresAfter | None = None


class CompleteRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """POST /v1/uploads/{id}/complete"""

    part_ids: Annotated[list[Word], msgspec.Meta(min_length=1, max_length=MOST_PARTS)]
    """In the order in which they make the file."""
    md5: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{32}$")] | None = None
    """Of the whole file, as hexadecimal digits."""


_upload = msgspec.json.Decoder(UploadRequest)
_complete = msgspec.json.Decoder(CompleteRequest)


class UploadEndpoints:
    """The uploads of a tenant."""

    def __init__(self, files: FileStore, config: BatchesConfig, slots: UploadSlots, body_limit: int) -> None:
        self._files = files
        self._uploads = files.uploads
        self._config = config
        self._slots = slots
        self._body_limit = body_limit

    async def create_upload(self, exchange: Exchange) -> None:
        asked = decode(_upload, await exchange.body(self._body_limit))
        caller, limit = exchange.caller, self._config.upload_limit
        check_purpose(asked.purpose)
        if asked.bytes > limit:
            raise PayloadTooLarge(limit=limit, size=asked.bytes)
        with store_of("files and batches"):
            await self._check_room(caller.tenant, asked.bytes, made=False)
            made = await self._uploads.create(
                caller.tenant,
                file_name(asked.filename, asked.purpose),
                asked.purpose,
                mime_type=asked.mime_type.replace("\0", ""),
                size=asked.bytes,
                user=caller.user,
                keep_s=None if asked.expires_after is None else float(asked.expires_after.seconds),
            )
            try:  # again, with it: requests that come together must not all find the same room
                await self._check_room(caller.tenant, asked.bytes, made=True)
            except ApiError:
                await self._uploads.forget(made.id)
                raise
        await exchange.reply_json(made.shown())

    async def add_upload_part(self, exchange: Exchange) -> None:
        decode_query(NoQuery, exchange.scope)
        id = exchange.path.split("/")[-2]
        with store_of("files and batches"):
            upload = _open(await self._found(exchange, id))
            async with exchange.upload(PART_LIMIT + FORM_ROOM) as arrived, self._slots.slot(exchange.caller.tenant):
                body = await arrived.read()
                form = await asyncio.to_thread(read_form, exchange.header(b"content-type") or b"", body)
                del body
                for name in form:
                    if name != "data":
                        raise InvalidRequest(
                            f"Unknown parameter: `{name[:64]}`.", param=name[:64], code="unknown_parameter"
                        )
                if "data" not in form or not form["data"].content:
                    raise InvalidRequest("Missing required parameter: `data`, the bytes of the part.", param="data")
                content = form["data"].content
                if len(content) > PART_LIMIT:
                    raise PayloadTooLarge(limit=PART_LIMIT, size=len(content))
                part = await self._uploads.add_part(upload, content)
            if part is None:
                _open(await self._found(exchange, id))
                raise InvalidRequest(
                    f"The parts of `{id}` would have more than twice the {upload.bytes:,} announced bytes, or be more "
                    f"than {MOST_PARTS:,}.",
                    param="data",
                    code="too_many_parts",
                )
        await exchange.reply_json(
            {"id": part, "object": "upload.part", "created_at": int(self._uploads.clock()), "upload_id": id}
        )

    async def complete_upload(self, exchange: Exchange) -> None:
        asked = decode(_complete, await exchange.body(self._body_limit))
        id = exchange.path.split("/")[-2]
        with store_of("files and batches"):
            upload = await self._found(exchange, id)
            if upload.status != "completed":
                _open(upload)
                await self._check_parts(upload, asked.part_ids)
                async with self._slots.slot(exchange.caller.tenant):
                    await self._assemble(upload, asked)
                upload = await self._found(exchange, id)
            # A client that got no answer asks again, and must not lose its file.
            if upload.status != "completed" or upload.part_ids.split(" ") != asked.part_ids:
                raise _over(upload)
            file = await self._files.get(upload.file_id, upload.tenant)
        await exchange.reply_json(upload.shown(None if file is None else file.shown()))

    async def cancel_upload(self, exchange: Exchange) -> None:
        decode_query(NoQuery, exchange.scope)
        id = exchange.path.split("/")[-2]
        with store_of("files and batches"):
            upload = await self._found(exchange, id)
            if upload.status == "pending":
                await self._uploads.cancel(id)
                upload = await self._found(exchange, id)
            if upload.status != "cancelled":
                raise _over(upload)
        await exchange.reply_json(upload.shown())

    async def _found(self, exchange: Exchange, id: str) -> Upload:
        upload = await self._uploads.get(id, exchange.caller.tenant, exchange.caller.only_user)
        if upload is None:
            raise NotFound(f"There is no upload `{id[:128]}`.")
        return upload

    async def _check_room(self, tenant: str, size: int, *, made: bool) -> None:
        """Refuse an upload that is one too many, or too large. `made`: it is among the open ones already."""
        count, _ = await self._uploads.pending(tenant)
        if count - made >= MOST_OPEN:
            raise RateLimitExceeded(
                f"{count - made} uploads of yours are open, which is the limit: complete or cancel some.",
                retry_after=60.0,
            )
        await check_room(self._files, self._config, tenant, size, "bytes", counted=made)

    async def _check_parts(self, upload: Upload, part_ids: list[str]) -> None:
        sizes = await self._uploads.sizes(upload.id)
        for at, part in enumerate(part_ids):
            if part not in sizes:
                raise InvalidRequest(f"`{upload.id}` has no part `{part[:128]}`.", param=f"part_ids[{at}]")
        if len(set(part_ids)) < len(part_ids):
            raise InvalidRequest("`part_ids` names a part twice.", param="part_ids")
        total = sum(sizes[part] for part in part_ids)
        if total != upload.bytes:
            raise InvalidRequest(
                f"The parts have {total:,} bytes together; {upload.bytes:,} were announced.",
                param="part_ids",
                code="size_mismatch",
            )

    async def _assemble(self, upload: Upload, asked: CompleteRequest) -> None:
        """Write the file; nothing is left of it where another request has ended the upload meanwhile."""
        files, name, user, keep_s = self._files, upload.filename, upload.user_id, upload.keep_s
        writer: DocumentWriter | FileWriter
        if upload.purpose in DOCUMENT_PURPOSES:
            writer = await files.begin_document(
                upload.tenant, name, upload.purpose, user=user, keep_s=keep_s, media_type=media_type(upload.mime_type)
            )
        else:
            writer = await files.begin(upload.tenant, name, upload.purpose, user=user, keep_s=keep_s)
        published = False
        try:
            digest = hashlib.md5(usedforsecurity=False)
            content = self._uploads.content(asked.part_ids)
            if isinstance(writer, DocumentWriter):
                async for piece in content:
                    digest.update(piece)
                    await writer.add(piece)
                statement = writer.finished()
            else:
                async for lines in _lines(content, digest, self._config.file_limit):
                    await writer.add(lines)
                statement = await writer.finished()
            if asked.md5 is not None and digest.hexdigest() != asked.md5.lower():
                raise InvalidRequest(
                    f"The MD5 sum of the parts in this order is {digest.hexdigest()}.", param="md5", code="md5_mismatch"
                )
            published = await self._uploads.complete(upload, writer.file.id, asked.part_ids, statement)
        finally:
            if not published:
                await self._files.delete(writer.file.id)


async def _lines(pieces: AsyncIterator[bytes], digest: Any, longest: int) -> AsyncIterator[str]:
    """The text of a file, in parts that end where lines end. Parts of an upload are cut anywhere. `longest`: characters
    of a line; a line is in memory as a whole."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line: list[str] = []
    size = 0

    def decoded(piece: bytes, final: bool) -> str:
        digest.update(piece)
        with refuse_binary("part_ids"):
            text = decoder.decode(piece, final)
        refuse_nul(text, "part_ids")
        return text

    async for piece in pieces:
        text = await asyncio.to_thread(decoded, piece, False)
        whole, newline, rest = text.rpartition("\n")
        if newline:
            yield "".join((*line, whole, newline))
            line, size = [], 0
        line.append(rest)
        size += len(rest)
        if size > longest:
            raise InvalidRequest(f"A line of the file has more than {longest:,} characters.", param="part_ids")
    line.append(decoded(b"", True))
    if any(line):
        yield "".join(line)


def _open(upload: Upload) -> Upload:
    if upload.status != "pending":
        raise _over(upload)
    return upload


def _over(upload: Upload) -> InvalidRequest:
    return InvalidRequest(f"The upload `{upload.id}` is {upload.status}.", code="upload_over")
