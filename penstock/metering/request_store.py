"""The request log in a SQLite or PostgreSQL table, from which it can also be read.

Arrival time and request id form the primary key, so a batch that is written twice is stored once.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from penstock.metering.log_entries import FIELDS, Entry, LogEntry
from penstock.metering.request_log import Sink, SinkError
from penstock.storage import Database, DatabaseError, Where
from penstock.storage.database import merged

_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS request_log (request_id TEXT NOT NULL, user_id TEXT, tenant TEXT, "
        "model_version TEXT, adapter_id TEXT, prompt_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL, "
        "completion_tokens BIGINT NOT NULL, ttft_ms DOUBLE PRECISION, total_latency_ms DOUBLE PRECISION NOT NULL, "
        "finish_reason TEXT, route TEXT NOT NULL, timestamp DOUBLE PRECISION NOT NULL, "
        "PRIMARY KEY (timestamp, request_id))",
        "CREATE INDEX IF NOT EXISTS request_log_tenant ON request_log (tenant, timestamp)",
    ),
)
_INSERT = (
    f"INSERT INTO request_log ({', '.join(FIELDS)}) VALUES ({', '.join('?' * len(FIELDS))}) "
    "ON CONFLICT (timestamp, request_id) DO NOTHING"
)
_PRUNE = (
    "DELETE FROM request_log WHERE (timestamp, request_id) IN "
    "(SELECT timestamp, request_id FROM request_log WHERE timestamp < ? ORDER BY timestamp LIMIT ?)"
)
ROWS_TOGETHER = 64
"""Maximum rows per transaction: charges share the database's thread and must not wait long."""
PRUNE_EVERY_S = 60.0
PRUNE_TURNS = 16
"""Transactions per batch that delete expired rows: twice as many rows as a batch adds."""


class RequestStore(Sink):
    """See `Sink`. `open` is called on first use."""

    def __init__(
        self,
        open: Callable[[], Awaitable[Database]],
        *,
        retention_s: float | None = None,
        owned: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`owned`: whether the database is closed with the log."""
        self._open = open
        self._owned = owned
        self._retention_s = retention_s
        self._clock = clock
        self._database: Database | None = None
        self._pruned_at = float("-inf")

    async def write(self, entries: Sequence[Entry]) -> None:
        try:
            database = await self._ready()
            for begin in range(0, len(entries), ROWS_TOGETHER):
                rows = [(_INSERT, msgspec.structs.astuple(entry)) for entry in entries[begin : begin + ROWS_TOGETHER]]
                await database.transact(merged(rows), durable=False)
            now = self._clock()
            if self._retention_s is not None and now - self._pruned_at > PRUNE_EVERY_S:
                # The rest is deleted with the next batches, when a sink that is behind has caught up.
                for _ in range(PRUNE_TURNS):
                    old = (_PRUNE, (now - self._retention_s, ROWS_TOGETHER))
                    if await database.transact([old], durable=False) != [ROWS_TOGETHER]:
                        self._pruned_at = now
                        break
        except DatabaseError as error:
            raise SinkError(str(error)) from error

    async def read(
        self,
        *,
        since: float = 0.0,
        until: float | None = None,
        tenant: str | None = None,
        user: str | None = None,
        model: str | None = None,
        finish_reason: str | None = None,
        request_id: str | None = None,
        routes: Sequence[str] = (),
        limit: int = 100,
    ) -> list[LogEntry]:
        """Entries of requests that arrived after `since` and before `until`, newest first; of `routes` only, if any
        are given."""
        where = Where(
            ("timestamp >= ?", since),
            ("timestamp < ?", until),
            ("tenant = ?", tenant),
            ("user_id = ?", user),
            ("COALESCE(adapter_id, model_version) = ?", model),
            ("finish_reason = ?", finish_reason),
            ("request_id = ?", request_id),
        )
        if routes:
            where.one_of("route", routes)
        rows = await (await self._ready()).fetch(
            f"SELECT {', '.join(FIELDS)} FROM request_log WHERE {where} ORDER BY timestamp DESC LIMIT {int(limit)}",
            *where.values,
        )
        return [LogEntry(*row) for row in rows]

    async def close(self) -> None:
        if self._database is not None and self._owned:
            await self._database.close()
        self._database = None

    async def _ready(self) -> Database:
        if self._database is None:
            database = await self._open()
            try:
                await database.migrate("request_log", _VERSIONS)
            except DatabaseError:
                if self._owned:
                    await database.close()
                raise
            self._database = database
        return self._database
