"""What a table store offers, and how one is opened by URL.

Statements are written once, in the SQL that both stores understand, with `?` for values. Several statements given
together happen together or not at all. Nothing here blocks the event loop. A store that cannot be reached raises
`DatabaseError`; callers decide what that means for a request.
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
    """The store is away, or refused a statement."""


MOST_VALUES = 30_000
"""Values in one statement; SQLite takes 32,766."""
_ONE_ROW = re.compile(r"(?P<into>INSERT INTO .* VALUES )(?P<row>\(\?(?:, \?)*\))(?P<rest> ON CONFLICT .* DO NOTHING)?")


def merged(statements: Sequence[Statement]) -> list[Statement]:
    """The same work in fewer statements: rows for the same table become one insertion.

    A statement costs more than a row, above all in a thread that has to ask the interpreter for every one of them. The
    order is kept among statements of the same text only, so it is for work whose order does not matter.
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
    """An open store. Close it when done."""

    @abstractmethod
    async def fetch(self, sql: str, *values: Any) -> list[Row]:
        """The rows of a query."""

    @abstractmethod
    async def transact(
        self, statements: Sequence[Statement], *, guarded: bool = False, durable: bool = True
    ) -> list[int]:
        """Run the statements in one transaction; how many rows each changed.

        `guarded`: the first one decides; when it changes nothing, nothing else is done and `[0]` returned. `durable`:
        wait for the disk; otherwise the transaction survives the end of every process, but not that of the machine,
        until it is flushed.
        """

    async def flush(self) -> None:
        """Returns when what was written is on the disk; a store that sees to that by itself, within a second, does not
        wait."""
        return

    @abstractmethod
    async def close(self) -> None: ...

    async def execute(self, sql: str, *values: Any) -> int:
        """Run one statement; how many rows it changed."""
        return (await self.transact([(sql, values)]))[0]

    async def migrate(self, component: str, versions: Sequence[Sequence[str]]) -> None:
        """Bring a component's tables to the newest version; each version is a list of statements, run once.

        Processes that start together do not get in each other's way: whoever raises the version runs its statements.
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
        """A `CREATE ... IF NOT EXISTS` that others may be running too."""
        await self.execute(sql)


def default_url() -> str:
    """The embedded store of this user."""
    return f"sqlite:///{state_folder() / 'penstock.db'}"  # an absolute path makes four slashes


def state_folder() -> Path:
    """Where this user's gateways keep what must survive them."""
    root = os.environ.get("PENSTOCK_STATE") or os.environ.get("XDG_STATE_HOME")
    base = Path(root) if root else Path.home() / ".local" / "state"
    return base / "penstock"


async def open_database(url: str) -> Database:
    """Open `sqlite:///relative/path`, `sqlite:////absolute/path` or `postgresql://USER@HOST/NAME`; empty: the
    embedded store of this user."""
    url = url or default_url()
    scheme = urlsplit(url).scheme
    if scheme == "sqlite":
        from penstock.storage.sqlite import SQLiteDatabase

        return await SQLiteDatabase.open(Path(url.removeprefix("sqlite:///")))
    if scheme in ("postgresql", "postgres"):
        from penstock.storage.postgres import PostgresDatabase

        return await PostgresDatabase.open(url)
    raise ConfigError(f"{redacted(url)} is not a store; use sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME")


def redacted(url: str) -> str:
    """A URL that may be shown: without its password."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return url.replace(f":{parts.password}@", ":***@", 1)
