"""The catalogue of collections and documents, in the database.

Every query names the tenant, or a collection that was found through one. The same statements run on SQLite and
PostgreSQL. The ingest queue uses the same tables; see `queue`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.knowledge.entities import Attribute, Collection, CollectionExists, Document, DocumentStatus
from penstock.storage import Database, Row, Statement

_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS collections (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, "
        "description TEXT NOT NULL, metadata TEXT NOT NULL, embedding_model TEXT NOT NULL, "
        "dimensions INTEGER NOT NULL, chunk_tokens INTEGER NOT NULL, overlap_tokens INTEGER NOT NULL, "
        "created_at DOUBLE PRECISION NOT NULL, UNIQUE (tenant, name))",
        "CREATE TABLE IF NOT EXISTS documents (collection TEXT NOT NULL REFERENCES collections (id) ON DELETE CASCADE, "
        "id TEXT NOT NULL, tenant TEXT NOT NULL, name TEXT NOT NULL, url TEXT NOT NULL, media_type TEXT NOT NULL, "
        "charset TEXT NOT NULL, digest TEXT NOT NULL, size BIGINT NOT NULL, metadata TEXT NOT NULL, "
        "status TEXT NOT NULL, error TEXT NOT NULL, chunks INTEGER NOT NULL, chunks_done INTEGER NOT NULL, "
        "tokens INTEGER NOT NULL, version INTEGER NOT NULL, duplicate_of TEXT NOT NULL, "
        "created_at DOUBLE PRECISION NOT NULL, updated_at DOUBLE PRECISION NOT NULL, "
        "leased_until DOUBLE PRECISION NOT NULL, attempts INTEGER NOT NULL, PRIMARY KEY (collection, id))",
        "CREATE INDEX IF NOT EXISTS documents_by_digest ON documents (collection, digest)",
        "CREATE INDEX IF NOT EXISTS documents_by_status ON documents (status, tenant, updated_at)",
        "CREATE TABLE IF NOT EXISTS contents (collection TEXT NOT NULL, document TEXT NOT NULL, "
        "version INTEGER NOT NULL, body BYTEA NOT NULL, PRIMARY KEY (collection, document), "
        "FOREIGN KEY (collection, document) REFERENCES documents (collection, id) ON DELETE CASCADE)",
    ),
    (
        "ALTER TABLE collections ADD COLUMN title TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE collections ADD COLUMN expires_days INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE collections ADD COLUMN last_active_at DOUBLE PRECISION NOT NULL DEFAULT 0",
        "ALTER TABLE documents ADD COLUMN chunk_tokens INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE documents ADD COLUMN overlap_tokens INTEGER NOT NULL DEFAULT 0",
        "CREATE INDEX IF NOT EXISTS collections_by_age ON collections (tenant, created_at, id)",
        "CREATE INDEX IF NOT EXISTS documents_by_age ON documents (collection, created_at, id)",
        "CREATE INDEX IF NOT EXISTS documents_by_id ON documents (id)",
        "CREATE TABLE IF NOT EXISTS document_batches (id TEXT PRIMARY KEY, collection TEXT NOT NULL "
        "REFERENCES collections (id) ON DELETE CASCADE, cancelled INTEGER NOT NULL, "
        "created_at DOUBLE PRECISION NOT NULL)",
        "CREATE INDEX IF NOT EXISTS document_batches_by_age ON document_batches (collection, created_at)",
        "CREATE TABLE IF NOT EXISTS document_batch_members (batch TEXT NOT NULL "
        "REFERENCES document_batches (id) ON DELETE CASCADE, document TEXT NOT NULL, PRIMARY KEY (batch, document))",
    ),
)
COLLECTION = (
    "id, tenant, name, description, metadata, embedding_model, dimensions, chunk_tokens, overlap_tokens, created_at, "
    "title, expires_days, last_active_at"
)
DOCUMENT = (
    "collection, id, name, url, media_type, digest, size, metadata, status, error, chunks, chunks_done, tokens, "
    "version, duplicate_of, created_at, updated_at, chunk_tokens, overlap_tokens"
)
_EXPIRED = (
    "expires_days > 0 AND "
    "CASE WHEN last_active_at > 0 THEN last_active_at ELSE created_at END + expires_days * 86400.0 <= ?"
)
ACTIVE_S = 60.0
"""How exactly the last use of a collection is recorded."""
_metadata = msgspec.json.Decoder(dict[str, str])
_attributes = msgspec.json.Decoder(dict[str, Attribute])


class Catalogue:
    """The collections and documents of all tenants."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    async def prepare(self) -> None:
        await self._database.migrate("knowledge", _VERSIONS)

    # --- collections

    async def add_collection(
        self,
        tenant: str,
        name: str,
        *,
        description: str,
        metadata: Mapping[str, str],
        embedding_model: str,
        dimensions: int,
        chunk_tokens: int,
        overlap_tokens: int,
        title: str = "",
        expires_days: int = 0,
    ) -> Collection:
        now = self._clock()
        made = Collection(
            f"col_{uuid.uuid4().hex}", tenant, name, description, dict(metadata), embedding_model, dimensions,
            chunk_tokens, overlap_tokens, now, title, expires_days, now,
        )  # fmt: skip
        values = (
            made.id, tenant, name, description, encode_metadata(metadata), embedding_model, dimensions, chunk_tokens,
            overlap_tokens, now, title, expires_days, now,
        )  # fmt: skip
        changed = await self._database.execute(
            f"INSERT INTO collections ({COLLECTION}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (tenant, name) DO NOTHING",
            *values,
        )
        if not changed:
            raise CollectionExists(f"The collection `{name}` already exists.")
        return made

    async def collection(self, tenant: str, name: str) -> Collection | None:
        """A collection by id or name (the id takes precedence); never another tenant's."""
        rows = await self._database.fetch(
            f"SELECT {COLLECTION} FROM collections WHERE tenant = ? AND (id = ? OR name = ?)", tenant, name, name
        )
        found = [collection_of(row) for row in rows]
        return next((one for one in found if one.id == name), found[0] if found else None)

    async def collections(self, tenant: str, *, limit: int, after: str = "") -> list[Collection]:
        """In the order of their names."""
        rows = await self._database.fetch(
            f"SELECT {COLLECTION} FROM collections WHERE tenant = ? AND name > ? ORDER BY name LIMIT ?",
            tenant, after, limit,
        )  # fmt: skip
        return [collection_of(row) for row in rows]

    async def describe_collection(
        self, collection: Collection, *, title: str, metadata: Mapping[str, str], expires_days: int
    ) -> None:
        """A change is a use: a collection that gets a date of expiry is kept for that long from now."""
        await self._database.execute(
            "UPDATE collections SET title = ?, metadata = ?, expires_days = ?, last_active_at = ? "
            "WHERE id = ? AND tenant = ?",
            title, encode_metadata(metadata), expires_days, self._clock(), collection.id, collection.tenant,
        )  # fmt: skip

    async def note_use(self, collection: Collection) -> None:
        """The collection was searched or written to."""
        now = self._clock()
        if now - collection.used_at >= ACTIVE_S:
            await self._database.execute(
                "UPDATE collections SET last_active_at = ? WHERE id = ? AND last_active_at < ?",
                now, collection.id, now,
            )  # fmt: skip

    async def expired_collections(self) -> list[Collection]:
        """Some that nobody used for longer than they are to be kept, and that still have documents."""
        rows = await self._database.fetch(
            f"SELECT {COLLECTION} FROM collections WHERE {_EXPIRED} "
            "AND EXISTS (SELECT 1 FROM documents WHERE documents.collection = collections.id) LIMIT 16",
            self._clock(),
        )
        return [collection_of(row) for row in rows]

    async def empty_expired(self, collection: Collection) -> bool:
        """Deletes its documents; returns False, and deletes nothing, where somebody has used it meanwhile."""
        counts = await self._database.transact(
            [
                # Changes nothing but locks the row, so that no use comes in between.
                (
                    f"UPDATE collections SET expires_days = expires_days WHERE id = ? AND {_EXPIRED}",
                    (collection.id, self._clock()),
                ),
                ("DELETE FROM contents WHERE collection = ?", (collection.id,)),
                ("DELETE FROM documents WHERE collection = ?", (collection.id,)),
                *_batches_of(collection),
            ],
            guarded=True,
        )
        return bool(counts[0])

    async def collection_count(self, tenant: str) -> int:
        rows = await self._database.fetch("SELECT COUNT(*) FROM collections WHERE tenant = ?", tenant)
        return int(rows[0][0])

    async def remove_collection(self, collection: Collection) -> None:
        await self._database.transact(
            [
                ("DELETE FROM contents WHERE collection = ?", (collection.id,)),
                ("DELETE FROM documents WHERE collection = ?", (collection.id,)),
                *_batches_of(collection),
                ("DELETE FROM collections WHERE id = ? AND tenant = ?", (collection.id, collection.tenant)),
            ]
        )

    async def counts(self, collection: str) -> tuple[dict[str, int], int, int]:
        """Documents by status, chunks, tokens."""
        rows = await self._database.fetch(
            "SELECT status, COUNT(*), SUM(chunks_done), SUM(tokens) FROM documents WHERE collection = ? "
            "GROUP BY status",
            collection,
        )
        return {row[0]: int(row[1]) for row in rows}, sum(int(row[2]) for row in rows), sum(int(row[3]) for row in rows)

    async def has_chunks(self, collection: str) -> bool:
        """Whether a document of the collection was ingested, so that its chunks must be stored somewhere."""
        return bool(
            await self._database.fetch(
                "SELECT 1 FROM documents WHERE collection = ? AND status = 'ready' AND chunks_done > 0 LIMIT 1",
                collection,
            )
        )

    async def pending(self, tenant: str) -> int:
        """Number of a tenant's documents waiting to be ingested."""
        rows = await self._database.fetch(
            "SELECT COUNT(*) FROM documents WHERE status IN ('queued', 'processing') AND tenant = ?", tenant
        )
        return int(rows[0][0])

    async def document_count(self, collection: str) -> int:
        rows = await self._database.fetch("SELECT COUNT(*) FROM documents WHERE collection = ?", collection)
        return int(rows[0][0])

    # --- documents

    async def put_document(
        self,
        collection: Collection,
        id: str,
        *,
        name: str,
        url: str,
        media_type: str,
        charset: str,
        digest: str,
        metadata: Mapping[str, Attribute],
        body: bytes,
        chunk_tokens: int = 0,
        overlap_tokens: int = 0,
        distinct: bool = False,
        error: str = "",
    ) -> Document:
        """Adds or replaces a document; it is queued, or marked as a duplicate of one with the same content, unless it
        is `distinct`. `error`: why it is not ingested at all."""
        now = self._clock()
        before = await self.document(collection.id, id)
        same = None if distinct or error else await self.with_digest(collection.id, digest, but=id)
        status: DocumentStatus = "failed" if error else "queued" if same is None else "duplicate"
        twin = "" if same is None else same.id
        values = (
            collection.id, id, collection.tenant, name, url, media_type, charset, digest, len(body),
            encode_metadata(metadata), status, twin, now, now, error, chunk_tokens, overlap_tokens,
        )  # fmt: skip
        await self._database.transact(
            [
                (
                    "INSERT INTO documents (collection, id, tenant, name, url, media_type, charset, digest, size, "
                    "metadata, status, duplicate_of, created_at, updated_at, error, chunk_tokens, overlap_tokens, "
                    "version, chunks, chunks_done, tokens, leased_until, attempts) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1, 0, 0, 0, 0, 0) "
                    "ON CONFLICT (collection, id) DO UPDATE SET name = excluded.name, url = excluded.url, "
                    "media_type = excluded.media_type, charset = excluded.charset, digest = excluded.digest, "
                    "size = excluded.size, metadata = excluded.metadata, status = excluded.status, "
                    "duplicate_of = excluded.duplicate_of, version = documents.version + 1, "
                    "chunk_tokens = excluded.chunk_tokens, overlap_tokens = excluded.overlap_tokens, "
                    "updated_at = excluded.updated_at, error = excluded.error, chunks = 0, chunks_done = 0, "
                    "tokens = 0, leased_until = 0, attempts = 0",
                    values,
                ),
                (
                    "INSERT INTO contents (collection, document, version, body) VALUES "
                    "(?, ?, (SELECT version FROM documents WHERE collection = ? AND id = ?), ?) "
                    "ON CONFLICT (collection, document) DO UPDATE SET version = excluded.version, "
                    "body = excluded.body",
                    (collection.id, id, collection.id, id, body),
                ),
            ]
        )
        if before is not None and before.digest != digest:
            await self._promote(collection.id, id, before.digest)
        found = await self.document(collection.id, id)
        assert found is not None
        return found

    async def describe_document(
        self, document: Document, *, name: str, url: str, metadata: Mapping[str, Attribute]
    ) -> None:
        """Changes a document's name, URL and metadata, not its content."""
        await self._database.execute(
            "UPDATE documents SET name = ?, url = ?, metadata = ?, updated_at = ? WHERE collection = ? AND id = ?",
            name, url, encode_metadata(metadata), self._clock(), document.collection, document.id,
        )  # fmt: skip

    async def document(self, collection: str, id: str) -> Document | None:
        rows = await self._database.fetch(
            f"SELECT {DOCUMENT} FROM documents WHERE collection = ? AND id = ?", collection, id
        )
        return document_of(rows[0]) if rows else None

    async def some_documents(self, collection: str, ids: Sequence[str]) -> dict[str, Document]:
        if not ids:
            return {}
        marks = ", ".join("?" for _ in ids)
        rows = await self._database.fetch(
            f"SELECT {DOCUMENT} FROM documents WHERE collection = ? AND id IN ({marks})", collection, *ids
        )
        return {row[1]: document_of(row) for row in rows}

    async def documents(
        self, collection: str, *, limit: int, after: str = "", status: DocumentStatus | None = None
    ) -> list[Document]:
        """In the order of their ids."""
        where, values = ("AND status = ? ", (status,)) if status is not None else ("", ())
        rows = await self._database.fetch(
            f"SELECT {DOCUMENT} FROM documents WHERE collection = ? AND id > ? {where}ORDER BY id LIMIT ?",
            collection, after, *values, limit,
        )  # fmt: skip
        return [document_of(row) for row in rows]

    async def attributes(self, collection: str) -> list[tuple[str, str]]:
        """The ids of all documents that can be found, and their metadata as JSON."""
        rows = await self._database.fetch(
            "SELECT id, metadata FROM documents WHERE collection = ? AND status <> 'duplicate'", collection
        )
        return [(row[0], row[1]) for row in rows]

    async def copies(self, tenant: str, id: str) -> list[tuple[Collection, Document]]:
        """A tenant's documents with this id, in all collections."""
        rows = await self._database.fetch(f"SELECT {DOCUMENT} FROM documents WHERE id = ? AND tenant = ?", id, tenant)
        found = [(await self.collection(tenant, row[0]), document_of(row)) for row in rows]
        return [(collection, document) for collection, document in found if collection is not None]

    async def cancel_documents(self, collection: str, ids: Sequence[str]) -> list[str]:
        """Takes documents out of the queue; returns those that were in it. What was begun for them is discarded, as for
        documents that are replaced."""
        cancelled = []
        for id in ids:
            changed = await self._database.transact(
                [
                    (
                        "UPDATE documents SET status = 'cancelled', version = version + 1, chunks_done = 0, "
                        "updated_at = ? WHERE collection = ? AND id = ? AND status IN ('queued', 'processing')",
                        (self._clock(), collection, id),
                    ),
                    ("DELETE FROM contents WHERE collection = ? AND document = ?", (collection, id)),
                ],
                guarded=True,
            )
            if changed[0]:
                cancelled.append(id)
        return cancelled

    async def with_digest(self, collection: str, digest: str, *, but: str = "") -> Document | None:
        """The document with this content, except duplicates and failures; None if there is none."""
        rows = await self._database.fetch(
            f"SELECT {DOCUMENT} FROM documents WHERE collection = ? AND digest = ? AND id <> ? "
            "AND status IN ('queued', 'processing', 'ready') LIMIT 1",
            collection, digest, but,
        )  # fmt: skip
        return document_of(rows[0]) if rows else None

    async def remove_document(self, document: Document) -> None:
        where, values = "collection = ? AND {} = ?", (document.collection, document.id)
        await self._database.transact(
            [
                ("DELETE FROM contents WHERE " + where.format("document"), values),
                ("DELETE FROM documents WHERE " + where.format("id"), values),
            ]
        )
        await self._promote(document.collection, document.id, document.digest)

    async def _promote(self, collection: str, id: str, digest: str) -> None:
        """Queues the oldest duplicate of content whose original is gone."""
        rows = await self._database.fetch(
            "SELECT id FROM documents WHERE collection = ? AND duplicate_of = ? AND digest = ? "
            "ORDER BY created_at, id",
            collection, id, digest,
        )  # fmt: skip
        if not rows:
            return
        heir = rows[0][0]
        await self._database.transact(
            [
                (
                    "UPDATE documents SET status = 'queued', duplicate_of = '' WHERE collection = ? AND id = ?",
                    (collection, heir),
                ),
                (
                    "UPDATE documents SET duplicate_of = ? WHERE collection = ? AND duplicate_of = ? AND digest = ?",
                    (heir, collection, id, digest),
                ),
            ]
        )


def _batches_of(collection: Collection) -> list[Statement]:
    return [
        (
            "DELETE FROM document_batch_members WHERE batch IN (SELECT id FROM document_batches WHERE collection = ?)",
            (collection.id,),
        ),
        ("DELETE FROM document_batches WHERE collection = ?", (collection.id,)),
    ]


def encode_metadata(metadata: Mapping[str, Attribute]) -> str:
    return msgspec.json.encode(dict(metadata)).decode()


def collection_of(row: Row) -> Collection:
    id, tenant, name, description, metadata, *rest = row
    return Collection(id, tenant, name, description, _metadata.decode(metadata), *rest)


def document_of(row: Row) -> Document:
    values: list[Any] = list(row)
    values[7] = _attributes.decode(values[7])
    return Document(*values)
