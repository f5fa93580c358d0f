"""Batches in the table store: their state, the lease of the gateway that runs them, and the answers so far.

A batch is run by the one gateway that holds its lease; when a lease expires, another gateway continues from the stored
answers. A line has one answer: the first that was written. A runner changes a batch only while it holds the lease.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from penstock.gateway.batches.lines import Problem
from penstock.gateway.batches.usage import FIELDS as USAGE
from penstock.gateway.batches.usage import NONE, Usage
from penstock.storage import Database, Row, Statement, Where

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ACTIVE: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
_TIMES = (
    "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
    "cancelled_at",
)  # fmt: skip
_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, user_id TEXT NOT NULL, "
        "key_id TEXT NOT NULL, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, "
        "metadata TEXT NOT NULL, status TEXT NOT NULL, created_at DOUBLE PRECISION NOT NULL, "
        + "".join(f"{name} DOUBLE PRECISION, " for name in _TIMES)
        + "total BIGINT NOT NULL DEFAULT 0, completed BIGINT NOT NULL DEFAULT 0, failed BIGINT NOT NULL DEFAULT 0, "
        "errors TEXT NOT NULL DEFAULT '', output_file_id TEXT, error_file_id TEXT, "
        "runner TEXT NOT NULL DEFAULT '', leased_until DOUBLE PRECISION NOT NULL DEFAULT 0)",
        "CREATE INDEX IF NOT EXISTS batches_by_tenant ON batches (tenant, created_at)",
        "CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status, leased_until)",
        "CREATE TABLE IF NOT EXISTS batch_answers (batch_id TEXT NOT NULL, line BIGINT NOT NULL, ok INTEGER NOT NULL, "
        "content TEXT NOT NULL, PRIMARY KEY (batch_id, line))",
    ),
    ("ALTER TABLE batches ADD COLUMN unanswered BIGINT NOT NULL DEFAULT 0",),
    ("ALTER TABLE batches ADD COLUMN require TEXT NOT NULL DEFAULT ''",),
    tuple(
        f"ALTER TABLE {table} ADD COLUMN {name} BIGINT NOT NULL DEFAULT 0"
        for table in ("batches", "batch_answers")
        for name in USAGE
    ),
)
_COLUMNS = (
    "id", "tenant", "user_id", "key_id", "endpoint", "input_file_id", "completion_window", "metadata", "status",
    "created_at", *_TIMES, "total", "completed", "failed", "errors", "output_file_id", "error_file_id",
    "unanswered", "require", *USAGE,
)  # fmt: skip
_LISTED = ", ".join(_COLUMNS)
_IN_ACTIVE = ", ".join(f"'{status}'" for status in ACTIVE)


class Batch(msgspec.Struct, frozen=True):
    """A batch as it is stored. The fields are the table's columns, in order."""

    id: str
    tenant: str
    user: str
    key: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: str
    status: Status
    created_at: float
    in_progress_at: float | None = None
    expires_at: float | None = None
    finalizing_at: float | None = None
    completed_at: float | None = None
    failed_at: float | None = None
    expired_at: float | None = None
    cancelling_at: float | None = None
    cancelled_at: float | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: str = ""
    output_file_id: str | None = None
    error_file_id: str | None = None
    unanswered: int = 0
    """Of those that failed: how many had no answer when the batch was cancelled or expired."""
    require: str = ""
    """The labels that the request which made it demands, for each of its lines."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def usage(self) -> Usage | None:
        """Of all answers; None where they were not counted, by an earlier version of this server."""
        used = Usage(self.input_tokens, self.cached_tokens, self.output_tokens, self.reasoning_tokens)
        return None if used == NONE and self.completed else used

    def shown(self) -> dict[str, Any]:
        """The batch as clients see it."""
        times = {name: getattr(self, name) for name in _TIMES}
        problems = msgspec.json.decode(self.errors) if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": None if problems is None else {"object": "list", "data": problems},
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": int(self.created_at),
            **{name: None if at is None else int(at) for name, at in times.items()},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": None if self.usage is None else self.usage.shown(),
            "metadata": msgspec.json.decode(self.metadata),
        }


Announce = Callable[[str, str], Sequence[Statement]]
"""What to run in the transaction that ends a batch; given the event and the id of the batch."""


class Answer(msgspec.Struct, frozen=True):
    """A line of a batch's output file, or of its error file when not `ok`."""

    line: int
    ok: bool
    content: str
    written_off: bool = False
    """Not answered: the batch was over before."""
    usage: Usage = NONE

    @property
    def outcome(self) -> int:
        """As stored: 1 answered, 0 failed, -1 written off."""
        return 1 if self.ok else -1 if self.written_off else 0


