"""SQLite in WAL mode: one connection on one thread of its own, so that the event loop never waits for the disk.

Several processes may open the same file; a writer waits for another up to `BUSY_S`. Every commit is synced to the
disk: what was acknowledged survives a crash of the machine.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from penstock.storage.database import Database, DatabaseError, Row, Statement

BUSY_S = 10.0
T = TypeVar("T")


class SQLiteDatabase(Database):
    """See `Database`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite")
        self._connection: sqlite3.Connection | None = None

    @classmethod
    async def open(cls, path: Path) -> SQLiteDatabase:
        database = cls(path)
        try:
            await database._run(database._connect)
        except DatabaseError:
            database._thread.shutdown(wait=False)
            raise
        return database

    async def fetch(self, sql: str, *values: Any) -> list[Row]:
        return await self._run(lambda: self._open().execute(sql, values).fetchall())

    async def transact(self, statements: Sequence[Statement], *, guarded: bool = False) -> list[int]:
        return await self._run(lambda: self._transact(statements, guarded))

    async def close(self) -> None:
        await self._run(self._disconnect)
        self._thread.shutdown(wait=False)

    def _connect(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        self.path.chmod(0o600)
        self._connection = connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise DatabaseError(f"{self.path} is closed")
        return self._connection

    def _transact(self, statements: Sequence[Statement], guarded: bool) -> list[int]:
        connection = self._open()
        connection.execute("BEGIN IMMEDIATE")
        counts: list[int] = []
        try:
            for sql, values in statements:
                counts.append(max(0, connection.execute(sql, tuple(values)).rowcount))
                if guarded and counts[0] == 0:
                    break
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        return counts

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, OSError) as error:
            raise DatabaseError(f"{self.path}: {error}") from error
