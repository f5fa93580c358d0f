"""The ledger: a charge is opened at admission and settled once, when the request ends. Rows are never changed.

Opening and settling are two inserts under the same charge id, so both are idempotent: the first settlement wins, and a
retry after a lost reply cannot bill twice. A third table lists open charges with their last recorded token count; it
stays small however long the ledger is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import msgspec

from penstock.errors import PenstockError
from penstock.metering.log_entries import ChargeEntry
from penstock.metering.prices import Price, Usage
from penstock.storage import Database, Row, Statement, Where
from penstock.storage.database import merged

_DIMENSIONS = ", ".join(
    f"{name} TEXT NOT NULL" for name in ("tenant", "user_id", "key_id", "feature", "model", "adapter", "tier")
)
_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS charges_opened (id TEXT PRIMARY KEY, request_id TEXT NOT NULL, "
        f"gateway TEXT NOT NULL, opened_at DOUBLE PRECISION NOT NULL, {_DIMENSIONS}, prompt_tokens BIGINT NOT NULL, "
        "percent INTEGER NOT NULL, price_input BIGINT NOT NULL, price_cached BIGINT NOT NULL, "
        "price_output BIGINT NOT NULL)",
        "CREATE TABLE IF NOT EXISTS charges_progress (id TEXT PRIMARY KEY, cached_tokens BIGINT NOT NULL, "
        "completion_tokens BIGINT NOT NULL)",
        "CREATE TABLE IF NOT EXISTS charges_settled (id TEXT PRIMARY KEY, settled_at DOUBLE PRECISION NOT NULL, "
        f"{_DIMENSIONS}, prompt_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL, "
        "completion_tokens BIGINT NOT NULL, cost_nanos BIGINT NOT NULL, finish_reason TEXT NOT NULL, "
        "settled_by TEXT NOT NULL)",
        "CREATE TABLE IF NOT EXISTS ledger_gateways (id TEXT PRIMARY KEY, seen_at DOUBLE PRECISION NOT NULL)",
        "CREATE INDEX IF NOT EXISTS charges_settled_at ON charges_settled (settled_at)",
        "CREATE INDEX IF NOT EXISTS charges_settled_tenant ON charges_settled (tenant, settled_at)",
    ),
    (
        "INSERT INTO charges_progress (id, cached_tokens, completion_tokens) SELECT o.id, 0, 0 FROM charges_opened o "
        "LEFT JOIN charges_settled s ON s.id = o.id WHERE s.id IS NULL ON CONFLICT (id) DO NOTHING",
        "DELETE FROM charges_progress WHERE id IN (SELECT id FROM charges_settled)",
    ),
    ("ALTER TABLE charges_opened ADD COLUMN selection TEXT NOT NULL DEFAULT ''",),
    ("ALTER TABLE charges_opened ADD COLUMN experiment TEXT NOT NULL DEFAULT ''",),
    # With a default, so that gateways of the version before may go on writing during an upgrade.
    (
        "ALTER TABLE charges_progress ADD COLUMN reasoning_tokens BIGINT NOT NULL DEFAULT 0",
        "ALTER TABLE charges_settled ADD COLUMN reasoning_tokens BIGINT NOT NULL DEFAULT 0",
    ),
)

_FORGOTTEN_S = 86_400.0

Dimension = Literal["tenant", "user", "feature", "model", "adapter", "tier", "key", "day", "hour"]
_COLUMNS: dict[Dimension, str] = {
    "tenant": "tenant",
    "user": "user_id",
    "feature": "feature",
    "model": "model",
    "adapter": "adapter",
    "tier": "tier",
    "key": "key_id",
    "day": "CAST(FLOOR(settled_at / 86400) * 86400 AS BIGINT)",
    "hour": "CAST(FLOOR(settled_at / 3600) * 3600 AS BIGINT)",
}
DIMENSIONS = tuple(_COLUMNS)


class LedgerError(PenstockError):
    """An invalid query to the ledger."""


class Charge(msgspec.Struct, frozen=True):
    """An admitted request."""

    id: str
    request_id: str
    gateway: str
    opened_at: float
    tenant: str
    user: str
    key: str
    feature: str
    model: str
    adapter: str
    tier: str
    prompt_tokens: int
    percent: int
    price_input: int
    price_cached: int
    price_output: int
    selection: str = ""
    """What led it to its model, and in which arm of a route: `auto/control`, `auto/routed`, `direct/`."""
    experiment: str = ""
    """The experiment and the arm that it was in: `NAME; arm=ARM`."""


class Settlement(msgspec.Struct, frozen=True):
    """The end of a charge."""

    charge: Charge
    settled_at: float
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int
    finish_reason: str
    settled_by: Literal["end", "recovery"] = "end"
    reasoning_tokens: int = 0
    """Completion tokens that were thoughts, as far as that is known; they cost what completion tokens cost."""


@dataclass(frozen=True, slots=True)
class OpenCharge:
    """A charge that is not settled, with its last recorded token counts."""

    charge: Charge
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Settled:
    """What is shown of one settled charge."""

    tenant: str
    key: str
    feature: str
    tier: str
    cost_nanos: int


@dataclass(frozen=True, slots=True)
class Total:
    """The sum of settled charges for one combination of dimensions."""

    group: tuple[str | int, ...]
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    """Part of the completion tokens."""
    cost_nanos: int

    def plus(self, other: Total) -> Total:
        """The sum of both, in this group."""
        return Total(
            self.group,
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.cost_nanos + other.cost_nanos,
        )


_OPENED = (
    "INSERT INTO charges_opened (id, request_id, gateway, opened_at, tenant, user_id, key_id, feature, model, adapter, "
    "tier, prompt_tokens, percent, price_input, price_cached, price_output, "
    "selection, experiment) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING"
)
_SETTLED = (
    "INSERT INTO charges_settled (id, settled_at, tenant, user_id, key_id, feature, model, adapter, tier, "
    "prompt_tokens, cached_tokens, completion_tokens, cost_nanos, finish_reason, settled_by, reasoning_tokens) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING"
)
_TRACKED = (
    "INSERT INTO charges_progress (id, cached_tokens, completion_tokens) SELECT ?, 0, 0 "
    "WHERE NOT EXISTS (SELECT 1 FROM charges_settled WHERE id = ?) ON CONFLICT (id) DO NOTHING"
)
_UNTRACKED = "DELETE FROM charges_progress WHERE id = ?"
_PROGRESS = (
    "UPDATE charges_progress SET cached_tokens = v.column2, completion_tokens = v.column3, "
    "reasoning_tokens = v.column4 FROM (VALUES {rows}) AS v WHERE charges_progress.id = v.column1 "
    "AND charges_progress.completion_tokens < v.column3"
)
_NOTE = "(CAST(? AS TEXT), CAST(? AS BIGINT), CAST(? AS BIGINT), CAST(? AS BIGINT))"
MOST_NOTES = 5_000
"""Maximum of charges in one statement."""


_INTO_SETTLED = "INSERT INTO charges_settled "
MOST_ASKED = 500
"""Charges in one question."""

_values = attrgetter(*Charge.__struct_fields__)


def cost_of(charge: Charge, cached_tokens: int, completion_tokens: int) -> int:
    """The cost in nanodollars, at the prices when the charge was opened."""
    price = Price(charge.price_input, charge.price_cached, charge.price_output)
    return price.cost(Usage(charge.prompt_tokens, cached_tokens, completion_tokens), percent=charge.percent)


def opened(charge: Charge) -> list[Statement]:
    return [(_OPENED, _values(charge)), (_TRACKED, (charge.id, charge.id))]


def settled(settlement: Settlement) -> list[Statement]:
    charge = settlement.charge
    values = (
        charge.id, settlement.settled_at, charge.tenant, charge.user, charge.key, charge.feature, charge.model,
        charge.adapter, charge.tier, charge.prompt_tokens, settlement.cached_tokens, settlement.completion_tokens,
        settlement.cost_nanos, settlement.finish_reason, settlement.settled_by, settlement.reasoning_tokens,
    )  # fmt: skip
    return [(_SETTLED, values), (_UNTRACKED, (charge.id,))]


def entered(entries: Sequence[Charge | Settlement], *, again: bool = False) -> list[Statement]:
    """Statements for starts and ends of charges written together. A charge with both was never visible as open,
    so it is not listed as open, unless a part may have been written before (`again`)."""
    begun = {entry.id for entry in entries if isinstance(entry, Charge)}
    ended = {entry.charge.id for entry in entries if isinstance(entry, Settlement)}
    both = frozenset[str]() if again else begun & ended
    statements: list[Statement] = []
    for entry in entries:
        if isinstance(entry, Charge):
            statements += opened(entry)[: 1 if entry.id in both else 2]
        else:
            statements += settled(entry)[: 1 if entry.charge.id in both else 2]
    return merged(statements)


def progressed(notes: Mapping[str, tuple[int, int, int]]) -> list[Statement]:
    """Statements for the progress of charges (cached, completion and reasoning tokens): few, however many streams
    there are."""
    rows = [(id, *tokens) for id, tokens in notes.items()]
    return [
        (_PROGRESS.format(rows=", ".join([_NOTE] * len(part))), [value for row in part for value in row])
        for part in (rows[begin : begin + MOST_NOTES] for begin in range(0, len(rows), MOST_NOTES))
    ]


class Ledger:
    """The ledger's tables. `Journal` collects the statements into transactions."""

    def __init__(self, database: Database, *, durable: bool = True) -> None:
        """`durable`: every charge waits for the disk; otherwise charges reach it with the next heartbeat."""
        self._database = database
        self._durable = durable

    async def prepare(self) -> None:
        await self._database.migrate("ledger", _VERSIONS)

    @property
    def problem(self) -> str | None:
        """Why nothing can be written any more; see `Database.problem`."""
        return self._database.problem

    @property
    def interruptions(self) -> int | None:
        """See `Database.interruptions`; None also when every charge waits for the disk."""
        return None if self._durable else self._database.interruptions

    async def write(self, statements: Sequence[Statement]) -> list[int]:
        """Runs the statements in one transaction; returns how many rows each added."""
        return await self._database.transact(statements, durable=self._durable)

    async def beat(self, gateway: str, now: float) -> None:
        """Records a gateway's heartbeat, which keeps its open charges; deletes gateways that died long ago."""
        alive = (
            "INSERT INTO ledger_gateways (id, seen_at) VALUES (?, ?) "
            "ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at"
        )
        old = "DELETE FROM ledger_gateways WHERE seen_at < ?"
        await self._database.transact([(alive, (gateway, now)), (old, (now - _FORGOTTEN_S,))], durable=False)
        await self._database.flush()  # in parallel, so that charges need not wait for the disk behind this one

    async def leave(self, gateway: str) -> None:
        """Removes a gateway that ends; any other may settle what it left open."""
        await self._database.execute("DELETE FROM ledger_gateways WHERE id = ?", gateway)

    async def open_charges(self, *, abandoned_since: float | None = None) -> list[OpenCharge]:
        """Open charges; with `abandoned_since`, only those of gateways without a heartbeat after it."""
        columns = ", ".join(f"o.{name}" for name in _opened_columns())
        dead, values = "", list[float]()
        if abandoned_since is not None:
            dead = "WHERE o.opened_at < ? AND o.gateway NOT IN (SELECT id FROM ledger_gateways WHERE seen_at > ?)"
            values = [abandoned_since, abandoned_since]
        rows = await self._database.fetch(
            f"SELECT {columns}, p.cached_tokens, p.completion_tokens, p.reasoning_tokens FROM charges_progress p "
            f"JOIN charges_opened o ON o.id = p.id {dead} ORDER BY o.opened_at",
            *values,
        )
        return [OpenCharge(Charge(*row[:-3]), *row[-3:]) for row in rows]

    async def totals(
        self,
        by: Sequence[Dimension] = (),
        *,
        since: float | None = None,
        until: float | None = None,
        tenant: str | None = None,
        user: str | None = None,
    ) -> list[Total]:
        """Sums of settled charges, largest cost first."""
        unknown = [name for name in by if name not in _COLUMNS]
        if unknown:
            raise LedgerError(f"usage can be grouped by {', '.join(DIMENSIONS)}, not by {', '.join(unknown)}")
        where = Where(
            ("settled_at >= ?", since), ("settled_at < ?", until), ("tenant = ?", tenant), ("user_id = ?", user)
        )
        columns = [_COLUMNS[name] for name in by]
        grouping = f"GROUP BY {', '.join(columns)} " if columns else ""
        rows = await self._database.fetch(
            f"SELECT {''.join(f'{column}, ' for column in columns)}COUNT(*), {_sum('prompt_tokens')}, "
            f"{_sum('cached_tokens')}, {_sum('completion_tokens')}, {_sum('reasoning_tokens')}, "
            f"{_sum('cost_nanos')} AS cost FROM charges_settled WHERE {where} {grouping}ORDER BY cost DESC",
            *where.values,
        )
        return [_total(row, len(columns)) for row in rows]

    async def standing(
        self, settlements: Sequence[Settlement], statements: Sequence[Statement], counts: Sequence[int]
    ) -> list[Settlement]:
        """Those that the ledger has after the statements: of two settlements of one charge the first stands."""
        added = sum(count for (sql, _), count in zip(statements, counts, strict=True) if sql.startswith(_INTO_SETTLED))
        if added == len(settlements):
            return list(settlements)
        found: dict[str, float] = {}
        for begin in range(0, len(settlements), MOST_ASKED):
            ids = [one.charge.id for one in settlements[begin : begin + MOST_ASKED]]
            marks = ", ".join("?" * len(ids))
            rows = await self._database.fetch(f"SELECT id, settled_at FROM charges_settled WHERE id IN ({marks})", *ids)
            found |= {row[0]: row[1] for row in rows}
        return [one for one in settlements if found.get(one.charge.id) == one.settled_at]

    async def settled_since(self, since: float, until: float) -> AsyncIterator[list[ChargeEntry]]:
        """Charges settled in a period, oldest first, some at a time."""
        columns = ", ".join(
            {"charge_id": "s.id", "request_id": "o.request_id", "timestamp": "s.settled_at"}.get(name, f"s.{name}")
            for name in ChargeEntry.__struct_fields__
        )
        last = (since, "")
        while True:
            rows = await self._database.fetch(
                f"SELECT {columns} FROM charges_settled s JOIN charges_opened o ON o.id = s.id "
                "WHERE (s.settled_at > ? OR (s.settled_at = ? AND s.id > ?)) AND s.settled_at < ? "
                f"ORDER BY s.settled_at, s.id LIMIT {MOST_ASKED}",
                last[0], last[0], last[1], until,
            )  # fmt: skip
            if not rows:
                return
            entries = [ChargeEntry(*row) for row in rows]
            last = (entries[-1].timestamp, entries[-1].charge_id)
            yield entries

    async def settled(self, id: str, tenant: str | None = None) -> Settled | None:
        """A settled charge; None: there is none, or it belongs to another tenant."""
        rows = await self._database.fetch(
            "SELECT tenant, key_id, feature, tier, cost_nanos FROM charges_settled WHERE id = ?", id
        )
        if not rows or tenant not in (None, rows[0][0]):
            return None
        return Settled(*rows[0])


def _sum(column: str) -> str:
    return f"CAST(COALESCE(SUM({column}), 0) AS BIGINT)"


def _total(row: Row, width: int) -> Total:
    return Total(tuple(row[:width]), *row[width:])


def _opened_columns() -> list[str]:
    names = {"user": "user_id", "key": "key_id"}
    return [names.get(name, name) for name in Charge.__struct_fields__]
