"""/v1/files: the input and output files of batches, which are text, and documents for vector stores and prompts, of any
media type. A file belongs to the tenant that sent it. Anthropic's clients find the same files in the form that they
know (`anthropic_files.py`)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import msgspec

from penstock.config.batches import BatchesConfig
from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.dialect_choice import from_anthropic
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.multipart import FORM_ROOM, Field, read_form
from penstock.gateway.app.pagination import NoQuery, page
from penstock.gateway.app.store_access import store_of
from penstock.gateway.app.uploads import UploadSlots
from penstock.gateway.batches import anthropic_files
from penstock.gateway.batches.files import DOCUMENT_PURPOSES, File, FileStore
from penstock.gateway.batches.store import BatchStore
from penstock.protocol.errors import InvalidRequest, NotFound, PayloadTooLarge

JSONL = b"application/jsonl"
BYTES = b"application/octet-stream"
Deleted = Callable[[str, str], Awaitable[None]]
"""Called with the tenant and the id of a document that is deleted."""
_MEDIA_TYPE = re.compile(r"[a-z0-9.+-]{1,64}/[a-z0-9.+-]{1,64}")
LEAST_S, MOST_S = 3600, 30 * 86400
"""How long a file may be kept."""
FILE_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "JSON lines for a batch, else a document."},
        "purpose": {"type": "string", "enum": ["batch", *DOCUMENT_PURPOSES]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": LEAST_S, "maximum": MOST_S},
    },
}


class FilesQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    purpose: Annotated[str, msgspec.Meta(pattern=r"^[^\x00]*$")] | None = None
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"


class FileEndpoints:
    """The files of a tenant."""

    def __init__(
        self, files: FileStore, batches: BatchStore, config: BatchesConfig, uploads: UploadSlots, deleted: Deleted
    ) -> None:
        """`deleted`: removes a document from where it was copied to."""
        self._deleted = deleted
        self._files = files
        self._batches = batches
        self._config = config
        self._uploads = uploads

    async def create_file(self, exchange: Exchange) -> None:
        anthropic = from_anthropic(exchange)
        files, limit = self._files, self._config.file_limit
        async with exchange.upload(limit + FORM_ROOM) as arrived, self._uploads.slot(exchange.caller.tenant):
            body = await arrived.read()
            form = await asyncio.to_thread(read_form, exchange.header(b"content-type") or b"", body)
            del body
            upload, purpose, keep_s = anthropic_files.checked(form) if anthropic else _checked(form)
            if len(upload.content) > limit:
                raise PayloadTooLarge(limit=limit, size=len(upload.content))
            text = await asyncio.to_thread(_text, upload.content) if purpose == "batch" else ""
            name, caller = file_name(upload.filename, purpose), exchange.caller
            with store_of("files and batches"):
                await check_room(files, self._config, caller.tenant, len(upload.content), "file")
                if purpose == "batch":
                    made = await files.create(caller.tenant, name, purpose, text, user=caller.user, keep_s=keep_s)
                else:
                    made = await files.create_document(
                        caller.tenant,
                        name,
                        purpose,
                        upload.content,
                        user=caller.user,
                        keep_s=keep_s,
                        media_type=media_type(upload.media_type),
                    )
        await exchange.reply_json(_shown(made, anthropic))

    async def list_files(self, exchange: Exchange) -> None:
        if from_anthropic(exchange):
            await self._list_for_anthropic(exchange)
            return
        files = self._files
        asked = decode_query(FilesQuery, exchange.scope)
        with store_of("files and batches"):
            after = await _found(files, exchange, asked.after) if asked.after else None
            found = await files.page(
                exchange.caller.tenant,
                exchange.caller.only_user,
                purpose=asked.purpose,
                after=after,
                newest=asked.order == "desc",
                limit=asked.limit + 1,
            )
        await exchange.reply_json(page(found, asked.limit))

    async def _list_for_anthropic(self, exchange: Exchange) -> None:
        files, caller = self._files, exchange.caller
        ids, limit = anthropic_files.listed_ids(exchange), None
        with store_of("files and batches"):
            if ids is not None:
                named = [await files.get(id, caller.tenant, caller.only_user) for id in ids]
                found = [file for file in named if file is not None]
            else:
                asked = decode_query(anthropic_files.AnthropicFilesQuery, exchange.scope)
                limit = asked.limit
                after = await _found(files, exchange, asked.after) if asked.after else None
                found = await files.page(
                    caller.tenant, caller.only_user, purpose=None, after=after, newest=True, limit=limit + 1
                )
        await exchange.reply_json(anthropic_files.files_page(found, limit))

    async def get_file(self, exchange: Exchange) -> None:
        anthropic = _asked_by_anthropic(exchange)
        with store_of("files and batches"):
            file = await _found(self._files, exchange, exchange.path.rpartition("/")[2])
        await exchange.reply_json(_shown(file, anthropic))

    async def delete_file(self, exchange: Exchange) -> None:
        anthropic = _asked_by_anthropic(exchange)
        files = self._files
        with store_of("files and batches"):
            file = await _found(files, exchange, exchange.path.rpartition("/")[2])
            if await self._batches.uses(file.id):
                raise InvalidRequest(f"`{file.id}` is being read by a batch; cancel that first.", code="file_in_use")
            if file.purpose in DOCUMENT_PURPOSES:  # first, so that a failure leaves something to delete again
                await self._deleted(exchange.caller.tenant, file.id)
            await files.delete(file.id)
        gone = anthropic_files.deleted(file.id) if anthropic else {"id": file.id, "object": "file", "deleted": True}
        await exchange.reply_json(gone)

    async def file_content(self, exchange: Exchange) -> None:
        _asked_by_anthropic(exchange)
        files = self._files
        with store_of("files and batches"):
            file = await _found(files, exchange, exchange.path.split("/")[-2])
        kind = BYTES if file.purpose in DOCUMENT_PURPOSES else JSONL
        await exchange.reply_parts(files.pieces(file), file.bytes, kind)


def _asked_by_anthropic(exchange: Exchange) -> bool:
    """Whether a client of Anthropic's asks; checks that the query has nothing else."""
    anthropic = from_anthropic(exchange)
    decode_query(anthropic_files.AnthropicFileQuery if anthropic else NoQuery, exchange.scope)
    return anthropic


