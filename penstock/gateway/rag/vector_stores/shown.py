"""Vector stores, their files and batches as clients see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.gateway.rag.vector_stores.schemas import FileStatus
from penstock.knowledge.document_batches import Batch
from penstock.knowledge.entities import SERVER_FAILED, Collection, Document, DocumentStatus
from penstock.knowledge.pages import Totals

POLL_AFTER = (b"openai-poll-after-ms", b"250")
"""How soon the SDK asks again for something that is in progress; it waits a second otherwise."""
UNSUPPORTED_FILE = "This kind of file cannot be read: "
"""How the error of a document begins whose media type is unknown."""
_STATUS: dict[DocumentStatus, FileStatus] = {
    "queued": "in_progress",
    "processing": "in_progress",
    "ready": "completed",
    "duplicate": "completed",
    "failed": "failed",
    "cancelled": "cancelled",
}


def statuses(wanted: FileStatus | None) -> list[DocumentStatus]:
    """The states of a document that a status stands for; none: all."""
    return [] if wanted is None else [status for status, name in _STATUS.items() if name == wanted]


def file_counts(by_status: Mapping[str, int]) -> dict[str, int]:
    counts = {"in_progress": 0, "completed": 0, "failed": 0, "cancelled": 0}
    for status, name in _STATUS.items():
        counts[name] += by_status.get(status, 0)
    return {**counts, "total": sum(counts.values())}


def store_body(store: Collection, totals: Totals, *, expired: bool) -> dict[str, Any]:
    counts, expires_at = file_counts(totals.by_status), store.expires_at
    return {
        "id": store.id,
        "object": "vector_store",
        "created_at": int(store.created_at),
        "name": store.title or store.name,
        "description": store.description or None,
        "usage_bytes": totals.bytes,
        "file_counts": counts,
        "status": "expired" if expired else "in_progress" if counts["in_progress"] else "completed",
        "expires_after": {"anchor": "last_active_at", "days": store.expires_days} if store.expires_days else None,
        "expires_at": None if expires_at is None else int(expires_at),
        "last_active_at": int(store.used_at),
        "metadata": dict(store.metadata),
    }


def file_body(store: Collection, document: Document) -> dict[str, Any]:
    own = bool(document.chunk_tokens)
    sizes = {
        "max_chunk_size_tokens": document.chunk_tokens if own else store.chunk_tokens,
        "chunk_overlap_tokens": document.overlap_tokens if own else store.overlap_tokens,
    }
    status = _STATUS[document.status]
    return {
        "id": document.id,
        "object": "vector_store.file",
        "created_at": int(document.created_at),
        "vector_store_id": store.id,
        "status": status,
        "last_error": {"code": _error_code(document.error), "message": document.error} if status == "failed" else None,
        "usage_bytes": document.size if status == "completed" else 0,
        "attributes": dict(document.metadata),
        "chunking_strategy": {"type": "static", "static": sizes},
    }


def batch_body(store: Collection, batch: Batch, by_status: Mapping[str, int]) -> dict[str, Any]:
    counts = file_counts(by_status)
    status = "completed"
    if batch.cancelled:
        status = "cancelled"
    elif counts["in_progress"]:
        status = "in_progress"
    elif counts["total"] and counts["failed"] == counts["total"]:
        status = "failed"
    return {
        "id": batch.id,
        "object": "vector_store.files_batch",
        "created_at": int(batch.created_at),
        "vector_store_id": store.id,
        "status": status,
        "file_counts": counts,
    }


def page_body(entries: Sequence[dict[str, Any]], limit: int, *, backwards: bool) -> dict[str, Any]:
    """A page; `entries` has one more than `limit` where there are more: the last, or the first of a page that goes
    backwards."""
    shown = list(entries[-limit:] if backwards else entries[:limit])
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(entries) > limit,
    }


def content_page(kind: str, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Everything on one page, in the form of lists without ids."""
    return {"object": f"vector_store.{kind}.page", "data": list(entries), "has_more": False, "next_page": None}


def _error_code(error: str) -> str:
    if error == SERVER_FAILED:
        return "server_error"
    return "unsupported_file" if error.startswith(UNSUPPORTED_FILE) else "invalid_file"