class BatchStore:
    """All batches."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self.clock = clock
        self.announce: Announce = lambda event, id: ()

    async def prepare(self) -> None:
        await self._database.migrate("batches", _VERSIONS)

    async def create(
        self,
        tenant: str,
        *,
        user: str,
        key: str,
        endpoint: str,
        input_file_id: str,
        window: str,
        window_s: float,
        metadata: dict[str, str],
        total: int = 0,
        kind: str = "batch",
        require: str = "",
    ) -> Batch:
        """`total`: the number of requests, where it is known already. `kind`: how its id begins. `require`: the labels
        that its lines demand."""
        now = self.clock()
        batch = Batch(
            f"{kind}_{uuid.uuid4().hex}", tenant, user, key, endpoint, input_file_id, window,
            msgspec.json.encode(metadata).decode(), "validating", now, expires_at=now + window_s, total=total,
            require=require,
        )  # fmt: skip
        values = [getattr(batch, field) for field in Batch.__struct_fields__]
        await self._database.execute(
            f"INSERT INTO batches ({_LISTED}) VALUES ({', '.join('?' * len(values))})", *values
        )
        return batch

    async def get(self, id: str, tenant: str, user: str | None = None) -> Batch | None:
        """`user`: only if the batch is this user's."""
        rows = await self._database.fetch(f"SELECT {_LISTED} FROM batches WHERE id = ? AND tenant = ?", id, tenant)
        if rows and user not in (None, rows[0][_COLUMNS.index("user_id")]):
            return None
        return await self._with_counts(Batch(*rows[0])) if rows else None

    async def page(
        self,
        tenant: str,
        user: str | None = None,
        *,
        after: Batch | None = None,
        before: Batch | None = None,
        endpoint: str | None = None,
        limit: int,
    ) -> list[Batch]:
        """Newest first: the first `limit` of those `after` a batch, or the last `limit` of those `before` one."""
        where = Where(("tenant = ?", tenant), ("endpoint = ?", endpoint), ("user_id = ?", user))
        order: Literal["ASC", "DESC"] = "DESC" if after is not None or before is None else "ASC"
        if (next_to := after or before) is not None:
            where.beyond(next_to.created_at, next_to.id, order)
        rows = await self._database.fetch(
            f"SELECT {_LISTED} FROM batches WHERE {where} ORDER BY created_at {order}, id {order} LIMIT {int(limit)}",
            *where.values,
        )
        if order == "ASC":
            rows.reverse()
        return [await self._with_counts(Batch(*row)) for row in rows]

    async def cancel(self, id: str, tenant: str) -> bool:
        """Whether it could still be cancelled; the gateway that runs it notices soon."""
        changed = await self._database.execute(
            "UPDATE batches SET status = 'cancelling', cancelling_at = ? WHERE id = ? AND tenant = ? "
            "AND status IN ('validating', 'in_progress')",
            self.clock(), id, tenant,
        )  # fmt: skip
        return bool(changed)

    async def delete(self, id: str, tenant: str) -> bool:
        """Forget a batch that is over; False when it is not."""
        deleted = await self._database.execute(
            f"DELETE FROM batches WHERE id = ? AND tenant = ? AND status NOT IN ({_IN_ACTIVE})", id, tenant
        )
        return bool(deleted)

    async def uses(self, file_id: str) -> bool:
        """Whether an active batch reads this file."""
        rows = await self._database.fetch(
            f"SELECT 1 FROM batches WHERE input_file_id = ? AND status IN ({_IN_ACTIVE}) LIMIT 1", file_id
        )
        return bool(rows)

    async def claim(
        self, runner: str, lease_s: float, *, besides: Sequence[str] = (), not_of: Sequence[str] = ()
    ) -> Batch | None:
        """Lease the oldest batch that is not leased, except those in `besides` and those of tenants in `not_of`."""
        now = self.clock()
        others = f"AND tenant NOT IN ({', '.join('?' * len(not_of))}) " if not_of else ""
        rows = await self._database.fetch(
            f"SELECT {_LISTED} FROM batches WHERE status IN ({_IN_ACTIVE}) AND leased_until <= ? {others}"
            "ORDER BY created_at LIMIT 32",
            now, *not_of,
        )  # fmt: skip
        for row in rows:
            batch = Batch(*row)
            if batch.id not in besides and await self._database.execute(
                f"UPDATE batches SET runner = ?, leased_until = ? WHERE id = ? AND leased_until <= ? "
                f"AND status IN ({_IN_ACTIVE})",
                runner, now + lease_s, batch.id, now,
            ):  # fmt: skip
                return batch
        return None

    async def renew(self, id: str, runner: str, lease_s: float) -> Status | None:
        """Renew the lease and return the batch's status; None when another gateway has the lease."""
        renewed = await self._database.execute(
            "UPDATE batches SET leased_until = ? WHERE id = ? AND runner = ?", self.clock() + lease_s, id, runner
        )
        if not renewed:
            return None
        rows = await self._database.fetch("SELECT status FROM batches WHERE id = ?", id)
        status: Status = rows[0][0]
        return status

    async def release(self, id: str, runner: str) -> None:
        """Give up the lease."""
        await self._database.execute(
            "UPDATE batches SET runner = '', leased_until = 0 WHERE id = ? AND runner = ?", id, runner
        )

    async def begun(self, id: str, runner: str, total: int) -> bool:
        """The input is valid. Returns False when the batch was cancelled meanwhile or the lease is lost."""
        changed = await self._database.execute(
            "UPDATE batches SET status = 'in_progress', in_progress_at = ?, total = ? "
            "WHERE id = ? AND runner = ? AND status = 'validating'",
            self.clock(), total, id, runner,
        )  # fmt: skip
        return bool(changed)

    async def failed(self, id: str, runner: str, problems: Sequence[Problem]) -> None:
        """It cannot be run at all."""
        ended = (
            "UPDATE batches SET status = 'failed', failed_at = ?, errors = ?, runner = '' WHERE id = ? AND runner = ?",
            (self.clock(), msgspec.json.encode(problems).decode(), id, runner),
        )
        await self._database.transact([ended, *self._announced("failed", id)], guarded=True)

    async def add(self, answers: Sequence[Answer], id: str) -> None:
        """The first answer of a line stays."""
        insert = (
            f"INSERT INTO batch_answers (batch_id, line, ok, content, {', '.join(USAGE)}) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (batch_id, line) DO NOTHING"
        )
        await self._database.transact(
            [(insert, (id, one.line, one.outcome, one.content, *msgspec.structs.astuple(one.usage))) for one in answers]
        )

    async def answered(self, id: str) -> set[int]:
        """The lines that have an answer."""
        rows = await self._database.fetch("SELECT line FROM batch_answers WHERE batch_id = ?", id)
        return {line for (line,) in rows}

    async def answers(self, id: str, *, ok: bool, after: int = -1, limit: int = 200) -> list[Answer]:
        """Answers in the order of their lines."""
        rows = await self._database.fetch(
            f"SELECT line, content FROM batch_answers WHERE batch_id = ? AND ok {'=' if ok else '<>'} 1 AND line > ? "
            f"ORDER BY line LIMIT {int(limit)}", id, after,
        )  # fmt: skip
        return [Answer(line, ok, content) for line, content in rows]

    async def finalizing(self, id: str, runner: str) -> bool:
        changed = await self._database.execute(
            "UPDATE batches SET status = 'finalizing', finalizing_at = ? "
            "WHERE id = ? AND runner = ? AND status = 'in_progress'",
            self.clock(), id, runner,
        )  # fmt: skip
        return bool(changed)

    async def finish(
        self,
        id: str,
        runner: str,
        status: Literal["completed", "expired", "cancelled"],
        *,
        output: str | None,
        errors: str | None,
        with_files: Sequence[Statement],
    ) -> bool:
        """The end: files appear, the counts are fixed, the answers are forgotten, all at once."""
        count = "(SELECT COUNT(*) FROM batch_answers WHERE batch_id = ? AND ok {})"
        used = ", ".join(
            f"{name} = (SELECT COALESCE(SUM({name}), 0) FROM batch_answers WHERE batch_id = ?)" for name in USAGE
        )
        ended = (
            f"UPDATE batches SET status = ?, {status}_at = ?, output_file_id = ?, error_file_id = ?, "
            f"completed = {count.format('= 1')}, failed = {count.format('<> 1')}, unanswered = {count.format('= -1')}, "
            f"{used}, runner = '' WHERE id = ? AND runner = ?",
            (status, self.clock(), output, errors, *[id] * (3 + len(USAGE)), id, runner),
        )
        forgotten = ("DELETE FROM batch_answers WHERE batch_id = ?", (id,))
        statements = [ended, *with_files, forgotten, *self._announced(status, id)]
        return (await self._database.transact(statements, guarded=True))[0] > 0

    def _announced(self, status: str, id: str) -> Sequence[Statement]:
        """Batches of messages are none of the API that has these events."""
        return self.announce(f"batch.{status}", id) if id.startswith("batch_") else ()

    async def _with_counts(self, batch: Batch) -> Batch:
        """Of one that runs, the counts so far."""
        if batch.status not in ACTIVE:
            return batch
        sums = ", ".join(f"SUM({name})" for name in USAGE)
        rows: list[Row] = await self._database.fetch(
            f"SELECT ok, COUNT(*), {sums} FROM batch_answers WHERE batch_id = ? GROUP BY ok", batch.id
        )
        counts = {int(row[0]): int(row[1]) for row in rows}
        return msgspec.structs.replace(
            batch,
            **{name: sum(int(row[at]) for row in rows) for at, name in enumerate(USAGE, start=2)},
            completed=counts.get(1, 0),
            failed=counts.get(0, 0) + counts.get(-1, 0),
            unanswered=counts.get(-1, 0),
        )
