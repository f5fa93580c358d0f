"""Pages of collections and documents in the order of their creation, which clients walk in either direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.knowledge.catalogue import COLLECTION, DOCUMENT, collection_of, document_of
from penstock.knowledge.entities import Collection, Document, DocumentStatus
from penstock.storage import Database, Row


@dataclass(frozen=True, slots=True)
class Page:
    """What part of a list is wanted. `after` and `before` are the creation time and id of an entry that is shown
    already; with `before` alone, the page is the one that ends there."""

    limit: int
    newest_first: bool = True
    after: tuple[float, str] | None = None
    before: tuple[float, str] | None = None

    @property
    def backwards(self) -> bool:
        return self.before is not None and self.after is None


@dataclass(slots=True)
class Totals:
    """The documents of a collection: how many by status, and the bytes of those that can be found."""

    by_status: dict[str, int] = field(default_factory=dict)
    bytes: int = 0


class Listing:
    """Reads the tables of the catalogue."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def collections(self, tenant: str, page: Page) -> list[Collection]:
        rows = await self._rows(f"SELECT {COLLECTION} FROM collections WHERE tenant = ?", [tenant], page)
        return [collection_of(row) for row in rows]

    async def documents(
        self, collection: str, page: Page, *, statuses: Sequence[DocumentStatus] = (), batch: str | None = None
    ) -> list[Document]:
        query, values = f"SELECT {DOCUMENT} FROM documents WHERE collection = ?", list[Any]([collection])
        if statuses:
            query += f" AND status IN ({', '.join('?' for _ in statuses)})"
            values += statuses
        if batch is not None:
            query += " AND id IN (SELECT document FROM document_batch_members WHERE batch = ?)"
            values.append(batch)
        return [document_of(row) for row in await self._rows(query, values, page)]

    async def totals(self, collections: Sequence[str]) -> dict[str, Totals]:
        found = {id: Totals() for id in collections}
        if found:
            rows = await self._database.fetch(
                "SELECT collection, status, COUNT(*), CAST(SUM(size) AS BIGINT) FROM documents "
                f"WHERE collection IN ({', '.join('?' for _ in found)}) GROUP BY collection, status",
                *found,
            )
            for id, status, count, size in rows:
                found[id].by_status[status] = int(count)
                found[id].bytes += int(size) if status in ("ready", "duplicate") else 0
        return found

    async def _rows(self, query: str, values: list[Any], page: Page) -> list[Row]:
        """One row more than the limit where there are more. It is the last, or for a page that goes backwards the
        first."""
        later, earlier = ("<", ">") if page.newest_first else (">", "<")
        for mark, sign in ((page.after, later), (page.before, earlier)):
            if mark is not None:
                query += f" AND (created_at {sign} ? OR (created_at = ? AND id {sign} ?))"
                values += [mark[0], mark[0], mark[1]]
        order = "DESC" if page.newest_first is not page.backwards else "ASC"
        rows = await self._database.fetch(
            f"{query} ORDER BY created_at {order}, id {order} LIMIT {int(page.limit) + 1}", *values
        )
        return rows[::-1] if page.backwards else rows
