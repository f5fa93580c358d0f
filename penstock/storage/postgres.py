"""PostgreSQL through asyncpg: a small pool; statements with `?` are converted to numbered parameters and cached."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import re
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from penstock.errors import ConfigError, needs_extra
from penstock.storage.database import Database, DatabaseError, Row, Statement, redacted, state_folder

T = TypeVar("T")

CONNECTIONS = 8
TIMEOUT_S = 10.0
"""For one statement, and for a free connection of the pool: longer counts as an outage."""


@functools.lru_cache(maxsize=512)
def numbered(sql: str) -> str:
    """Replaces `?` by `$1`, `$2`, ...; quoted text is left alone."""
    parts: list[str] = []
    count, quoted = 0, False
    for character in sql:
        if character == "'":
            quoted = not quoted
        if character == "?" and not quoted:
            count += 1
            character = f"${count}"
        parts.append(character)
    return "".join(parts)


def local_name(url: str) -> str:
    """A name for files about this database: the same for every user and password that reaches it."""
    parts = urlsplit(url)
    asked = parse_qs(parts.query)
    host = parts.hostname or "".join(asked.get("host", ()))
    port = str(parts.port or "") or "".join(asked.get("port", ()))
    digest = hashlib.sha256(f"{host}\0{port or 5432}\0{parts.path}".encode()).hexdigest()[:12]
    return f"postgresql-{re.sub(r'[^A-Za-z0-9_-]', '', parts.path)[:32]}-{digest}"


class PostgresDatabase(Database):
    """See `Database`."""

    def __init__(self, pool: Any, url: str, lost: list[object] | None = None) -> None:
        """`lost`: gets an entry for every connection that ends."""
        self._pool = pool
        self._lost = [] if lost is None else lost
        self._url = redacted(url)
        self._name = local_name(url)

    @classmethod
    async def open(cls, url: str) -> PostgresDatabase:
        try:
            import asyncpg
        except ImportError as error:
            raise ConfigError(f"PostgreSQL {needs_extra('postgres')}") from error
        lost: list[object] = []

        async def follow(connection: Any) -> None:
            connection.add_termination_listener(lambda _: lost.append(None))

        try:
            pool = await asyncpg.create_pool(
                url, min_size=1, max_size=CONNECTIONS, command_timeout=TIMEOUT_S, timeout=TIMEOUT_S, init=follow
            )
        except (OSError, TimeoutError, asyncpg.PostgresError) as error:
            raise DatabaseError(f"{redacted(url)} cannot be reached: {error}") from error
        return cls(pool, url, lost)

    @property
    def interruptions(self) -> int:
        return len(self._lost)

    def beside(self, name: str) -> Path | None:
        """In this user's state folder; None where nothing can be written there, as in a container."""
        folder = state_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            return None
        return folder / f".{self._name}.{name}" if os.access(folder, os.W_OK) else None

    async def fetch(self, sql: str, *values: Any) -> list[Row]:
        return await self._guarded(self._fetch(numbered(sql), values))

    async def transact(
        self, statements: Sequence[Statement], *, guarded: bool = False, durable: bool = True
    ) -> list[int]:
        return await self._guarded(self._transact(statements, guarded, durable))

    async def create(self, sql: str) -> None:
        # Two sessions can both find the table missing and create it; the lock, held until the commit, prevents that.
        await self.transact([("SELECT pg_advisory_xact_lock(7274496)", ()), (sql, ())])

    async def close(self) -> None:
        try:
            await asyncio.wait_for(self._pool.close(), TIMEOUT_S)
        except TimeoutError:
            self._pool.terminate()

    async def _fetch(self, sql: str, values: Sequence[Any]) -> list[Row]:
        async with self._pool.acquire(timeout=TIMEOUT_S) as connection:
            return [tuple(record) for record in await connection.fetch(sql, *values)]

    async def _transact(self, statements: Sequence[Statement], guarded: bool, durable: bool) -> list[int]:
        counts: list[int] = []
        async with self._pool.acquire(timeout=TIMEOUT_S) as connection, connection.transaction():
            if not durable:
                await connection.execute("SET LOCAL synchronous_commit = off")
            for sql, values in statements:
                counts.append(_changed(await connection.execute(numbered(sql), *values)))
                if guarded and counts[0] == 0:
                    break
        return counts

    async def _guarded(self, work: Awaitable[T]) -> T:
        import asyncpg

        try:
            return await work
        except (
            OSError,
            TimeoutError,
            asyncpg.PostgresError,
            asyncpg.InterfaceError,
            asyncpg.InternalClientError,
        ) as error:
            # The last is what a connection that ends in the middle of a transaction raises now and then.
            raise DatabaseError(f"{self._url}: {error or type(error).__name__}") from error


def _changed(tag: str) -> int:
    """`UPDATE 3` and `INSERT 0 3` both mean three."""
    last = tag.rsplit(" ", 1)[-1]
    return int(last) if last.isdigit() else 0