def _shown(file: File, anthropic: bool) -> dict[str, Any]:
    return anthropic_files.metadata(file) if anthropic else file.shown()


def media_type(said: str) -> str:
    """What the client says of its file; unknown words say nothing."""
    said = said.partition(";")[0].strip().lower()
    return said if _MEDIA_TYPE.fullmatch(said) and said != BYTES.decode() else ""


async def check_room(
    files: FileStore, config: BatchesConfig, tenant: str, size: int, param: str, *, counted: bool = False
) -> None:
    """Refuse a file with which a tenant's files would be larger than they may. `counted`: it is one of them already."""
    used = await files.used(tenant) - (size if counted else 0)
    if used + size > config.tenant_limit:
        raise InvalidRequest(
            f"The files of this tenant have {used:,} bytes; with this one they would have more than the "
            f"{config.tenant_limit:,} allowed. Delete some.",
            param=param,
            code="storage_limit",
        )


def check_purpose(purpose: str) -> None:
    if purpose not in ("batch", *DOCUMENT_PURPOSES):
        documents = " or ".join(f"`{name}`" for name in DOCUMENT_PURPOSES)
        raise InvalidRequest(
            f"`purpose` must be `batch`, or {documents} for a document of a vector store; there is no other.",
            param="purpose",
        )


def file_name(sent: str, purpose: str) -> str:
    """The name of a file, without the folder that a client may have sent."""
    unnamed = "file.jsonl" if purpose == "batch" else "file"
    return sent.rpartition("/")[2].replace("\0", "")[:256] or unnamed


async def _found(files: FileStore, exchange: Exchange, id: str) -> File:
    file = await files.get(id, exchange.caller.tenant, exchange.caller.only_user)
    if file is None:
        raise NotFound(f"There is no file `{id[:128]}`.")
    return file


def _checked(form: dict[str, Field]) -> tuple[Field, str, float | None]:
    """The file, its purpose and how long to keep it; raises `InvalidRequest` when the form is wrong."""
    for name in form:
        if name not in FILE_FORM["properties"]:
            raise InvalidRequest(f"Unknown parameter: `{name[:64]}`.", param=name[:64], code="unknown_parameter")
    for name in ("file", "purpose"):
        if name not in form:
            raise InvalidRequest(f"Missing required parameter: `{name}`.", param=name, code="missing_parameter")
    purpose = _word(form["purpose"])
    check_purpose(purpose)
    if not form["file"].content:
        raise InvalidRequest("The file is empty.", param="file")
    keep_s = None
    if any(name.startswith("expires_after") for name in form):
        anchor, seconds = (_word(form.get(f"expires_after[{part}]")) for part in ("anchor", "seconds"))
        if anchor != "created_at" or not seconds.isdigit() or not LEAST_S <= int(seconds[:9]) <= MOST_S:
            raise InvalidRequest(
                f"`expires_after` has an `anchor`, which is `created_at`, and `seconds` from {LEAST_S} to {MOST_S}.",
                param="expires_after",
            )
        keep_s = float(seconds)
    return form["file"], purpose, keep_s


def _word(field: Field | None) -> str:
    return "" if field is None else field.content[:64].decode("ascii", "replace")


@contextmanager
def refuse_binary(param: str) -> Iterator[None]:
    """What is decoded inside has to be UTF-8."""
    try:
        yield
    except UnicodeDecodeError:
        raise InvalidRequest("The file is not UTF-8 text.", param=param) from None


def _text(content: bytes) -> str:
    with refuse_binary("file"):
        text = content.decode()
    refuse_nul(text, "file")
    return text


def refuse_nul(text: str, param: str) -> None:
    if "\0" in text:
        raise InvalidRequest("The file is not text: it has a NUL character.", param=param)
