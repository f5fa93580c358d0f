"""SQLite in WAL mode: one connection on a thread of its own, so that the event loop never waits for the disk.

Several processes may open the same file; a writer waits up to `BUSY_S` for another. A durable commit is synced to disk
and survives a crash of the machine. Other commits are in the write-ahead log, which survives a crash of any process,
and reach the disk with the next durable commit, or in the background after `FLUSH_S`. When the log has grown, a second
connection on another thread checkpoints it concurrently; only what was added meanwhile is left for the moment in which
the log is restarted. A file that was deleted, replaced or damaged while open is neither read nor written any more
(`sqlite_health.py`).
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
from penstock.storage.sqlite_health import DAMAGED, DatabaseFiles, connect_existing, is_damage
from penstock.storage.wal_index import WalIndex

BUSY_S = 10.0
LOG_BYTES = 32 * 2**20
"""Size of the write-ahead log at which it is checkpointed: a busy gateway writes some tens of kilobytes per request.
The file keeps its size and is reused from the beginning, because truncating it takes a tenth of a second."""
PASSES, FEW_PAGES = 6, 128
FLUSH_S = 1.0
"""How long a commit that is not durable may stay unsynced; a durable commit has to sync all of them."""
RESTART_MS = 50
"""How long restarting the log may wait for readers; it is retried later."""
CHECK_EVERY = 16
"""Transactions between two checks of the log's size."""
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
        self._files: DatabaseFiles | None = None
        self._wrong: str | None = None
        """What is wrong with the files, as far as is known."""
        self._damaged = False
        self._durable = True
        self._page_size = 4096
        self._transactions = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sqlite log")
        self._checkpointing: Future[None] | None = None
        self._flushing: Future[None] | None = None
        self._flushed_at = time.monotonic()

    @classmethod
    async def open(cls, path: Path) -> SQLiteDatabase:
        database = cls(path)
        try:
            await database._run(database._connect)
        except DatabaseError:
            database._thread.end()
            database._executor.shutdown(wait=False)
            raise
        return database

    async def fetch(self, sql: str, *values: Any) -> list[Row]:
        return await self._run(lambda: self._open().execute(sql, values).fetchall())

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Runs several reads on one snapshot of the database, on its thread."""

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
            await asyncio.wrap_future(self._executor.submit(self._sync_log))
        except OSError as error:
            raise DatabaseError(f"{self.path}: {error}") from error

    @property
    def problem(self) -> str | None:
        return self._wrong

    def beside(self, name: str) -> Path:
        return self.path.with_name(f".{self.path.name}.{name}")  # hidden, so that no `rm penstock.db*` finds it

    async def check(self) -> None:
        try:
            await asyncio.wrap_future(self._executor.submit(self._examine))
        except (sqlite3.Error, OSError) as error:
            raise DatabaseError(f"{self.path}: {error}") from error

    async def close(self) -> None:
        if self._files is not None:
            self._files.interrupt()
        for work in (self._checkpointing, self._flushing):
            if work is not None:
                await asyncio.wait((asyncio.wrap_future(work),))
        await self._run(self._disconnect)
        self._thread.end()
        self._executor.shutdown(wait=False)

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
        self._files = DatabaseFiles(self.path, self._page_size)
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
        if self._wrong is None and self._files is not None:
            self._wrong = self._files.missing()
        if self._wrong is not None:
            raise DatabaseError(f"{self.path}: {self._wrong}")
        return self._connection

    def _examine(self) -> None:
        if self._files is not None and not self._damaged:
            self._wrong = self._files.problem(BUSY_S)
            self._damaged = self._wrong == DAMAGED
        if self._wrong is not None:
            raise DatabaseError(f"{self.path}: {self._wrong}")

    def _transact(self, statements: Sequence[Statement], guarded: bool, durable: bool) -> list[int]:
        connection = self._open()
        if durable != self._durable:
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._durable = durable
        if len(statements) == 1:  # a single statement is a transaction by itself
            sql, values = statements[0]
            counts = [max(0, connection.execute(sql, tuple(values)).rowcount)]
        else:
            counts = _together(connection, statements, guarded)
        self._transactions += 1
        if self._transactions % CHECK_EVERY == 0:
            self._check_log(connection)
        if not durable and (self._flushing is None or self._flushing.done()):
            now = time.monotonic()
            if now - self._flushed_at > FLUSH_S:
                self._flushed_at = now
                self._flushing = self._executor.submit(self._flush)
        return counts

    def _flush(self) -> None:
        try:
            self._sync_log()
        except OSError as error:
            log.warning("SQLite log could not be synced", extra={"path": str(self.path), "why": str(error)})

    def _sync_log(self) -> None:
        """Syncs the whole write-ahead log, whichever process wrote it. If there is none, it was checkpointed."""
        try:
            file = os.open(self.path.with_name(f"{self.path.name}-wal"), os.O_RDWR)
        except FileNotFoundError:
            return
        try:
            _sync(file)
        finally:
            os.close(file)

    def _check_log(self, connection: sqlite3.Connection) -> None:
        if self._checkpointing is not None:
            if self._checkpointing.done():
                self._checkpointing = None
                self._restart_log(connection)
            return
        if self._index is not None and self._index.pages() * self._page_size > LOG_BYTES:
            self._checkpointing = self._executor.submit(self._checkpoint)

    def _restart_log(self, connection: sqlite3.Connection) -> None:
        try:
            connection.execute(f"PRAGMA busy_timeout = {RESTART_MS}")
            connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
            connection.execute(f"PRAGMA busy_timeout = {round(BUSY_S * 1000)}")
        except sqlite3.Error as error:
            log.warning("SQLite log could not be restarted", extra={"path": str(self.path), "why": str(error)})

    def _checkpoint(self) -> None:
        """Checkpoints the log without blocking readers or writers. What was written during one pass is copied by the
        next, shorter pass, until little is left for the restart of the log, which does block."""
        try:
            connection = connect_existing(self.path, BUSY_S)
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
            log.warning("SQLite log could not be checkpointed", extra={"path": str(self.path), "why": str(error)})

    async def _run(self, work: Callable[[], T]) -> T:
        """Runs `work` on the database's thread."""
        try:
            return await self._thread.run(work)
        except (sqlite3.Error, OSError) as error:
            if is_damage(error):
                self._damaged, self._wrong = True, DAMAGED
            raise DatabaseError(f"{self.path}: {error}") from error


def _together(connection: sqlite3.Connection, statements: Sequence[Statement], guarded: bool) -> list[int]:
    """Runs one transaction; see `Database.transact`."""
    connection.execute("BEGIN IMMEDIATE")
    counts: list[int] = []
    try:
        for sql, values in statements:
            counts.append(max(0, connection.execute(sql, tuple(values)).rowcount))
            if guarded and counts[0] == 0:
                break
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk ends it by itself
            connection.execute("ROLLBACK")
        raise
    return counts


class _Thread:
    """A worker thread that returns results directly to the event loop: an executor with its own futures and locks
    costs as much as a short transaction."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._do, name=name, daemon=True).start()

    async def run(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def finish(settle: Callable[[Any], None], value: Any) -> None:
            if not answer.done():  # otherwise the caller was cancelled
                settle(value)

        def run() -> None:
            settle: Callable[[Any], None] = answer.set_result
            result: Any
            try:
                result = work()
            except BaseException as error:
                settle, result = answer.set_exception, error
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(finish, settle, result)

        self._work.put(run)
        return await answer

    def end(self) -> None:
        """Ends the thread after all queued work."""
        self._work.put(None)

    def _do(self) -> None:
        while (work := self._work.get()) is not None:
            work()
