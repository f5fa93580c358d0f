"""SQLite in WAL mode: one connection on one thread of its own, so that the event loop never waits for the disk.

Several processes may open the same file; a writer waits for another up to `BUSY_S`. A durable commit is synced to the
disk: what was acknowledged survives a crash of the machine. Others are in the log, which outlives every process, and
reach the disk with the next durable one, or `FLUSH_S` later without anybody waiting for it. When the log has grown,
another connection on another thread copies it into the database beside the work; only what was added meanwhile is left
for the moment in which it starts anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from penstock.storage.database import Database, DatabaseError, Row, Statement
from penstock.storage.wal_index import WalIndex

BUSY_S = 10.0
LOG_BYTES = 32 * 2**20
"""Size of the write-ahead log at which it is folded into the database: a busy gateway writes some tens of kilobytes per
request. The file keeps its size and is written again from its beginning; cutting it off takes a tenth of a second."""
PASSES, FEW_PAGES = 6, 128
FLUSH_S = 1.0
"""How long what does not wait for the disk stays away from it: whoever waits, waits for all of it."""
RESTART_MS = 50
"""How long the start of a new log may wait for readers; it is tried again."""
LOOK_EVERY = 16
"""Transactions between two looks at that size."""
T = TypeVar("T")
_sync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)
log = logging.getLogger(__name__)


class SQLiteDatabase(Database):
    """See `Database`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread = _Thread("sqlite")
        self._connection: sqlite3.Connection | None = None
        self._index: WalIndex | None = None
        self._durable = True
        self._page_size = 4096
        self._transactions = 0
        self._folder = ThreadPoolExecutor(1, thread_name_prefix="sqlite log")
        self._folding: Future[None] | None = None
        self._flushing: Future[None] | None = None
        self._flushed_at = time.monotonic()

    @classmethod
    async def open(cls, path: Path) -> SQLiteDatabase:
        database = cls(path)
        try:
            await database._run(database._connect)
        except DatabaseError:
            database._thread.end()
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

    async def flush(self) -> None:
        try:
            await asyncio.wrap_future(self._folder.submit(self._sync_log))
        except OSError as error:
            raise DatabaseError(f"{self.path}: {error}") from error

    async def close(self) -> None:
        for work in (self._folding, self._flushing):
            if work is not None:
                await asyncio.wait((asyncio.wrap_future(work),))
        await self._run(self._disconnect)
        self._thread.end()
        self._folder.shutdown(wait=False)

    def _connect(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._index = WalIndex.hold(self.path)
        try:
            self._connection = self._connected()
        except BaseException:
            self._disconnect()
            raise

    def _connected(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        (self._page_size,) = connection.execute("PRAGMA page_size").fetchone()
        self.path.chmod(0o600)
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._index is not None:
            self._index.release()
            self._index = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise DatabaseError(f"{self.path} is closed")
        return self._connection

    def _transact(self, statements: Sequence[Statement], guarded: bool, durable: bool) -> list[int]:
        connection = self._open()
        if durable != self._durable:
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._durable = durable
        if len(statements) == 1:  # which is a transaction by itself
            sql, values = statements[0]
            counts = [max(0, connection.execute(sql, tuple(values)).rowcount)]
        else:
            counts = _together(connection, statements, guarded)
        self._transactions += 1
        if self._transactions % LOOK_EVERY == 0:
            self._look_at_log(connection)
        if not durable and (self._flushing is None or self._flushing.done()):
            now = time.monotonic()
            if now - self._flushed_at > FLUSH_S:
                self._flushed_at = now
                self._flushing = self._folder.submit(self._flush)
        return counts

    def _flush(self) -> None:
        try:
            self._sync_log()
        except OSError as error:
            log.warning("the log of %s could not be brought to the disk: %s", self.path, error)

    def _sync_log(self) -> None:
        """All of the write-ahead log, by whomever it was written. One that does not exist has been folded in."""
        try:
            file = os.open(self.path.with_name(f"{self.path.name}-wal"), os.O_RDWR)
        except FileNotFoundError:
            return
        try:
            _sync(file)
        finally:
            os.close(file)

    def _look_at_log(self, connection: sqlite3.Connection) -> None:
        if self._folding is not None:
            if self._folding.done():
                self._folding = None
                self._start_anew(connection)
            return
        if self._index is not None and self._index.pages() * self._page_size > LOG_BYTES:
            self._folding = self._folder.submit(self._fold)

    def _start_anew(self, connection: sqlite3.Connection) -> None:
        try:
            connection.execute(f"PRAGMA busy_timeout = {RESTART_MS}")
            connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
            connection.execute(f"PRAGMA busy_timeout = {round(BUSY_S * 1000)}")
        except sqlite3.Error as error:
            log.warning("the log of %s could not be started anew: %s", self.path, error)

    def _fold(self) -> None:
        """Copy the log into the database; whoever reads or writes meanwhile is not held up. What was written during one
        pass is copied by the next, which is shorter, until little is left for the moment in which everybody waits."""
        try:
            connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
            try:
                pages = 0
                for _ in range(PASSES):
                    _, now, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                    if now - pages < FEW_PAGES:
                        break
                    pages = now
            finally:
                connection.close()
        except sqlite3.Error as error:
            log.warning("the log of %s could not be folded in: %s", self.path, error)

    async def _run(self, work: Callable[[], T]) -> T:
        """On the thread."""
        try:
            return await self._thread.run(work)
        except (sqlite3.Error, OSError) as error:
            raise DatabaseError(f"{self.path}: {error}") from error


def _together(connection: sqlite3.Connection, statements: Sequence[Statement], guarded: bool) -> list[int]:
    """One transaction; see `Database.transact`."""
    connection.execute("BEGIN IMMEDIATE")
    counts: list[int] = []
    try:
        for sql, values in statements:
            counts.append(max(0, connection.execute(sql, tuple(values)).rowcount))
            if guarded and counts[0] == 0:
                break
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk has ended it already
            connection.execute("ROLLBACK")
        raise
    return counts


class _Thread:
    """Does one thing after another for an event loop, to which it hands the results directly: an executor with its own
    futures and locks costs as much as a short transaction."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._do, name=name, daemon=True).start()

    async def run(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def finish(settle: Callable[[Any], None], value: Any) -> None:
            if not answer.done():  # nobody waits any more
                settle(value)

        def run() -> None:
            settle: Callable[[Any], None] = answer.set_result
            result: Any
            try:
                result = work()
            except BaseException as error:
                settle, result = answer.set_exception, error
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more either
                loop.call_soon_threadsafe(finish, settle, result)

        self._work.put(run)
        return await answer

    def end(self) -> None:
        """When everything until now is done."""
        self._work.put(None)

    def _do(self) -> None:
        while (work := self._work.get()) is not None:
            work()
