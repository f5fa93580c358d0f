"""Files that arrive in parts: an upload promises a number of bytes, takes parts in any order, and becomes a file when
it is completed.

Parts are bytes, cut anywhere, and are stored in pieces, so that no statement is large. Invariants: an upload ends once,
as `completed`, `cancelled` or expired; what it was promised counts as used by its tenant until then; the bytes of parts
are deleted at its end, a few at a time, because everybody else's writes wait for each statement.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from penstock.storage import Database, DatabaseError, Statement

PIECE = 512 * 1024
"""Bytes of a part in one row."""
OPEN_S = 3600.0
"""How long parts may be added, and the upload completed."""
SHOWN_S = 86400.0
"""How long an upload that has ended is remembered."""
MOST_PARTS = 10_000
DELETED_AT_ONCE = 32
"""Pieces."""
_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS uploads (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, user_id TEXT NOT NULL, "
        "filename TEXT NOT NULL, purpose TEXT NOT NULL, mime_type TEXT NOT NULL, bytes BIGINT NOT NULL, "
        "keep_s DOUBLE PRECISION, status TEXT NOT NULL, created_at DOUBLE PRECISION NOT NULL, "
        "expires_at DOUBLE PRECISION NOT NULL, file_id TEXT NOT NULL DEFAULT '', part_ids TEXT NOT NULL DEFAULT '', "
        "received BIGINT NOT NULL DEFAULT 0, parts BIGINT NOT NULL DEFAULT 0)",
        "CREATE INDEX IF NOT EXISTS uploads_by_tenant ON uploads (tenant, status)",
        "CREATE INDEX IF NOT EXISTS uploads_by_end ON uploads (expires_at)",
        "CREATE TABLE IF NOT EXISTS upload_parts (id TEXT PRIMARY KEY, upload_id TEXT NOT NULL, bytes BIGINT NOT NULL)",
        "CREATE INDEX IF NOT EXISTS upload_parts_by_upload ON upload_parts (upload_id)",
        "CREATE TABLE IF NOT EXISTS upload_pieces (part_id TEXT NOT NULL, number INTEGER NOT NULL, "
        "upload_id TEXT NOT NULL, content BYTEA NOT NULL, PRIMARY KEY (part_id, number))",
        "CREATE INDEX IF NOT EXISTS upload_pieces_by_upload ON upload_pieces (upload_id)",
    ),
)


class Upload(msgspec.Struct, frozen=True):
    """An upload without its parts. The fields are the first columns of the table, in order."""

    id: str
    tenant: str
    user_id: str
    filename: str
    purpose: str
    mime_type: str
    bytes: int
    keep_s: float | None
    status: str
    created_at: float
    expires_at: float
    file_id: str = ""
    part_ids: str = ""

    def shown(self, file: dict[str, Any] | None = None) -> dict[str, Any]:
        """The upload as clients see it. `file`: what it became."""
        return {
            "id": self.id,
            "object": "upload",
            "bytes": self.bytes,
            "created_at": int(self.created_at),
            "expires_at": int(self.expires_at),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": self.status,
            "file": file,
        }


_COLUMNS = ", ".join(Upload.__struct_fields__)


class UploadStore:
    """All uploads."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self.clock = clock

    async def prepare(self) -> None:
        await self._database.migrate("uploads", _VERSIONS)

    async def create(
        self,
        tenant: str,
        filename: str,
        purpose: str,
        *,
        mime_type: str,
        size: int,
        user: str = "",
        keep_s: float | None = None,
    ) -> Upload:
        """`keep_s`: how long to keep the file; as long as others if None."""
        now, id = self.clock(), f"upload_{uuid.uuid4().hex}"
        upload = Upload(
            id, tenant, user, filename, purpose, mime_type, size, keep_s, "pending", now, now + OPEN_S
        )  # fmt: skip
        values = msgspec.structs.astuple(upload)
        marks = ", ".join("?" * len(values))
        await self._database.execute(f"INSERT INTO uploads ({_COLUMNS}) VALUES ({marks})", *values)
        return upload

    async def get(self, id: str, tenant: str, user: str | None = None) -> Upload | None:
        """`user`: only if the upload is this user's."""
        if "\0" in id:  # to PostgreSQL this is an error
            return None
        rows = await self._database.fetch(f"SELECT {_COLUMNS} FROM uploads WHERE id = ? AND tenant = ?", id, tenant)
        if not rows or user not in (None, rows[0][2]):
            return None
        upload = Upload(*rows[0])
        if upload.status == "pending" and upload.expires_at <= self.clock():
            return msgspec.structs.replace(upload, status="expired")
        return upload

    async def pending(self, tenant: str) -> tuple[int, int]:
        """How many uploads of a tenant are open, and the bytes that they take or will take."""
        rows = await self._database.fetch(
            "SELECT COUNT(*), CAST(COALESCE(SUM(CASE WHEN received > bytes THEN received ELSE bytes END), 0) AS "
            "BIGINT) FROM uploads WHERE tenant = ? AND status = 'pending' AND expires_at > ?",
            tenant, self.clock(),
        )  # fmt: skip
        return int(rows[0][0]), int(rows[0][1])

    async def add_part(self, upload: Upload, content: bytes) -> str | None:
        """The id of a new part; None where the upload has ended meanwhile, or has more parts or bytes than it may: a
        part may be sent twice, because its first answer got lost, but not everything again and again."""
        id = f"part_{uuid.uuid4().hex}"
        takes = "id = ? AND status = 'pending' AND expires_at > ? AND received + ? <= 2 * bytes AND parts < ?"
        about = (upload.id, self.clock(), len(content), MOST_PARTS)
        if not await self._database.fetch(f"SELECT 1 FROM uploads WHERE {takes}", *about):
            return None  # before anything is written
        added: Statement = (
            f"UPDATE uploads SET received = received + ?, parts = parts + 1 WHERE {takes}", (len(content), *about)
        )  # fmt: skip
        part: Statement = (
            "INSERT INTO upload_parts (id, upload_id, bytes) VALUES (?, ?, ?)",
            (id, upload.id, len(content)),
        )
        whole = False
        try:
            for number, piece in enumerate(_pieces(content)):
                await self._database.execute(
                    "INSERT INTO upload_pieces (part_id, number, upload_id, content) VALUES (?, ?, ?, ?)",
                    id, number, upload.id, piece,
                )  # fmt: skip
            whole = (await self._database.transact([added, part], guarded=True))[0] > 0
        finally:
            if not whole:  # also where the store is full: what nobody counts must not stay
                await self._database.transact(
                    [
                        ("DELETE FROM upload_parts WHERE id = ?", (id,)),
                        ("DELETE FROM upload_pieces WHERE part_id = ?", (id,)),
                    ]
                )
        return id if whole else None

    async def sizes(self, id: str) -> dict[str, int]:
        """The parts of an upload, with their bytes."""
        rows = await self._database.fetch("SELECT id, bytes FROM upload_parts WHERE upload_id = ?", id)
        return {str(part): int(size) for part, size in rows}

    async def content(self, part_ids: Sequence[str]) -> AsyncIterator[bytes]:
        """The bytes of parts, in this order."""
        for part in part_ids:
            number = 0
            while rows := await self._database.fetch(
                "SELECT content FROM upload_pieces WHERE part_id = ? AND number = ?", part, number
            ):
                yield bytes(rows[0][0])
                number += 1

    async def complete(self, upload: Upload, file_id: str, part_ids: Sequence[str], published: Statement) -> bool:
        """Whether this was its end. `published`: the statement that makes its file visible."""
        ended: Statement = (
            "UPDATE uploads SET status = 'completed', file_id = ?, part_ids = ? WHERE id = ? AND status = 'pending'",
            (file_id, " ".join(part_ids), upload.id),
        )
        return await self._end(upload.id, ended, published)

    async def forget(self, id: str) -> None:
        """Delete an upload that has no parts."""
        await self._database.execute("DELETE FROM uploads WHERE id = ?", id)

    async def cancel(self, id: str) -> bool:
        """Whether this was its end."""
        ended: Statement = ("UPDATE uploads SET status = 'cancelled' WHERE id = ? AND status = 'pending'", (id,))
        return await self._end(id, ended)

    async def _end(self, id: str, ended: Statement, *more: Statement) -> bool:
        forgotten: Statement = ("DELETE FROM upload_parts WHERE upload_id = ?", (id,))
        if not (await self._database.transact([ended, *more, forgotten], guarded=True))[0]:
            return False
        with suppress(DatabaseError):  # it has ended all the same; the rest is swept later
            await self._delete_pieces(id)
        return True

    async def _delete_pieces(self, id: str) -> None:
        some = f"(SELECT part_id, number FROM upload_pieces WHERE upload_id = ? LIMIT {DELETED_AT_ONCE})"
        while await self._database.execute(
            f"DELETE FROM upload_pieces WHERE upload_id = ? AND (part_id, number) IN {some}", id, id
        ):
            pass

    async def sweep(self) -> None:
        """Delete the parts of expired uploads, and what a part left that came too late; later the uploads too."""
        now = self.clock()
        expired: Statement = (
            "UPDATE uploads SET status = 'expired' WHERE status = 'pending' AND expires_at <= ?", (now,)
        )  # fmt: skip
        pending = "(SELECT id FROM uploads WHERE status = 'pending')"
        await self._database.transact([expired, (f"DELETE FROM upload_parts WHERE upload_id NOT IN {pending}", ())])
        left = f"SELECT DISTINCT upload_id FROM upload_pieces WHERE upload_id NOT IN {pending}"
        for (id,) in await self._database.fetch(left):
            await self._delete_pieces(str(id))
        await self._database.execute(
            "DELETE FROM uploads WHERE status <> 'pending' AND expires_at <= ?", now - SHOWN_S
        )  # fmt: skip


def _pieces(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), PIECE):
        yield content[start : start + PIECE]
