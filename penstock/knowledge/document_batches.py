"""Batches: documents that were added together. A batch is a list of ids; its progress is read from its documents, so
nothing has to be kept in step, whichever gateway ingests them and whichever dies."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.storage import Database, Statement, merged

MOST_BATCHES = 1000
"""Batches of a collection that are remembered; the oldest are forgotten, not their documents."""


@dataclass(frozen=True, slots=True)
class Batch:
    id: str
    collection: str
    cancelled: bool
    created_at: float


class DocumentBatches:
    """The batches of all collections."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    async def add(self, collection: str, documents: Sequence[str]) -> Batch:
        made = Batch(f"vsfb_{uuid.uuid4().hex}", collection, False, self._clock())
        old = "SELECT id FROM document_batches WHERE collection = ? ORDER BY created_at DESC LIMIT 100 OFFSET ?"
        forgotten = [row[0] for row in await self._database.fetch(old, collection, MOST_BATCHES - 1)]
        statements: list[Statement] = [
            (
                "INSERT INTO document_batches (id, collection, cancelled, created_at) VALUES (?, ?, 0, ?)",
                (made.id, collection, made.created_at),
            ),
            *merged(
                [
                    ("INSERT INTO document_batch_members (batch, document) VALUES (?, ?)", (made.id, document))
                    for document in dict.fromkeys(documents)
                ]
            ),
        ]
        for id in forgotten:
            statements.append(("DELETE FROM document_batch_members WHERE batch = ?", (id,)))
            statements.append(("DELETE FROM document_batches WHERE id = ?", (id,)))
        await self._database.transact(statements)
        return made

    async def get(self, collection: str, id: str) -> Batch | None:
        rows = await self._database.fetch(
            "SELECT id, collection, cancelled, created_at FROM document_batches WHERE id = ? AND collection = ?",
            id, collection,
        )  # fmt: skip
        return Batch(rows[0][0], rows[0][1], bool(rows[0][2]), rows[0][3]) if rows else None

    async def documents(self, batch: Batch) -> list[str]:
        rows = await self._database.fetch("SELECT document FROM document_batch_members WHERE batch = ?", batch.id)
        return [row[0] for row in rows]

    async def cancel(self, batch: Batch) -> None:
        await self._database.execute("UPDATE document_batches SET cancelled = 1 WHERE id = ?", batch.id)

    async def counts(self, batch: Batch) -> dict[str, int]:
        """Its documents by status; deleted ones are not counted."""
        rows = await self._database.fetch(
            "SELECT d.status, COUNT(*) FROM document_batch_members m JOIN documents d ON d.id = m.document "
            "WHERE m.batch = ? AND d.collection = ? GROUP BY d.status",
            batch.id, batch.collection,
        )  # fmt: skip
        return {row[0]: int(row[1]) for row in rows}
