"""The queue of documents to ingest, in the tables of the catalogue.

Work is claimed under a lease, so that a document whose worker died is taken by another; `version` discards work on a
document that was replaced meanwhile. Any number of gateways may take from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.knowledge.catalogue import COLLECTION, DOCUMENT, collection_of, document_of
from penstock.knowledge.entities import Collection, Document
from penstock.storage import Database

LEASE_S = 120.0
MOST_ATTEMPTS = 5
"""Attempts after which a document is given up, because it crashes its readers."""
_PENDING = "(status = 'queued' OR (status = 'processing' AND leased_until < ?))"


@dataclass(frozen=True, slots=True)
class Claim:
    """A claimed document, with everything needed to ingest it."""

    collection: Collection
    document: Document
    charset: str
    body: bytes
    attempts: int


class IngestQueue:
    """Claims documents and records progress and results."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    async def waiting_tenants(self) -> list[str]:
        """Tenants with waiting documents, the longest waiting first."""
        rows = await self._database.fetch(
            f"SELECT tenant FROM documents WHERE {_PENDING} GROUP BY tenant ORDER BY MIN(updated_at)", self._clock()
        )
        return [row[0] for row in rows]

    async def claim(self, tenant: str) -> Claim | None:
        """Claims the oldest waiting document of a tenant; None when there is none."""
        now = self._clock()
        rows = await self._database.fetch(
            f"SELECT {DOCUMENT} FROM documents WHERE {_PENDING} AND tenant = ? ORDER BY updated_at LIMIT 8",
            now, tenant,
        )  # fmt: skip
        for row in rows:
            document = document_of(row)
            mine = await self._database.execute(
                "UPDATE documents SET status = 'processing', leased_until = ?, attempts = attempts + 1 "
                f"WHERE collection = ? AND id = ? AND version = ? AND {_PENDING}",
                now + LEASE_S, document.collection, document.id, document.version, now,
            )  # fmt: skip
            if mine and (claim := await self._claimed(document)) is not None:
                return claim
        return None

    async def _claimed(self, document: Document) -> Claim | None:
        found = await self._database.fetch(
            "SELECT d.charset, d.attempts, c.body FROM documents d JOIN contents c ON c.collection = d.collection "
            "AND c.document = d.id AND c.version = d.version WHERE d.collection = ? AND d.id = ? AND d.version = ?",
            document.collection, document.id, document.version,
        )  # fmt: skip
        rows = await self._database.fetch(f"SELECT {COLLECTION} FROM collections WHERE id = ?", document.collection)
        if not found or not rows:
            return None  # it was just replaced or removed
        charset, attempts, body = found[0]
        return Claim(collection_of(rows[0]), document, charset, bytes(body), attempts)

    async def progress(self, document: Document, *, chunks: int, done: int) -> bool:
        """Records progress and renews the lease; returns whether the work is still wanted."""
        return bool(
            await self._database.execute(
                "UPDATE documents SET chunks = ?, chunks_done = ?, leased_until = ? "
                "WHERE collection = ? AND id = ? AND version = ? AND status = 'processing'",
                chunks,
                done,
                self._clock() + LEASE_S,
                document.collection,
                document.id,
                document.version,
            )
        )

    async def finish(self, document: Document, *, chunks: int, tokens: int) -> bool:
        """Marks a document as ready and deletes its raw content; returns whether it was still wanted."""
        where = (document.collection, document.id, document.version)
        changed = await self._database.transact(
            [
                (
                    "UPDATE documents SET status = 'ready', error = '', chunks = ?, chunks_done = ?, tokens = ?, "
                    "updated_at = ? WHERE collection = ? AND id = ? AND version = ?",
                    (chunks, chunks, tokens, self._clock(), *where),
                ),
                ("DELETE FROM contents WHERE collection = ? AND document = ? AND version = ?", where),
            ],
            guarded=True,
        )
        return bool(changed[0])

    async def fail(self, document: Document, error: str) -> None:
        where = (document.collection, document.id, document.version)
        await self._database.transact(
            [
                (
                    "UPDATE documents SET status = 'failed', error = ?, updated_at = ? "
                    "WHERE collection = ? AND id = ? AND version = ?",
                    (error, self._clock(), *where),
                ),
                ("DELETE FROM contents WHERE collection = ? AND document = ? AND version = ?", where),
            ],
            guarded=True,
        )

    async def release(self, document: Document) -> None:
        """Returns a claim to the queue; it does not count as an attempt."""
        await self._database.execute(
            "UPDATE documents SET status = 'queued', leased_until = 0, attempts = attempts - 1 "
            "WHERE collection = ? AND id = ? AND version = ? AND status = 'processing'",
            document.collection, document.id, document.version,
        )  # fmt: skip

    async def wanted(self, document: Document) -> bool:
        """Whether a document exists, in any version, and was not cancelled."""
        rows = await self._database.fetch(
            "SELECT 1 FROM documents WHERE collection = ? AND id = ? AND status <> 'cancelled'",
            document.collection, document.id,
        )  # fmt: skip
        return bool(rows)

    async def collection_exists(self, collection: Collection) -> bool:
        return bool(await self._database.fetch("SELECT 1 FROM collections WHERE id = ?", collection.id))
