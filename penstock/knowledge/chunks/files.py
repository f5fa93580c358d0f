"""SQLite stores of collections, with a limit on how many are open."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.knowledge.chunks.base import ChunkStores
from penstock.knowledge.chunks.sqlite import SQLiteChunks
from penstock.knowledge.entities import Collection
from penstock.storage import DatabaseError

MOST_OPEN = 64
"""Each holds its vectors in memory; the least recently used one is closed, unless it is in use."""


class SQLiteStores(ChunkStores):
    """See `ChunkStores`."""

    def __init__(
        self, folder: Path, most_open: int = MOST_OPEN, *, expected: Callable[[str], Awaitable[bool]] | None = None
    ) -> None:
        """`expected`: whether a collection's file must exist already; a lost one is an error, not an empty one."""
        self._folder = folder
        self._expected = expected
        self._most_open = most_open
        self._open: OrderedDict[str, SQLiteChunks] = OrderedDict()
        self._users: Counter[str] = Counter()
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def use(self, collection: Collection) -> AsyncIterator[SQLiteChunks]:
        id = collection.id
        self._users[id] += 1
        try:
            async with self._turn:
                store = self._open.get(id)
                if store is None:
                    path = self._folder / f"{id}.db"
                    await self._check(path, id)
                    store = self._open[id] = await SQLiteChunks.open(path, collection)
                    await self._make_room()
                self._open.move_to_end(id)
            yield store
        finally:
            self._users[id] -= 1
            if not self._users[id]:
                del self._users[id]

    async def drop(self, collection: Collection) -> None:
        async with self._turn:
            store = self._open.pop(collection.id, None)
            if store is not None:
                await store.close()
            for file in self._folder.glob(f"{collection.id}.*"):
                file.unlink(missing_ok=True)

    async def close(self) -> None:
        async with self._turn:
            while self._open:
                await self._open.popitem()[1].close()

    async def _check(self, path: Path, id: str) -> None:
        if self._expected is None or await asyncio.to_thread(path.exists) or not await self._expected(id):
            return
        raise DatabaseError(
            f"{path} is missing, so the chunks of this collection are lost; restore it, or delete the collection and "
            "ingest its documents again"
        )

    async def _make_room(self) -> None:
        for id, store in list(self._open.items()):
            if len(self._open) > self._most_open and not self._users[id]:
                del self._open[id]
                await store.close()
