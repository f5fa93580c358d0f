"""Files of tenants in the table store, in parts, so that no statement is large: those of batches are text and split at
line ends, documents are bytes.

A file becomes visible when it is complete; incomplete files of aborted uploads and batches are removed later. A file
belongs to a tenant, and to a user if a user's key made it, and is invisible to others.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Literal

import msgspec

from penstock.gateway.batches.uploads import UploadStore
from penstock.storage import Database, Row, Statement, Where

PART = 512 * 1024
"""Characters of a part; a longer line makes a longer part."""
PIECE = 2**20
"""Bytes of a part of a document."""
UNFINISHED_S = 3600.0
DELETED_AT_ONCE = 16
"""Parts."""
_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, "
        "purpose TEXT NOT NULL, bytes BIGINT NOT NULL, complete INTEGER NOT NULL, "
        "created_at DOUBLE PRECISION NOT NULL, expires_at DOUBLE PRECISION)",
        "CREATE TABLE IF NOT EXISTS file_parts (file_id TEXT NOT NULL, number INTEGER NOT NULL, content TEXT NOT NULL, "
        "PRIMARY KEY (file_id, number))",
        "CREATE INDEX IF NOT EXISTS files_by_tenant ON files (tenant, created_at)",
    ),
    ("ALTER TABLE files ADD COLUMN user_id TEXT NOT NULL DEFAULT ''",),
    (
        "CREATE TABLE IF NOT EXISTS file_pieces (file_id TEXT NOT NULL, number INTEGER NOT NULL, "
        "content BYTEA NOT NULL, PRIMARY KEY (file_id, number))",
    ),
    ("ALTER TABLE files ADD COLUMN media_type TEXT NOT NULL DEFAULT ''",),
)
DOCUMENT_PURPOSES = ("assistants", "user_data")
"""Purposes of files that are documents of vector stores, of any media type."""
_COLUMNS = "id, tenant, filename, purpose, bytes, created_at, expires_at, media_type"


class File(msgspec.Struct, frozen=True):
    """A file without its content."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: float
    expires_at: float | None
    media_type: str = ""
    """As the client said; empty where it did not."""

    def shown(self) -> dict[str, Any]:
        """The file as clients see it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created_at),
            "expires_at": None if self.expires_at is None else int(self.expires_at),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileWriter:
    """A file being written. It becomes visible when the statement of `finished` has run."""

    def __init__(self, database: Database, file: File) -> None:
        self._database = database
        self.file = file
        self._parts = 0
        self._waiting: list[str] = []
        self._size = 0
        self._bytes = 0

    async def add(self, text: str) -> None:
        """Append whole lines."""
        self._waiting.append(text)
        self._size += len(text)
        if self._size >= PART:
            await self._flush()

    async def finished(self) -> Statement:
        """Write the rest; returns the statement that makes the file visible."""
        await self._flush()
        return _published(self.file, self._bytes)

    async def _flush(self) -> None:
        if not self._waiting:
            return
        content = "".join(self._waiting)
        await self._database.execute(
            "INSERT INTO file_parts (file_id, number, content) VALUES (?, ?, ?)", self.file.id, self._parts, content
        )
        self._parts += 1
        self._bytes += len(content.encode())
        self._waiting, self._size = [], 0


class DocumentWriter:
    """The same for a file of bytes, which may be cut anywhere."""

    def __init__(self, database: Database, file: File) -> None:
        self._database = database
        self.file = file
        self._pieces = self._bytes = 0

    async def add(self, piece: bytes) -> None:
        await self._database.execute(
            "INSERT INTO file_pieces (file_id, number, content) VALUES (?, ?, ?)", self.file.id, self._pieces, piece
        )
        self._pieces += 1
        self._bytes += len(piece)

    def finished(self) -> Statement:
        return _published(self.file, self._bytes)


class FileStore:
    """All files."""

    def __init__(self, database: Database, *, keep_s: float, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._keep_s = keep_s
        self._clock = clock
        self.uploads = UploadStore(database, clock)
        """Files that arrive in parts."""

    async def prepare(self) -> None:
        await self._database.migrate("files", _VERSIONS)
        await self.uploads.prepare()

    async def begin(
        self,
        tenant: str,
        filename: str,
        purpose: str,
        *,
        user: str = "",
        keep_s: float | None = None,
        media_type: str = "",
    ) -> FileWriter:
        now = self._clock()
        expires_at = now + (keep_s or self._keep_s)
        file = File(f"file-{uuid.uuid4().hex}", tenant, filename, purpose, 0, now, expires_at, media_type)
        await self._database.execute(
            "INSERT INTO files (id, tenant, user_id, filename, purpose, bytes, complete, created_at, expires_at, "
            "media_type) VALUES (?, ?, ?, ?, ?, 0, 0, ?, ?, ?)",
            file.id, tenant, user, filename, purpose, file.created_at, file.expires_at, media_type,
        )  # fmt: skip
        return FileWriter(self._database, file)

    async def create(
        self, tenant: str, filename: str, purpose: str, text: str, *, user: str = "", keep_s: float | None = None
    ) -> File:
        writer = await self.begin(tenant, filename, purpose, user=user, keep_s=keep_s)
        for part in parts(text):
            await writer.add(part)
        await self._database.transact([await writer.finished()])
        return msgspec.structs.replace(writer.file, bytes=len(text.encode()))

    async def begin_document(self, tenant: str, filename: str, purpose: str, **about: Any) -> DocumentWriter:
        """`about`: as `begin` has it."""
        return DocumentWriter(self._database, (await self.begin(tenant, filename, purpose, **about)).file)

    async def create_document(self, tenant: str, filename: str, purpose: str, body: bytes, **about: Any) -> File:
        """A file of bytes, see `DOCUMENT_PURPOSES`. `about`: as `begin` has it."""
        writer = await self.begin_document(tenant, filename, purpose, **about)
        for start in range(0, len(body), PIECE):
            await writer.add(body[start : start + PIECE])
        await self._database.transact([writer.finished()])
        return msgspec.structs.replace(writer.file, bytes=len(body))

    async def get(self, id: str, tenant: str, user: str | None = None) -> File | None:
        """`user`: only if the file is this user's."""
        if "\0" in id:  # to PostgreSQL this is an error
            return None
        where = self._present(tenant, ("id = ?", id), ("user_id = ?", user))
        rows = await self._database.fetch(f"SELECT {_COLUMNS} FROM files WHERE {where}", *where.values)
        return _file(rows[0]) if rows else None

    async def page(
        self,
        tenant: str,
        user: str | None = None,
        *,
        purpose: str | None,
        after: File | None,
        newest: bool,
        limit: int,
    ) -> list[File]:
        where = self._present(tenant, ("user_id = ?", user), ("purpose = ?", purpose))
        order: Literal["ASC", "DESC"] = "DESC" if newest else "ASC"
        if after is not None:
            where.beyond(after.created_at, after.id, order)
        rows = await self._database.fetch(
            f"SELECT {_COLUMNS} FROM files WHERE {where} ORDER BY created_at {order}, id {order} LIMIT {int(limit)}",
            *where.values,
        )
        return [_file(row) for row in rows]

    def _present(self, tenant: str, *which: tuple[str, Any]) -> Where:
        """Those of a tenant's files that are whole and have not expired."""
        where = Where(("tenant = ?", tenant), ("expires_at > ?", self._clock()), *which)
        where.add("complete = 1")
        return where

    async def used(self, tenant: str) -> int:
        """The size of a tenant's files in bytes, with what is promised to uploads."""
        rows = await self._database.fetch(
            "SELECT CAST(COALESCE(SUM(bytes), 0) AS BIGINT) FROM files WHERE tenant = ? AND expires_at > ?",
            tenant, self._clock(),
        )  # fmt: skip
        _, promised = await self.uploads.pending(tenant)
        return int(rows[0][0]) + promised

    async def content(self, id: str) -> AsyncIterator[str]:
        """The parts of a file; each ends at the end of a line."""
        number = 0
        while rows := await self._database.fetch(
            "SELECT content FROM file_parts WHERE file_id = ? AND number = ?", id, number
        ):
            yield rows[0][0]
            number += 1

    async def pieces(self, file: File) -> AsyncIterator[bytes]:
        """The content of a file of any purpose."""
        if file.purpose in DOCUMENT_PURPOSES:
            async for piece in self.pieces_of(file.id):
                yield piece
        else:
            async for part in self.content(file.id):
                yield part.encode()

    async def pieces_of_any(self, id: str) -> AsyncIterator[bytes]:
        """The same, by its id: a file has its content in one of two tables."""
        async for part in self.content(id):
            yield part.encode()
        async for piece in self.pieces_of(id):
            yield piece

    async def pieces_of(self, id: str) -> AsyncIterator[bytes]:
        """The content of a document."""
        number = 0
        while rows := await self._database.fetch(
            "SELECT content FROM file_pieces WHERE file_id = ? AND number = ?", id, number
        ):
            yield bytes(rows[0][0])
            number += 1

    async def delete(self, id: str) -> None:
        """Invisible at once, and nobody's bytes; then its content goes, a few parts at a time, because everybody else's
        writes wait for each statement."""
        await self._database.execute("UPDATE files SET complete = 0, expires_at = 0 WHERE id = ?", id)
        for table in ("file_parts", "file_pieces"):
            some = f"(SELECT number FROM {table} WHERE file_id = ? LIMIT {DELETED_AT_ONCE})"
            while await self._database.execute(f"DELETE FROM {table} WHERE file_id = ? AND number IN {some}", id, id):
                pass
        await self._database.execute("DELETE FROM files WHERE id = ?", id)

    async def sweep(self) -> None:
        """Remove expired files, and old files that were never completed."""
        rows = await self._database.fetch(
            "SELECT id FROM files WHERE expires_at <= ? OR (complete = 0 AND created_at <= ?) LIMIT 100",
            self._clock(), self._clock() - UNFINISHED_S,
        )  # fmt: skip
        for (id,) in rows:
            await self.delete(id)
        await self.uploads.sweep()


def _published(file: File, size: int) -> Statement:
    return "UPDATE files SET complete = 1, bytes = ? WHERE id = ?", (size, file.id)


def parts(text: str) -> Iterator[str]:
    """Pieces of about `PART` characters that end where lines end."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PART)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def _file(row: Row) -> File:
    return File(*row)
