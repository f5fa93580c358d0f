"""A collection in its own SQLite file: chunks, full text in FTS5, vectors, and the vector index beside it.

Full-text and vector search run on two threads, so that both halves of a hybrid search run in parallel. The
index is updated from the file before every search, whichever process wrote to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.knowledge.chunks.base import ChunkStore, EmbeddedChunk, Ranked
from penstock.knowledge.chunks.index import Mark, SavedIndex, VectorIndex
from penstock.knowledge.chunks.words import HEADING, TOKENIZER, Words
from penstock.knowledge.entities import Chunk, Collection, StoredChunk
from penstock.storage import Row, Statement
from penstock.storage.sqlite import SQLiteDatabase

if TYPE_CHECKING:
    from penstock.knowledge.embedder import Vectors

T = TypeVar("T")

KEPT_REMOVALS = 100_000
"""Removals that an index may lag behind; one that missed more is rebuilt."""
BATCH = 4096
SAVE_AFTER = 2000
"""Changes after which the index is saved, or a tenth of its size if that is more."""
_COLUMNS = "key, document, ordinal, heading, text, start_at, end_at, page, tokens"
_VERSIONS = (
    (
        "CREATE TABLE chunks (key INTEGER PRIMARY KEY AUTOINCREMENT, document TEXT NOT NULL, ordinal INTEGER NOT NULL, "
        "heading TEXT NOT NULL, text TEXT NOT NULL, start_at INTEGER NOT NULL, end_at INTEGER NOT NULL, page INTEGER, "
        "tokens INTEGER NOT NULL, vector BLOB NOT NULL, late BLOB NOT NULL)",
        "CREATE INDEX chunks_by_document ON chunks (document)",
        "CREATE VIRTUAL TABLE words USING fts5(heading, text, content='chunks', content_rowid='key', "
        f"tokenize='{TOKENIZER}')",
        f"INSERT INTO words (words, rank) VALUES ('rank', 'bm25({HEADING}, 1.0)')",
        "CREATE TABLE removals (number INTEGER PRIMARY KEY AUTOINCREMENT, key INTEGER NOT NULL)",
        "CREATE TABLE saved_index (id INTEGER PRIMARY KEY CHECK (id = 1), file TEXT NOT NULL, "
        "checksum INTEGER NOT NULL, key INTEGER NOT NULL, removal INTEGER NOT NULL)",
    ),
)


class SQLiteChunks(ChunkStore):
    """See `ChunkStore`."""

    def __init__(self, database: SQLiteDatabase, collection: Collection) -> None:
        self._database = database
        self._folder, self._stem = database.path.parent, database.path.stem
        self._dimensions = collection.dimensions
        self._index: VectorIndex | None = None
        self._turn = asyncio.Lock()
        """Held while the index changes."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vectors")
        self._words = Words()

    @classmethod
    async def open(cls, path: Path, collection: Collection) -> SQLiteChunks:
        database = await SQLiteDatabase.open(path)
        await database.migrate("chunks", _VERSIONS)
        await database.read(Words.prepare)
        return cls(database, collection)

    async def replace(self, document: str, chunks: Sequence[EmbeddedChunk]) -> None:
        statements: list[Statement] = [
            (
                "INSERT INTO words (words, rowid, heading, text) "
                "SELECT 'delete', key, heading, text FROM chunks WHERE document = ?",
                (document,),
            ),
            ("INSERT INTO removals (key) SELECT key FROM chunks WHERE document = ?", (document,)),
            (
                "DELETE FROM removals WHERE number <= (SELECT MAX(number) FROM removals) - ?",
                (KEPT_REMOVALS,),
            ),
            ("DELETE FROM chunks WHERE document = ?", (document,)),
        ]
        for embedded in chunks:
            chunk = embedded.chunk
            statements.append(
                (
                    "INSERT INTO chunks (document, ordinal, heading, text, start_at, end_at, page, tokens, vector, "
                    "late) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        document, chunk.ordinal, chunk.heading, chunk.text, chunk.start, chunk.end, chunk.page,
                        chunk.tokens, embedded.vector.astype(np.float16).tobytes(), embedded.late,
                    ),
                )
            )  # fmt: skip
        statements.append(
            (
                "INSERT INTO words (rowid, heading, text) SELECT key, heading, text FROM chunks WHERE document = ?",
                (document,),
            )
        )
        await self._database.transact(statements)
        if chunks or self._index is not None:
            await self._current_index()  # during ingestion, so that the first search need not index everything

    async def nearest(self, vector: Vectors, count: int, among: Sequence[str] | None = None) -> Ranked:
        if among is not None:
            # Exact: an index cannot tell documents apart, and would be searched further and further for those few.
            listed = _listed(among)
            return await self._database.read(lambda connection: _nearest(connection, listed, vector, count))
        index = await self._current_index()
        return await self._in_thread(lambda: index.search(vector, count))

    async def matching(self, terms: Sequence[str], count: int, among: Sequence[str] | None = None) -> Ranked:
        keys: NDArray[np.int64] | None = None
        if among is not None:
            rows = await self._database.fetch(
                "SELECT key FROM chunks WHERE document IN (SELECT value FROM json_each(?))", _listed(among)
            )
            keys = np.array([row[0] for row in rows], np.int64)
        return await self._database.read(lambda connection: self._words.search(connection, terms, count, keys))

    async def fetch(self, keys: Sequence[int]) -> dict[int, StoredChunk]:
        rows = await self._some(_COLUMNS, keys)
        return {row[0]: stored_of(row) for row in rows}

    async def late(self, keys: Sequence[int]) -> dict[int, bytes]:
        return {row[0]: row[1] for row in await self._some("key, late", keys)}

    async def frequencies(self, terms: Sequence[str]) -> tuple[list[int], int]:
        return await self._database.read(lambda connection: self._words.frequencies(connection, terms))

    async def of_document(self, document: str) -> list[StoredChunk]:
        rows = await self._database.fetch(
            f"SELECT {_COLUMNS} FROM chunks WHERE document = ? ORDER BY ordinal", document
        )
        return [stored_of(row) for row in rows]

    async def close(self) -> None:
        async with self._turn:
            # Another process may have deleted the collection: do not leave an index file behind.
            if self._index is not None and self._index.unsaved and await self._in_thread(self._database.path.exists):
                await self._save(self._index)
        await self._database.close()
        self._thread.shutdown(wait=False)

    # --- the index

    async def _current_index(self) -> VectorIndex:
        """The index, updated from the file."""
        async with self._turn:
            if self._index is None:
                self._index = await self._loaded()
            index = self._index
            key, removal = (
                await self._database.fetch(
                    "SELECT (SELECT COALESCE(MAX(key), 0) FROM chunks), (SELECT COALESCE(MAX(number), 0) FROM removals)"
                )
            )[0]
            if removal > index.mark.removal:
                index = self._index = await self._without_removed(index, removal)
            if key > index.mark.key:
                await self._add(index)
            if index.unsaved >= max(SAVE_AFTER, len(index) // 10):
                await self._save(index)
            return index

    async def _loaded(self) -> VectorIndex:
        rows = await self._database.fetch("SELECT file, checksum, key, removal FROM saved_index")
        if rows:
            file, checksum, key, removal = rows[0]
            saved = SavedIndex(file, checksum, Mark(key, removal))
            loaded = await self._in_thread(lambda: VectorIndex.load(self._folder, saved, self._dimensions))
            if loaded is not None:
                return loaded
        return await self._empty()

    async def _empty(self) -> VectorIndex:
        """An empty index whose mark covers all removals so far."""
        index = VectorIndex(self._dimensions)
        rows = await self._database.fetch("SELECT COALESCE(MAX(number), 0) FROM removals")
        index.mark = Mark(0, rows[0][0])
        return index

    async def _without_removed(self, index: VectorIndex, last: int) -> VectorIndex:
        rows = await self._database.fetch(
            "SELECT number, key FROM removals WHERE number > ? AND number <= ? ORDER BY number",
            index.mark.removal, last,
        )  # fmt: skip
        if len(rows) < last - index.mark.removal:
            return await self._empty()  # some removals were deleted: it lagged too far behind
        mark = Mark(index.mark.key, last)
        # Keys it has not read yet are gone from the table as well.
        keys = np.array([key for _, key in rows if key <= mark.key], np.uint64)
        await self._in_thread(lambda: index.remove(keys, mark))
        return index

    async def _add(self, index: VectorIndex) -> None:
        while rows := await self._database.fetch(
            "SELECT key, vector FROM chunks WHERE key > ? ORDER BY key LIMIT ?", index.mark.key, BATCH
        ):
            keys = np.array([row[0] for row in rows], np.uint64)
            vectors = np.frombuffer(b"".join(row[1] for row in rows), np.float16).reshape(-1, self._dimensions)
            mark = Mark(int(keys[-1]), index.mark.removal)
            await self._in_thread(lambda: index.add(keys, vectors, mark))  # noqa: B023

    async def _save(self, index: VectorIndex) -> None:
        before = await self._database.fetch("SELECT file FROM saved_index")
        saved = await self._in_thread(lambda: index.save(self._folder, self._stem))
        await self._database.execute(
            "INSERT INTO saved_index (id, file, checksum, key, removal) VALUES (1, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET file = excluded.file, checksum = excluded.checksum, "
            "key = excluded.key, removal = excluded.removal",
            saved.file, saved.checksum, saved.mark.key, saved.mark.removal,
        )  # fmt: skip
        for (file,) in before:
            if file != saved.file:
                with contextlib.suppress(FileNotFoundError):
                    (self._folder / file).unlink()

    async def _some(self, columns: str, keys: Sequence[int]) -> list[Row]:
        if not keys:
            return []
        marks = ", ".join("?" for _ in keys)
        return await self._database.fetch(f"SELECT {columns} FROM chunks WHERE key IN ({marks})", *keys)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _nearest(connection: sqlite3.Connection, among: str, vector: Vectors, count: int) -> Ranked:
    """Compares all chunks of documents, some at a time: a filter may let through most of a large collection."""
    cursor = connection.execute(
        "SELECT key, vector FROM chunks WHERE document IN (SELECT value FROM json_each(?))", (among,)
    )
    wanted = vector.astype(np.float32) / max(np.linalg.norm(vector), np.finfo(np.float32).tiny)
    keys, cosines = np.empty(0, np.int64), np.empty(0, np.float32)
    while rows := cursor.fetchmany(BATCH):
        found = np.frombuffer(b"".join(row[1] for row in rows), np.float16).reshape(len(rows), -1).astype(np.float32)
        sizes = np.maximum(np.linalg.norm(found, axis=1), np.finfo(np.float32).tiny)
        keys = np.concatenate([keys, np.array([row[0] for row in rows], np.int64)])
        cosines = np.concatenate([cosines, found @ wanted / sizes])
        best = np.lexsort((keys, -cosines))[:count]  # of equal ones the older chunk comes first
        keys, cosines = keys[best], cosines[best]
    return list(zip(keys.tolist(), cosines.tolist(), strict=True))


def _listed(names: Sequence[str]) -> str:
    """One value for any number of names: statements have few."""
    return json.dumps(list(names))


def stored_of(row: Row) -> StoredChunk:
    key, document, ordinal, heading, text, start, end, page, tokens = row
    return StoredChunk(key, document, Chunk(ordinal, heading, text, start, end, page, tokens))
