"""A file that says that a database has had API keys, kept outside of it: a server whose database vanished must not take
itself for a new one, which needs no keys. It is beside a SQLite file, and for PostgreSQL in the state folder of each
machine that has seen keys there."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from penstock.errors import ConfigError
from penstock.storage import Database, DatabaseError

_TEXT = """The database that this file is named after has had API keys, so Penstock does not start without any.
To start afresh without keys on purpose, delete this file.
"""


class KeysLost(ConfigError):
    """The database has no keys although it had some."""


class KeyMarker:
    """The marker of one database; there is none where nothing can be written."""

    def __init__(self, database: Database) -> None:
        self._path = database.beside("has-keys")
        self._set = False

    async def missed(self) -> KeysLost | None:
        """The error to raise where the database has no key; None if it never had any."""
        if self._path is None or not await asyncio.to_thread(self._path.exists):
            return None
        return KeysLost(
            "the database has no API keys, but it had some: it was deleted, replaced, or restored from an old backup. "
            "Restore it, or create a key with `penstock keys create`. To start afresh without keys on purpose, "
            f"delete {self._path}"
        )

    async def set(self) -> None:
        """Creates the file; `DatabaseError` when that is impossible."""
        if self._set or self._path is None:
            return
        try:
            await asyncio.to_thread(_write, self._path)
        except OSError as error:
            raise DatabaseError(f"{self._path}: {error.strerror}") from error
        self._set = True


def _write(path: Path) -> None:
    if path.exists():
        return
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, _TEXT.encode())
        os.fsync(file)
    finally:
        os.close(file)
