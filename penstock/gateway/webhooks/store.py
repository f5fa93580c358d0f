"""Endpoints that want to be told of events, and the outbox: deliveries that are still to be made.

Invariant: an event is recorded for every endpoint that wants it in the transaction that makes it happen, and stays
until it was delivered or given up; so it is delivered at least once, whichever process dies when. Only where too many
wait for an endpoint already is it counted instead. A delivery is made under a lease, so that usually only one gateway
makes it. Of those that were given up the newest are kept, so that an operator can have them sent again. An endpoint
that an operator has disabled is told of nothing. An endpoint belongs to a tenant, and to a user if a user's key made
it: then it is told only of what is that user's.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from penstock.gateway.webhooks.signature import hint
from penstock.storage import Database, Statement, Where

EventType = Literal[
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
    "response.completed",
    "response.failed",
    "response.cancelled",
    "response.incomplete",
]
EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)
OLD_SECRET_S = 86400.0
"""How long a secret may be used beside its successor."""
_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS webhook_endpoints (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, "
        "user_id TEXT NOT NULL, name TEXT NOT NULL, url TEXT NOT NULL, event_types TEXT NOT NULL, "
        "secret TEXT NOT NULL, old_secret TEXT NOT NULL, old_secret_until DOUBLE PRECISION NOT NULL, "
        "created_at DOUBLE PRECISION NOT NULL, updated_at DOUBLE PRECISION NOT NULL)",
        "CREATE INDEX IF NOT EXISTS webhook_endpoints_by_tenant ON webhook_endpoints (tenant, created_at)",
        "CREATE TABLE IF NOT EXISTS webhook_deliveries (event TEXT NOT NULL, endpoint TEXT NOT NULL, "
        "tenant TEXT NOT NULL, type TEXT NOT NULL, subject TEXT NOT NULL, created_at DOUBLE PRECISION NOT NULL, "
        "due_at DOUBLE PRECISION NOT NULL, attempts INTEGER NOT NULL, PRIMARY KEY (event, endpoint))",
        "CREATE INDEX IF NOT EXISTS webhook_deliveries_due ON webhook_deliveries (due_at)",
        "CREATE INDEX IF NOT EXISTS webhook_deliveries_by_tenant ON webhook_deliveries (tenant)",
    ),
    (
        "ALTER TABLE webhook_endpoints ADD COLUMN dropped BIGINT NOT NULL DEFAULT 0",
        "CREATE INDEX IF NOT EXISTS webhook_endpoints_dropped ON webhook_endpoints (dropped) WHERE dropped > 0",
        "CREATE INDEX IF NOT EXISTS webhook_deliveries_by_endpoint ON webhook_deliveries (endpoint)",
        "DROP INDEX IF EXISTS webhook_deliveries_by_tenant",
    ),
    (
        "ALTER TABLE webhook_endpoints ADD COLUMN disabled_at DOUBLE PRECISION NOT NULL DEFAULT 0",
        "ALTER TABLE webhook_endpoints ADD COLUMN tried_at DOUBLE PRECISION NOT NULL DEFAULT 0",
        "ALTER TABLE webhook_endpoints ADD COLUMN delivered_at DOUBLE PRECISION NOT NULL DEFAULT 0",
        "ALTER TABLE webhook_endpoints ADD COLUMN problem TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE webhook_endpoints ADD COLUMN failures BIGINT NOT NULL DEFAULT 0",
        "ALTER TABLE webhook_deliveries ADD COLUMN given_up_at DOUBLE PRECISION NOT NULL DEFAULT 0",
        "CREATE INDEX IF NOT EXISTS webhook_endpoints_by_age ON webhook_endpoints (created_at, id)",
    ),
    (
        # Those that were given up stay due; looking for what is, once a second, must not read all of them.
        "CREATE INDEX IF NOT EXISTS webhook_deliveries_waiting ON webhook_deliveries (due_at) WHERE given_up_at = 0",
        "DROP INDEX IF EXISTS webhook_deliveries_due",
    ),
)
KEPT = 100
"""Deliveries to an endpoint that were given up and are kept."""
_COLUMNS = (
    "id, tenant, user_id, name, url, event_types, secret, old_secret, old_secret_until, created_at, updated_at, "
    "disabled_at, tried_at, delivered_at, problem, failures"
)
_WAITING = "event, endpoint, tenant, type, subject, created_at, due_at, attempts"
_KINDS = (*("TEXT",) * 8, *("DOUBLE PRECISION",) * 6, "TEXT", "BIGINT")
Subject = Literal["responses", "batches"]
"""The table of what an event is about."""


class WebhookEndpoint(msgspec.Struct, frozen=True):
    """Where a tenant wants to be told of events."""

    id: str
    tenant: str
    user_id: str
    name: str
    url: str
    event_types: str
    """Each between two bars."""
    secret: str
    old_secret: str
    old_secret_until: float
    created_at: float
    updated_at: float
    disabled_at: float = 0.0
    """When an operator disabled it; 0: it is enabled."""
    tried_at: float = 0.0
    delivered_at: float = 0.0
    problem: str = ""
    """Why the last attempt failed; empty: it did not."""
    failures: int = 0
    """Failed attempts since the last delivery."""

    @property
    def state(self) -> Literal["disabled", "failing", "delivering", "unused"]:
        if self.disabled_at:
            return "disabled"
        if self.failures:
            return "failing"
        return "delivering" if self.delivered_at else "unused"

    def shown(self) -> dict[str, Any]:
        """Without its secret."""
        return {
            "id": self.id,
            "object": "webhook_endpoint",
            "created_at": int(self.created_at),
            "updated_at": int(self.updated_at),
            "name": self.name,
            "url": self.url,
            "event_types": self.event_types.strip("|").split("|"),
            "signing_secret_hint": hint(self.secret),
            "disabled": bool(self.disabled_at),
        }

    def secrets(self, now: float) -> list[str]:
        """Those that sign a delivery."""
        return [self.secret, self.old_secret] if self.old_secret and now < self.old_secret_until else [self.secret]


class Delivery(msgspec.Struct, frozen=True):
    """An event that an endpoint is to be told of."""

    event: str
    endpoint: str
    tenant: str
    type: str
    subject: str
    created_at: float
    due_at: float
    attempts: int
    given_up_at: float = 0.0

    def shown(self) -> dict[str, Any]:
        """For operators."""
        given_up = self.given_up_at > 0
        return {
            "event": self.event,
            "type": self.type,
            "data": {"id": self.subject},
            "created_at": int(self.created_at),
            "status": "given_up" if given_up else "waiting",
            "attempts": self.attempts,
            "due_at": None if given_up else int(self.due_at),
            "given_up_at": int(self.given_up_at) if given_up else None,
        }

    def body(self) -> bytes:
        told = {"id": self.event, "object": "event", "created_at": int(self.created_at), "type": self.type}
        return msgspec.json.encode({**told, "data": {"id": self.subject}})


class Outstanding(NamedTuple):
    """What an endpoint was not told of yet."""

    waiting: int = 0
    given_up: int = 0


class Dropped(NamedTuple):
    """Events that an endpoint is not told of, because too many deliveries to it were waiting."""

    endpoint: str
    tenant: str
    events: int


def types_column(types: Sequence[str]) -> str:
    """Event types as they are stored."""
    return f"|{'|'.join(dict.fromkeys(types))}|"


class WebhookStore:
    """See above."""

    def __init__(self, database: Database, *, most_waiting: int, clock: Callable[[], float] = time.time) -> None:
        """`most_waiting`: deliveries of one endpoint; events beyond are not recorded, but counted (`dropped`)."""
        self._database = database
        self._most_waiting = most_waiting
        self.clock = clock

    async def prepare(self) -> None:
        await self._database.migrate("webhooks", _VERSIONS)

    def event(self, about: Subject, type: str, id: str) -> list[Statement]:
        """Records an event about a response or a batch; to be run in the transaction that makes it happen."""
        if type not in EVENT_TYPES:
            return []
        now, event, wanted = self.clock(), f"evt_{uuid.uuid4().hex}", f"%|{type}|%"
        return [
            (
                f"INSERT INTO webhook_deliveries ({_WAITING}) SELECT CAST(? AS TEXT), e.id, e.tenant, CAST(? AS TEXT), "
                "s.id, CAST(? AS DOUBLE PRECISION), CAST(? AS DOUBLE PRECISION), 0 "
                f"FROM webhook_endpoints e JOIN {about} s ON s.tenant = e.tenant "
                "WHERE s.id = ? AND e.event_types LIKE ? AND (e.user_id = '' OR e.user_id = s.user_id) "
                "AND e.disabled_at = 0 "
                "AND (SELECT COUNT(*) FROM webhook_deliveries w WHERE w.endpoint = e.id AND w.given_up_at = 0) < ?",
                (event, type, now, now, id, wanted, self._most_waiting),
            ),
            (
                "UPDATE webhook_endpoints AS e SET dropped = dropped + 1 "
                f"WHERE e.tenant = (SELECT s.tenant FROM {about} s WHERE s.id = ?) AND e.event_types LIKE ? "
                "AND e.disabled_at = 0 "
                f"AND (e.user_id = '' OR e.user_id = (SELECT s.user_id FROM {about} s WHERE s.id = ?)) "
                "AND NOT EXISTS (SELECT 1 FROM webhook_deliveries w WHERE w.event = ? AND w.endpoint = e.id)",
                (id, wanted, id, event),
            ),
        ]

    # --- endpoints

    async def add(self, endpoint: WebhookEndpoint, most: int) -> bool:
        """Whether the tenant has less than `most` endpoints, so that this one was added."""
        values = msgspec.structs.astuple(endpoint)
        marks = ", ".join(f"CAST(? AS {kind})" for kind in _KINDS)
        added = await self._database.execute(
            f"INSERT INTO webhook_endpoints ({_COLUMNS}) SELECT {marks} "
            "WHERE (SELECT COUNT(*) FROM webhook_endpoints WHERE tenant = ?) < ?",
            *values, endpoint.tenant, most,
        )  # fmt: skip
        return bool(added)

    async def get(self, id: str, tenant: str | None, user: str | None = None) -> WebhookEndpoint | None:
        """`tenant`: None for any. `user`: only if the endpoint is this user's."""
        found = await self.page(tenant, user, id=id, limit=1)
        return found[0] if found else None

    async def page(
        self,
        tenant: str | None,
        user: str | None = None,
        *,
        id: str | None = None,
        after: WebhookEndpoint | None = None,
        state: Literal["disabled", "failing"] | None = None,
        limit: int,
    ) -> list[WebhookEndpoint]:
        """Newest first; `tenant`: None for those of all tenants."""
        where = Where(("tenant = ?", tenant), ("user_id = ?", user), ("id = ?", id))
        if state is not None:
            where.add("disabled_at > 0" if state == "disabled" else "disabled_at = 0 AND failures > 0")
        if after is not None:
            where.beyond(after.created_at, after.id, "DESC")
        rows = await self._database.fetch(
            f"SELECT {_COLUMNS} FROM webhook_endpoints WHERE {where} ORDER BY created_at DESC, id DESC "
            f"LIMIT {int(limit)}",
            *where.values,
        )
        return [WebhookEndpoint(*row) for row in rows]

    async def change(self, id: str, changes: Mapping[str, Any]) -> bool:
        """Whether there still is such an endpoint. Only columns in `changes` are written: somebody else may be changing
        others."""
        columns = ", ".join(f"{name} = ?" for name in changes)
        return bool(
            await self._database.execute(f"UPDATE webhook_endpoints SET {columns} WHERE id = ?", *changes.values(), id)
        )

    async def delete(self, id: str) -> None:
        """With what it was still to be told."""
        await self._database.transact(
            [
                ("DELETE FROM webhook_endpoints WHERE id = ?", (id,)),
                ("DELETE FROM webhook_deliveries WHERE endpoint = ?", (id,)),
            ]
        )

    # --- deliveries

    async def outstanding(self, endpoints: Sequence[str]) -> dict[str, Outstanding]:
        """By endpoint; those that are not there have nothing."""
        if not endpoints:
            return {}
        rows = await self._database.fetch(
            "SELECT endpoint, SUM(CASE WHEN given_up_at = 0 THEN 1 ELSE 0 END), "
            "SUM(CASE WHEN given_up_at > 0 THEN 1 ELSE 0 END) FROM webhook_deliveries "
            f"WHERE endpoint IN ({', '.join('?' * len(endpoints))}) GROUP BY endpoint",
            *endpoints,
        )
        return {endpoint: Outstanding(int(waiting), int(given_up)) for endpoint, waiting, given_up in rows}

    async def deliveries(self, endpoint: str, limit: int) -> list[Delivery]:
        """What an endpoint was not told of yet, the newest events first."""
        rows = await self._database.fetch(
            f"SELECT {_WAITING}, given_up_at FROM webhook_deliveries WHERE endpoint = ? "
            f"ORDER BY created_at DESC, event LIMIT {int(limit)}",
            endpoint,
        )
        return [Delivery(*row) for row in rows]

    async def send_again(self, endpoint: str, event: str | None = None) -> int:
        """Have what an endpoint was not told of sent now, also what was given up; `event`: only this. Returns how many
        that are. What is being sent at this moment may be sent twice."""
        return await self._database.execute(
            "UPDATE webhook_deliveries SET due_at = ?, given_up_at = 0 WHERE endpoint = ?"
            + ("" if event is None else " AND event = ?"),
            self.clock(), endpoint, *(() if event is None else (event,)),
        )  # fmt: skip

    async def give_up(self, delivery: Delivery) -> None:
        """It is not tried again by itself, but kept, unless newer ones take its place."""
        await self._database.transact(
            [
                (
                    "UPDATE webhook_deliveries SET given_up_at = ?, attempts = attempts + 1 "
                    "WHERE event = ? AND endpoint = ? AND due_at = ?",
                    (self.clock(), delivery.event, delivery.endpoint, delivery.due_at),
                ),
                (
                    "DELETE FROM webhook_deliveries WHERE endpoint = ? AND given_up_at > 0 AND event NOT IN "
                    "(SELECT event FROM webhook_deliveries WHERE endpoint = ? AND given_up_at > 0 "
                    f"ORDER BY given_up_at DESC, event LIMIT {KEPT})",
                    (delivery.endpoint, delivery.endpoint),
                ),
            ]
        )

    async def tried(self, endpoint: str, problem: str) -> None:
        """Note the outcome of an attempt, for operators; `problem`: empty if it arrived."""
        now = self.clock()
        change = "failures = failures + 1" if problem else "failures = 0, delivered_at = ?"
        await self._database.execute(
            f"UPDATE webhook_endpoints SET tried_at = ?, problem = ?, {change} WHERE id = ?",
            now, problem.replace("\0", "")[:256], *(() if problem else (now,)), endpoint,
        )  # fmt: skip

    async def claim(
        self, lease_s: float, *, not_of: Collection[str] = (), not_to: Collection[str] = ()
    ) -> tuple[Delivery, WebhookEndpoint | None] | None:
        """Lease the delivery that is due first, with its endpoint, except those of tenants in `not_of` and those to
        endpoints in `not_to`. Until the lease is over it is not due."""
        others = "".join(
            f"AND {column} NOT IN ({', '.join('?' * len(names))}) "
            for column, names in (("tenant", not_of), ("endpoint", not_to))
            if names
        )
        others += (
            "AND given_up_at = 0 "
            "AND NOT EXISTS (SELECT 1 FROM webhook_endpoints e WHERE e.id = endpoint AND e.disabled_at > 0) "
        )
        while rows := await self._database.fetch(
            f"SELECT {_WAITING} FROM webhook_deliveries WHERE due_at <= ? {others}ORDER BY due_at LIMIT 1",
            now := self.clock(),
            *not_of,
            *not_to,
        ):
            found = Delivery(*rows[0])
            until = now + lease_s
            if await self._database.execute(
                "UPDATE webhook_deliveries SET due_at = ? WHERE event = ? AND endpoint = ? AND due_at = ?",
                until, found.event, found.endpoint, found.due_at,
            ):  # fmt: skip
                return msgspec.structs.replace(found, due_at=until), await self.get(found.endpoint, found.tenant)
        return None

    async def dropped(self) -> list[Dropped]:
        """Events that were not recorded since somebody asked last, by endpoint; one gateway hears of each."""
        rows = await self._database.fetch(
            "SELECT id, tenant, dropped FROM webhook_endpoints WHERE dropped > 0 LIMIT 100"
        )
        return [
            one
            for one in (Dropped(*row) for row in rows)
            if await self._database.execute(
                "UPDATE webhook_endpoints SET dropped = dropped - ? WHERE id = ? AND dropped >= ?",
                one.events,
                one.endpoint,
                one.events,
            )
        ]

    async def made(self, delivery: Delivery) -> None:
        """It has arrived, or its endpoint is gone."""
        await self._database.execute(
            "DELETE FROM webhook_deliveries WHERE event = ? AND endpoint = ?", delivery.event, delivery.endpoint
        )

    async def again(self, delivery: Delivery, after_s: float, *, counted: bool = True) -> None:
        """It is to be tried again. `counted`: whether this was an attempt."""
        await self._database.execute(
            "UPDATE webhook_deliveries SET due_at = ?, attempts = attempts + ? WHERE event = ? AND endpoint = ? "
            "AND due_at = ?",
            self.clock() + after_s, int(counted), delivery.event, delivery.endpoint, delivery.due_at,
        )  # fmt: skip
