"""SQLite in WAL mode: one connection on one thread of its own, so that the event loop never waits for the disk.

Several processes may open the same file; a writer waits for another up to `BUSY_S`. A durable commit is synced to the
disk: what was acknowledged survives a crash of the machine. Others are in the log, which outlives every process, and
reach the disk with the next durable one. When the log has grown, another connection on another thread copies it into
the database beside the work; only what was added meanwhile is left for the moment in which it starts anew.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from penstock.storage.database import Database, DatabaseError, Row, Statement

BUSY_S = 10.0
LOG_BYTES = 16 * 2**20
"""Size of the write-ahead log at which it is folded into the database."""
RESTART_MS = 50
"""How long the start of a new log may wait for readers; it is tried again."""
LOOK_EVERY = 16
"""Transactions between two looks at that size."""
T = TypeVar("T")
log = logging.getLogger(__name__)


class SQLiteDatabase(Database):
    """See `Database`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite")
        self._connection: sqlite3.Connection | None = None
        self._durable = True
        self._transactions = 0
        self._folder = ThreadPoolExecutor(1, thread_name_prefix="sqlite log")
        self._folding: Future[None] | None = None

    @classmethod
    async def open(cls, path: Path) -> SQLiteDatabase:
        database = cls(path)
        try:
            await database._run(database._connect)
        except DatabaseError:
            database._thread.shutdown(wait=False)
            database._folder.shutdown(wait=False)
            raise
        return database

    async def fetch(self, sql: str, *values: Any) -> list[Row]:
        return await self._run(lambda: self._open().execute(sql, values).fetchall())

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Several reads of one state of the database, on its thread."""

        def reading() -> T:
            connection = self._open()
            connection.execute("BEGIN")
            try:
                found = work(connection)
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
            return found

        return await self._run(reading)

    async def transact(
        self, statements: Sequence[Statement], *, guarded: bool = False, durable: bool = True
    ) -> list[int]:
        return await self._run(lambda: self._transact(statements, guarded, durable))

    async def close(self) -> None:
        if self._folding is not None:
            await asyncio.wrap_future(self._folding)
        await self._run(self._disconnect)
        self._thread.shutdown(wait=False)
        self._folder.shutdown(wait=False)

    def _connect(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
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

    def _transact(self, statements: Sequence[Statement], guarded: bool, durable: bool) -> list[int]:
        connection = self._open()
        if durable != self._durable:
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._durable = durable
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
        self._transactions += 1
        if self._transactions % LOOK_EVERY == 0:
            self._look_at_log(connection)
        return counts

    def _look_at_log(self, connection: sqlite3.Connection) -> None:
        if self._folding is not None:
            if self._folding.done():
                self._folding = None
                self._start_anew(connection)
            return
        try:
            size = self.path.with_name(f"{self.path.name}-wal").stat().st_size
        except FileNotFoundError:
            return
        if size > LOG_BYTES:
            self._folding = self._folder.submit(self._fold)

    def _start_anew(self, connection: sqlite3.Connection) -> None:
        try:
            connection.execute(f"PRAGMA busy_timeout = {RESTART_MS}")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            connection.execute(f"PRAGMA busy_timeout = {round(BUSY_S * 1000)}")
        except sqlite3.Error as error:
            log.warning("the log of %s could not be started anew: %s", self.path, error)

    def _fold(self) -> None:
        """Copy the log into the database; whoever reads or writes meanwhile is not held up."""
        try:
            connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
            try:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            finally:
                connection.close()
        except sqlite3.Error as error:
            log.warning("the log of %s could not be folded in: %s", self.path, error)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, OSError) as error:
            raise DatabaseError(f"{self.path}: {error}") from error
