"""The database interface, and opening a database by URL.

Statements are written once, in SQL that both databases understand, with `?` for values. Statements passed together are
one transaction. Nothing here blocks the event loop. A database that cannot be reached raises `DatabaseError`; callers
decide what that means for a request.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.errors import ConfigError, PenstockError

Row = tuple[Any, ...]
Statement = tuple[str, Sequence[Any]]


class DatabaseError(PenstockError):
    """The database is unavailable, or refused a statement."""


MOST_VALUES = 30_000
"""Maximum of values in one statement; SQLite allows 32,766."""
_ONE_ROW = re.compile(r"(?P<into>INSERT INTO .* VALUES )(?P<row>\(\?(?:, \?)*\))(?P<rest> ON CONFLICT .* DO NOTHING)?")


def merged(statements: Sequence[Statement]) -> list[Statement]:
    """Merges insertions into the same table into one statement each.

    A statement costs more than a row, above all in a thread that needs the GIL for each one. The order is kept only
    among statements with the same text, so this is for work whose order does not matter.
    """
    groups: dict[str, list[Sequence[Any]]] = {}
    for sql, values in statements:
        groups.setdefault(sql, []).append(values)
    found: list[Statement] = []
    for sql, rows in groups.items():
        shape = _ONE_ROW.fullmatch(sql) if len(rows) > 1 else None
        if shape is None:
            found += ((sql, values) for values in rows)
            continue
        most = MOST_VALUES // len(rows[0])
        for begin in range(0, len(rows), most):
            part = rows[begin : begin + most]
            text = shape["into"] + ", ".join([shape["row"]] * len(part)) + (shape["rest"] or "")
            found.append((text, [value for row in part for value in row]))
    return found


class Database(ABC):
    """An open database."""

    @abstractmethod
    async def fetch(self, sql: str, *values: Any) -> list[Row]:
        """The rows of a query."""

    @abstractmethod
    async def transact(
        self, statements: Sequence[Statement], *, guarded: bool = False, durable: bool = True
    ) -> list[int]:
        """Runs the statements in one transaction; returns how many rows each changed.

        `guarded`: if the first statement changes no row, the others are skipped and `[0]` is returned. `durable`: waits
        for the disk; otherwise the transaction survives a crash of this process, but not of the machine, until it is
        flushed, and not of a database server (see `interruptions`).
        """

    @property
    def interruptions(self) -> int | None:
        """How often a connection was lost. With the server may be lost what it had not flushed yet, so a writer who did
        not wait for the disk writes the last seconds again. None: there is no server to lose."""
        return None

    async def flush(self) -> None:
        """Returns when everything written is on disk; a database that flushes by itself within a second does not
        wait."""
        return

    @abstractmethod
    async def close(self) -> None: ...

    @property
    def problem(self) -> str | None:
        """Why nothing may be read or written any more, as far as is known; an outage that may pass is none."""
        return None

    def beside(self, name: str) -> Path | None:
        """Where a small file about this database may be kept that survives its loss; None: nowhere."""
        return None

    async def check(self) -> None:
        """Raises `DatabaseError` if the database is gone, damaged or unavailable."""
        await self.fetch("SELECT 1")

    async def execute(self, sql: str, *values: Any) -> int:
        """Runs one statement; returns how many rows it changed."""
        return (await self.transact([(sql, values)]))[0]

    async def migrate(self, component: str, versions: Sequence[Sequence[str]]) -> None:
        """Migrates a component's tables to the newest version; each version is a list of statements, run once.

        Safe when several processes start together: the one that raises the version runs its statements.
        """
        await self.create(
            "CREATE TABLE IF NOT EXISTS schema_versions (component TEXT PRIMARY KEY, version INTEGER NOT NULL)"
        )
        await self.execute(
            "INSERT INTO schema_versions (component, version) VALUES (?, 0) ON CONFLICT (component) DO NOTHING",
            component,
        )
        raise_version = "UPDATE schema_versions SET version = ? WHERE component = ? AND version = ?"
        for number, statements in enumerate(versions, start=1):
            step = (raise_version, (number, component, number - 1))
            await self.transact([step, *((sql, ()) for sql in statements)], guarded=True)

    async def create(self, sql: str) -> None:
        """Runs a `CREATE ... IF NOT EXISTS` that other processes may be running too."""
        await self.execute(sql)


def default_url() -> str:
    """The URL of this user's embedded database."""
    return f"sqlite:///{state_folder() / 'penstock.db'}"  # an absolute path makes four slashes


def state_folder() -> Path:
    """The folder for persistent state of this user's gateways."""
    root = os.environ.get("PENSTOCK_STATE") or os.environ.get("XDG_STATE_HOME")
    base = Path(root) if root else Path.home() / ".local" / "state"
    return base / "penstock"


async def open_database(url: str) -> Database:
    """Opens `sqlite:///relative/path`, `sqlite:////absolute/path` or `postgresql://USER@HOST/NAME`; empty: this
    user's embedded database."""
    url = url or default_url()
    scheme = urlsplit(url).scheme
    if scheme == "sqlite":
        from penstock.storage.sqlite import SQLiteDatabase

        return await SQLiteDatabase.open(Path(url.removeprefix("sqlite:///")))
    if scheme in ("postgresql", "postgres"):
        from penstock.storage.postgres import PostgresDatabase

        return await PostgresDatabase.open(url)
    raise ConfigError(
        f"{redacted(url)} is not a database URL; use sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME"
    )


def redacted(url: str) -> str:
    """The URL without its password, for messages."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return url.replace(f":{parts.password}@", ":***@", 1)
