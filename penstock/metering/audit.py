"""The audit log: every decision by a data rule, in a table of the store.

Entries say who asked, what was decided about, by which rule and with which outcome; never text. They are written in
the background in batches: no request waits. The queue is bounded; entries that do not fit, while the store is away or
too slow, are counted as lost. Old entries are deleted by age and by number.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

import msgspec

from penstock.storage import Database, DatabaseError, Where
from penstock.storage.database import merged
from penstock.telemetry.exposition import MetricRegistry

log = logging.getLogger(__name__)

Outcome = Literal["permitted", "refused", "withheld", "marked", "changed"]
OUTCOMES: tuple[Outcome, ...] = ("permitted", "refused", "withheld", "marked", "changed")
"""permitted: it got the request. refused: the client got an error. withheld: it was left out, and something else may
have answered. marked: a guardrail added to the demand. changed: an administrator changed a rule."""

_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS audit_log (id TEXT PRIMARY KEY, timestamp DOUBLE PRECISION NOT NULL, "
        "request_id TEXT NOT NULL, tenant TEXT NOT NULL, user_id TEXT NOT NULL, key_id TEXT NOT NULL, "
        "path TEXT NOT NULL, outcome TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, rule TEXT NOT NULL, "
        "demand TEXT NOT NULL)",
        "CREATE INDEX IF NOT EXISTS audit_log_by_time ON audit_log (timestamp)",
        "CREATE INDEX IF NOT EXISTS audit_log_by_tenant ON audit_log (tenant, timestamp)",
    ),
)
CAPACITY = 20_000
BATCH = 64
"""Rows per transaction: charges share the database's thread and must not wait long."""
FLUSH_S = 0.5
RETRY_S = 2.0
PRUNE_EVERY_S = 60.0
PRUNE_ROWS = 1000
MOST_NAME = 256


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One decision. The fields are the table's columns, in order."""

    id: str
    timestamp: float
    request_id: str = ""
    tenant: str = ""
    user_id: str = ""
    key_id: str = ""
    path: str = ""
    """The endpoint."""
    outcome: Outcome
    kind: str
    """What was decided about: model, fallback, tool, moderator, judge, encoder, guardrail, tenant, key."""
    name: str
    rule: str = ""
    """Who demands what was not met, or what was changed."""
    demand: str = ""
    """The whole demand of the request."""


FIELDS = AuditEntry.__struct_fields__
_INSERT = (
    f"INSERT INTO audit_log ({', '.join(FIELDS)}) VALUES ({', '.join('?' * len(FIELDS))}) ON CONFLICT (id) DO NOTHING"
)
_PRUNE = "DELETE FROM audit_log WHERE id IN (SELECT id FROM audit_log WHERE timestamp < ? ORDER BY timestamp LIMIT ?)"
_OLDEST = "DELETE FROM audit_log WHERE id IN (SELECT id FROM audit_log ORDER BY timestamp LIMIT ?)"


class AuditStore:
    """The table."""

    def __init__(
        self,
        database: Database,
        *,
        retention_s: float | None = None,
        most: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._retention_s = retention_s
        self._most = most
        self._clock = clock

    async def prepare(self) -> None:
        await self._database.migrate("audit_log", _VERSIONS)

    async def write(self, entries: Sequence[AuditEntry]) -> None:
        rows = [(_INSERT, msgspec.structs.astuple(entry)) for entry in entries]
        await self._database.transact(merged(rows), durable=False)

    async def prune(self) -> None:
        """Deletes what is too old, and the oldest of what is too much, some at a time."""
        if self._retention_s is not None:
            before = self._clock() - self._retention_s
            while await self._database.execute(_PRUNE, before, PRUNE_ROWS) == PRUNE_ROWS:
                pass
        if self._most is not None:
            ((count,),) = await self._database.fetch("SELECT COUNT(*) FROM audit_log")
            excess = count - self._most
            while excess > 0:
                await self._database.execute(_OLDEST, min(excess, PRUNE_ROWS))
                excess -= PRUNE_ROWS

    async def read(
        self,
        *,
        since: float = 0.0,
        until: float | None = None,
        tenant: str | None = None,
        key: str | None = None,
        outcome: str | None = None,
        name: str | None = None,
        request_id: str | None = None,
        limit: int = 100,
    ) -> list[AuditEntry]:
        """Newest first."""
        where = Where(
            ("timestamp >= ?", since),
            ("timestamp < ?", until),
            ("tenant = ?", tenant),
            ("key_id = ?", key),
            ("outcome = ?", outcome),
            ("name = ?", name),
            ("request_id = ?", request_id),
        )
        rows = await self._database.fetch(
            f"SELECT {', '.join(FIELDS)} FROM audit_log WHERE {where} ORDER BY timestamp DESC, id DESC "
            f"LIMIT {int(limit)}",
            *where.values,
        )
        return [AuditEntry(**dict(zip(FIELDS, row, strict=True))) for row in rows]


class AuditLog:
    """One per gateway process: a queue, and a task that writes and prunes."""

    def __init__(self, store: AuditStore, metrics: MetricRegistry, *, capacity: int = CAPACITY) -> None:
        self.store = store
        self._capacity = capacity
        self._queue: deque[AuditEntry] = deque()
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._written = metrics.counter("penstock_audit_entries_total", "Decisions written to the audit log.").child()
        self._lost = metrics.counter("penstock_audit_lost_total", "Decisions that did not fit its queue.").child()
        self._away = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._work(), name="audit log")

    def put(self, entry: AuditEntry) -> None:
        """Queues an entry. Never waits, never fails."""
        if len(self._queue) >= self._capacity:
            self._lost.inc()
            return
        self._queue.append(entry)
        self._arrived.set()

    async def close(self, within: float = 5.0) -> None:
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        with suppress(TimeoutError, DatabaseError):
            async with asyncio.timeout(within):
                while self._queue:
                    await self._write()

    async def _work(self) -> None:
        pruned_at = float("-inf")
        while True:
            if not self._queue:
                self._arrived.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(PRUNE_EVERY_S):
                        await self._arrived.wait()
            await asyncio.sleep(FLUSH_S)
            try:
                while self._queue:
                    await self._write()
                if time.monotonic() - pruned_at >= PRUNE_EVERY_S:
                    pruned_at = time.monotonic()
                    await self.store.prune()
                if self._away:
                    log.info("the audit log can be written again")
                self._away = False
            except DatabaseError as error:
                if not self._away:
                    log.error("the audit log cannot be written; entries wait", extra={"why": str(error)})
                self._away = True
                await asyncio.sleep(RETRY_S)

    async def _write(self) -> None:
        """Writes the oldest entries; they stay in the queue until that has succeeded."""
        batch = [self._queue[index] for index in range(min(len(self._queue), BATCH))]
        await self.store.write(batch)
        for _ in batch:
            self._queue.popleft()
        self._written.inc(len(batch))
