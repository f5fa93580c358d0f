"""Whether the files of an open SQLite database are still the ones that were opened, and undamaged.

SQLite keeps writing into a file that was deleted or replaced under it, and reports damage only when it happens to read
a damaged page. Here the path is compared with the file that was opened (cheap enough for every transaction), and the
file is read through a connection of its own, without the pages that others have cached, whenever it has changed.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

FULL_CHECK_BYTES = 256 * 2**20
"""A larger file is not read as a whole; its damage is noticed when a damaged page is read."""
FULL_CHECK_SHARE = 0.01
"""Maximum share of the time that is spent on reading whole files."""
FULL_CHECK_EVERY_S = 3600.0
GONE = "the database file was deleted or moved while in use; restore it and restart"
REPLACED = "the database file was replaced by another while in use; restart"
DAMAGED = "the database file is damaged; restore it from a backup and restart"
_LOG_FILES = ("-wal", "-shm")
_DAMAGE = frozenset((sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB))


def is_damage(error: BaseException) -> bool:
    """Whether an error of SQLite means that the file is damaged, rather than busy, full or refused."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _DAMAGE


def connect_existing(path: Path, timeout_s: float) -> sqlite3.Connection:
    """Connects to a database that exists; never creates one in the place of a deleted one."""
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
    )


class DatabaseFiles:
    """The files of one open database."""

    def __init__(self, path: Path, page_size: int) -> None:
        """Call it after connecting."""
        self._path = os.fspath(path)
        self._page_size = page_size
        found = os.stat(self._path)
        self._identity = found.st_dev, found.st_ino
        self._logs: dict[str, tuple[int, int]] = {}
        self._checked = 0, 0
        """Size and time of the last change of the file that was read as a whole."""
        self._next_full_at = 0.0
        self._checking: sqlite3.Connection | None = None

    def missing(self) -> str | None:
        """Why the path no longer names the open file; None: it does."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return GONE
        return None if (found.st_dev, found.st_ino) == self._identity else REPLACED

    def problem(self, timeout_s: float) -> str | None:
        """What is wrong with the files; None: nothing. Reads the disk, so it takes a while."""
        try:
            return self._examined(timeout_s)
        except (sqlite3.Error, OSError):
            if (wrong := self.missing()) is not None:  # it went while it was being read
                return wrong
            raise

    def _examined(self, timeout_s: float) -> str | None:
        wrong = self.missing() or self._missing_log()
        if wrong is not None:
            return wrong
        found = os.stat(self._path)
        if found.st_size < self._page_size:  # connecting to an empty file would delete its log
            return DAMAGED
        changed = found.st_size, found.st_mtime_ns
        now = time.monotonic()
        full = found.st_size <= FULL_CHECK_BYTES and (
            now >= self._next_full_at + FULL_CHECK_EVERY_S or (changed != self._checked and now >= self._next_full_at)
        )
        try:
            with closing(connect_existing(Path(self._path), timeout_s)) as connection:
                connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
                if full and not self._intact(connection):
                    return DAMAGED
        except sqlite3.Error as error:
            if is_damage(error):
                return DAMAGED
            raise
        if full:
            self._checked = changed
            self._next_full_at = time.monotonic() + (time.monotonic() - now) / FULL_CHECK_SHARE
        return None

    def interrupt(self) -> None:
        """Ends a check that is under way."""
        if (checking := self._checking) is not None:
            checking.interrupt()

    def _intact(self, connection: sqlite3.Connection) -> bool:
        self._checking = connection
        try:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
        finally:
            self._checking = None

    def _missing_log(self) -> str | None:
        """SQLite keeps its log and the log's index as long as a connection is open."""
        for name in _LOG_FILES:
            try:
                found = os.stat(self._path + name)
            except FileNotFoundError:
                if name in self._logs:
                    return GONE
                continue
            identity = found.st_dev, found.st_ino
            if self._logs.setdefault(name, identity) != identity:
                return REPLACED
        return None
