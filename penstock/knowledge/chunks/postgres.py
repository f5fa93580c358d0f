"""A collection in its own PostgreSQL tables: pgvector with an HNSW index, full text with a GIN index.

PostgreSQL ranks by term frequency but not by document frequency; the rank of each word is therefore
weighted by its inverse document frequency, which approximates BM25.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from penstock.knowledge.chunks.base import ChunkStore, ChunkStores, EmbeddedChunk, Ranked
from penstock.knowledge.chunks.frequencies import Frequencies, affordable
from penstock.knowledge.chunks.sqlite import stored_of
from penstock.knowledge.entities import Collection, KnowledgeError, StoredChunk
from penstock.storage import Database, DatabaseError, Row, Statement

if TYPE_CHECKING:
    from penstock.knowledge.embedder import Vectors

EXPANSION_SEARCH = 200
"""Candidates of an HNSW search; also the maximum number of results."""
AFFORDABLE = 2000
"""Maximum of chunks to score: ranking in PostgreSQL costs ten times as much as arrays in memory."""
MOST_KNOWN = 1024
"""Collections whose tables are known to exist."""
_ID = re.compile(r"col_([0-9a-f]{32})")
_COLUMNS = "key, document, ordinal, heading, text, start_at, end_at, page, tokens"


class PostgresStores(ChunkStores):
    """See `ChunkStores`. Shares the catalogue's connections."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: OrderedDict[str, PostgresChunks] = OrderedDict()

    async def prepare(self) -> None:
        try:
            await self._database.create("CREATE EXTENSION IF NOT EXISTS vector")
        except DatabaseError as error:
            raise KnowledgeError(f"Collections in PostgreSQL need the extension pgvector: {error}") from error

    @asynccontextmanager
    async def use(self, collection: Collection) -> AsyncIterator[PostgresChunks]:
        store = self._known.get(collection.id)
        if store is None:
            store = PostgresChunks(self._database, collection)
            await store.prepare()
            self._known[collection.id] = store
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        yield store

    async def drop(self, collection: Collection) -> None:
        self._known.pop(collection.id, None)
        table = table_of(collection)
        await self._database.transact(
            [
                (f"DROP FUNCTION IF EXISTS nearest_{table}", ()),
                (f"DROP TABLE IF EXISTS {table}", ()),
                ("DELETE FROM schema_versions WHERE component = ?", (table,)),
            ]
        )

    async def close(self) -> None:
        self._known.clear()


