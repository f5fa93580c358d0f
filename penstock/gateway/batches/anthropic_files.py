"""/v1/files as Anthropic's clients know it: the same files, under other names, and pages with a cursor."""

from __future__ import annotations

import datetime
import mimetypes
from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import parse_qs

import msgspec

from penstock.gateway.app.decoding import convert_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.multipart import Field
from penstock.gateway.batches.files import DOCUMENT_PURPOSES, File
from penstock.protocol.errors import InvalidRequest

PURPOSE = "user_data"
"""Of files that come by this API, which knows no purposes."""
LEAST_S, MOST_S = 3600, 90 * 86400
MOST_IDS = 100
_CURSOR = "page_"
_UNKNOWN = "application/octet-stream"


class AnthropicFileQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    beta: str | None = None
    """Sent by the beta part of the SDK; the same either way."""


class AnthropicFilesQuery(AnthropicFileQuery, frozen=True):
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 20
    page: str | None = None
    """The cursor of a page, as the one before it said."""
    after_id: str | None = None
    """The same in older versions: the last file of the page before."""

    @property
    def after(self) -> str | None:
        """The file behind which the page begins."""
        if self.page and not self.page.startswith(_CURSOR):
            raise InvalidRequest("`page` must be the `next_page` of another page.", param="page")
        return self.page.removeprefix(_CURSOR) if self.page else self.after_id


def listed_ids(exchange: Exchange) -> list[str] | None:
    """The files that a list is asked for by their ids; None where it is asked for pages."""
    found = parse_qs(exchange.scope["query_string"].decode("latin-1"), errors="replace")
    ids = [id for name in ("ids", "ids[]") for given in found.get(name, ()) for id in given.split(",")]
    if not ids:
        return None
    if found.keys() - {"ids", "ids[]", "beta"}:
        raise InvalidRequest("`ids` go without `page` and `limit`.", param="ids")
    if len(set(ids)) > MOST_IDS:
        raise InvalidRequest(f"A list has at most {MOST_IDS} `ids`.", param="ids")
    return list(dict.fromkeys(ids))


def checked(form: dict[str, Field]) -> tuple[Field, str, float | None]:
    """The file, its purpose and how long to keep it; raises `InvalidRequest` when the form is wrong."""
    for name in form:
        if name not in ("file", "expires_in_seconds"):
            raise InvalidRequest(f"Unknown parameter: `{name[:64]}`.", param=name[:64], code="unknown_parameter")
    if "file" not in form:
        raise InvalidRequest("Missing required parameter: `file`.", param="file", code="missing_parameter")
    if not form["file"].content:
        raise InvalidRequest("The file is empty.", param="file")
    keep_s = None
    if "expires_in_seconds" in form:
        sent = convert_query(_Expiry, {"seconds": form["expires_in_seconds"].content[:16].decode("latin-1")})
        if not LEAST_S <= sent.seconds <= MOST_S:
            raise InvalidRequest(
                f"`expires_in_seconds` must be from {LEAST_S} to {MOST_S}.", param="expires_in_seconds"
            )
        keep_s = float(sent.seconds)
    return form["file"], PURPOSE, keep_s


class _Expiry(msgspec.Struct):
    seconds: int


def metadata(file: File) -> dict[str, Any]:
    """A file as this API shows it."""
    return {
        "type": "file",
        "id": file.id,
        "filename": file.filename,
        "mime_type": media_type(file),
        "size_bytes": file.bytes,
        "created_at": _when(file.created_at),
        "expires_at": None if file.expires_at is None else _when(file.expires_at),
        "downloadable": True,
    }


def media_type(file: File) -> str:
    """As the client said, or as its name says."""
    if file.purpose not in DOCUMENT_PURPOSES:
        return "application/jsonl"
    return file.media_type or mimetypes.guess_type(file.filename)[0] or _UNKNOWN


def files_page(found: Sequence[File], limit: int | None) -> dict[str, Any]:
    """`found` has one file more than `limit` when there is another page."""
    entries = found[:limit]
    more = len(found) > len(entries)
    return {
        "data": [metadata(file) for file in entries],
        "next_page": f"{_CURSOR}{entries[-1].id}" if more else None,
        "has_more": more,
        "first_id": entries[0].id if entries else None,
        "last_id": entries[-1].id if entries else None,
    }


def deleted(id: str) -> dict[str, Any]:
    return {"id": id, "type": "file_deleted"}


def _when(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