class PostgresChunks(ChunkStore):
    """See `ChunkStore`."""

    def __init__(self, database: Database, collection: Collection) -> None:
        self._database = database
        self._table = table_of(collection)
        self._dimensions = collection.dimensions
        self._frequencies = Frequencies()

    async def prepare(self) -> None:
        table, vector = self._table, f"halfvec({self._dimensions})"
        await self._database.migrate(
            table,
            [
                [
                    f"CREATE TABLE {table} (key BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
                    "document TEXT NOT NULL, ordinal INTEGER NOT NULL, heading TEXT NOT NULL, text TEXT NOT NULL, "
                    "start_at INTEGER NOT NULL, end_at INTEGER NOT NULL, page INTEGER, tokens INTEGER NOT NULL, "
                    f"vector {vector} NOT NULL, late BYTEA NOT NULL, words TSVECTOR NOT NULL)",
                    f"CREATE INDEX ON {table} (document)",
                    f"CREATE INDEX ON {table} USING gin (words)",
                    f"CREATE INDEX ON {table} USING hnsw (vector halfvec_cosine_ops)",
                    # The setting applies to this function only, because connections are shared.
                    f"CREATE FUNCTION nearest_{table} (asked {vector}, most INTEGER) "
                    "RETURNS TABLE (key BIGINT, distance DOUBLE PRECISION) LANGUAGE sql STABLE "
                    f"SET hnsw.ef_search = {EXPANSION_SEARCH} AS "
                    f"'SELECT t.key, t.vector <=> asked FROM {table} t ORDER BY t.vector <=> asked LIMIT most'",
                ],
                # Data for ranking stays in the row; data for the index and the reranker is stored externally.
                [
                    f"ALTER TABLE {table} ALTER COLUMN words SET STORAGE MAIN, "
                    "ALTER COLUMN vector SET STORAGE EXTERNAL, ALTER COLUMN late SET STORAGE EXTERNAL"
                ],
            ],
        )

    async def replace(self, document: str, chunks: Sequence[EmbeddedChunk]) -> None:
        statements: list[Statement] = [(f"DELETE FROM {self._table} WHERE document = ?", (document,))]
        for embedded in chunks:
            chunk = embedded.chunk
            statements.append(
                (
                    f"INSERT INTO {self._table} (document, ordinal, heading, text, start_at, end_at, page, tokens, "
                    "vector, late, words) VALUES (?, ?, ?, ?, ?, ?, ?, ?, (?::text)::halfvec, ?, "
                    "setweight(to_tsvector('english', ?), 'A') || setweight(to_tsvector('english', ?), 'B'))",
                    (
                        document, chunk.ordinal, chunk.heading, chunk.text, chunk.start, chunk.end, chunk.page,
                        chunk.tokens, _literal(embedded.vector), embedded.late, chunk.heading, chunk.text,
                    ),
                )
            )  # fmt: skip
        await self._database.transact(statements)

    async def nearest(self, vector: Vectors, count: int, among: Sequence[str] | None = None) -> Ranked:
        if among is not None:
            # Exact: the index would be asked for its best chunks first, and few of those may be of these documents.
            rows = await self._database.fetch(
                f"WITH chosen AS MATERIALIZED (SELECT key, vector FROM {self._table} WHERE document = ANY(?)) "
                "SELECT key, vector <=> (?::text)::halfvec AS distance FROM chosen ORDER BY distance, key LIMIT ?",
                list(among), _literal(vector), count,
            )  # fmt: skip
            return [(key, 1.0 - distance) for key, distance in rows]
        rows = await self._database.fetch(
            f"SELECT key, distance FROM nearest_{self._table}((?::text)::halfvec, ?)", _literal(vector), count
        )
        return [(key, 1.0 - distance) for key, distance in rows]

    async def matching(self, terms: Sequence[str], count: int, among: Sequence[str] | None = None) -> Ranked:
        counts, total = await self.frequencies(terms)
        known = dict(zip(terms, counts, strict=True))
        chosen = affordable(terms, counts, total, AFFORDABLE)
        if not chosen:
            return []
        # 1: divided by the logarithm of the length; weights D, C, B, A: text is B and headings are A.
        one = "? * ts_rank('{0.1, 0.2, 0.7, 1.0}', words, plainto_tsquery('english', ?), 1)"
        ranks = " + ".join(one for _ in chosen)
        matches = " || ".join("plainto_tsquery('english', ?)" for _ in chosen)
        where, values = ("", []) if among is None else ("AND document = ANY(?) ", [list(among)])
        weighted = [part for term in chosen for part in (_idf(known[term], total), term)]
        rows = await self._database.fetch(
            f"SELECT key, {ranks} AS score FROM {self._table} WHERE words @@ ({matches}) {where}"
            "ORDER BY score DESC, key LIMIT ?",
            *weighted, *chosen, *values, count,
        )  # fmt: skip
        return [(key, float(score)) for key, score in rows]

    async def fetch(self, keys: Sequence[int]) -> dict[int, StoredChunk]:
        return {row[0]: stored_of(row) for row in await self._some(_COLUMNS, keys)}

    async def late(self, keys: Sequence[int]) -> dict[int, bytes]:
        return {row[0]: row[1] for row in await self._some("key, late", keys)}

    async def frequencies(self, terms: Sequence[str]) -> tuple[list[int], int]:
        size = int((await self._database.fetch(f"SELECT COALESCE(MAX(key), 0) FROM {self._table}"))[0][0])
        self._frequencies.size = size
        for term in self._frequencies.unknown(terms):
            rows = await self._database.fetch(
                f"SELECT COUNT(*) FROM {self._table} WHERE words @@ plainto_tsquery('english', ?)", term
            )
            self._frequencies.put(term, int(rows[0][0]))
        return [self._frequencies.get(term) for term in terms], size

    async def of_document(self, document: str) -> list[StoredChunk]:
        rows = await self._database.fetch(
            f"SELECT {_COLUMNS} FROM {self._table} WHERE document = ? ORDER BY ordinal", document
        )
        return [stored_of(row) for row in rows]

    async def _some(self, columns: str, keys: Sequence[int]) -> list[Row]:
        return await self._database.fetch(f"SELECT {columns} FROM {self._table} WHERE key = ANY(?)", list(keys))


def table_of(collection: Collection) -> str:
    found = _ID.fullmatch(collection.id)
    assert found is not None, "ids are made by the catalogue"
    return f"chunks_{found[1]}"


def _idf(count: int, total: int) -> float:
    return math.log(1.0 + (total - count + 0.5) / (count + 0.5)) if count <= total else 0.1


def _literal(vector: Vectors) -> str:
    return "[" + ",".join(f"{value:.6g}" for value in vector.tolist()) + "]"
