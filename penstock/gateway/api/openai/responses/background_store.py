"""Responses that are generated in the background, in the table of stored responses.

Such a row has an owner, the gateway process that generates it, and a lease, which the owner renews. Without an owner a
response has ended. Invariant: it ends once. Whoever ends it (its owner, a client that cancels it, or a reader that
finds the lease expired) takes the owner away in the same statement, and everybody else's end changes nothing. The
events of a response that was asked for as a stream are kept in chunks, so that any process can send them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from penstock.gateway.api.openai.responses.replay import encode_event
from penstock.gateway.generation.schemas import ChatMessage
from penstock.storage import Database, Statement

LOST = "The gateway that generated this response stopped before its end. Send the request again."


class BackgroundStore:
    """See above. Callers have checked whose a response is."""

    def __init__(self, database: Database, *, keep_s: float, most: int, clock: Callable[[], float]) -> None:
        """`most`: stored responses of one tenant."""
        self._database = database
        self._keep_s = keep_s
        self._most = most
        self._clock = clock

    async def begin(
        self,
        id: str,
        owner: str,
        lease_s: float,
        *,
        tenant: str,
        user: str,
        response: bytes,
        items: Sequence[dict[str, Any]],
        events: bytes,
    ) -> None:
        """A response that waits for its turn. `events`: so far; empty where the client wants no stream."""
        now = self._clock()
        given, user = msgspec.json.encode(items).decode(), user.replace("\0", "")
        statements: list[Statement] = [
            (
                "INSERT INTO responses (id, tenant, created_at, expires_at, response, conversation, user_id, "
                "input_items, owner, leased_until) VALUES (?, ?, ?, ?, ?, '', ?, ?, ?, ?)",
                (id, tenant, now, now + self._keep_s, response.decode(), user, given, owner, now + lease_s),
            )
        ]
        if events:
            statements.append(self._chunk(id, owner, 0, events))
        await self._database.transact([*statements, *self.pruned(tenant)])

    def pruned(self, tenant: str) -> list[Statement]:
        """Deletes what is too old, or too much for a tenant; never what is still generated."""
        now = self._clock()
        old = "(SELECT created_at FROM responses WHERE tenant = ? ORDER BY created_at DESC LIMIT 1 OFFSET ?)"
        ended = "(owner = '' OR leased_until <= ?)"
        too_many = f"tenant = ? AND created_at <= {old} AND {ended}"
        values = (tenant, tenant, self._most, now)
        return [
            ("DELETE FROM responses WHERE expires_at <= ?", (now,)),
            ("DELETE FROM response_events WHERE expires_at <= ?", (now,)),
            (f"DELETE FROM response_events WHERE response IN (SELECT id FROM responses WHERE {too_many})", values),
            (f"DELETE FROM responses WHERE {too_many}", values),
        ]

    async def keep(
        self,
        owner: str,
        lease_s: float,
        ids: Collection[str],
        begun: Collection[tuple[str, bytes]],
        events: Collection[tuple[str, int, bytes]],
    ) -> set[str]:
        """Renews the owner's leases of `ids`. `begun`: responses that left the queue; `events`: their new events, with
        the number of the first, which are dropped where a response has been ended or deleted by others. Returns the
        ids of those that have not been."""
        marks = ", ".join("?" * len(ids))
        statements: list[Statement] = [
            (
                f"UPDATE responses SET leased_until = ? WHERE owner = ? AND id IN ({marks})",
                (self._clock() + lease_s, owner, *ids),
            )
        ]
        statements += (
            ("UPDATE responses SET response = ? WHERE id = ? AND owner = ?", (response.decode(), id, owner))
            for id, response in begun
        )
        statements += (self._chunk(id, owner, first, chunk) for id, first, chunk in events)
        await self._database.transact(statements)
        rows = await self._database.fetch("SELECT id FROM responses WHERE owner = ?", owner)
        return {str(row[0]) for row in rows}

    async def end(
        self,
        id: str,
        owner: str | None,
        response: bytes,
        conversation: Sequence[ChatMessage] | None = None,
        events: tuple[int, bytes] = (0, b""),
    ) -> bool:
        """Whether this was its end. `owner`: None for anybody's. `conversation`: to go on from, if it has an answer."""
        said = "" if conversation is None else msgspec.json.encode(conversation).decode()
        whose, values = ("owner != ''", []) if owner is None else ("owner = ?", [owner])
        statements: list[Statement] = [
            (
                f"UPDATE responses SET owner = '', response = ?, conversation = ? WHERE id = ? AND {whose}",
                (response.decode(), said, id, *values),
            )
        ]
        if events[1]:
            statements.append(self._chunk(id, "", *events))
        return (await self._database.transact(statements, guarded=True))[0] > 0

    async def abandon(self, id: str, owner: str, response: str) -> None:
        """End a response whose owner has let its lease expire."""
        failed = {
            **msgspec.json.decode(response),
            "status": "failed",
            "error": {"code": "server_error", "message": LOST},
        }
        statements: list[Statement] = [
            (
                "UPDATE responses SET owner = '', response = ? WHERE id = ? AND owner = ? AND leased_until <= ?",
                (msgspec.json.encode(failed).decode(), id, owner, self._clock()),
            )
        ]
        last = await self._database.fetch(
            "SELECT first, events FROM response_events WHERE response = ? ORDER BY first DESC LIMIT 1", id
        )
        if last:  # the stream of its events has an end too
            number = int(last[0][0]) + len(split_events(str(last[0][1]).encode()))
            statements.append(
                self._chunk(id, "", number, encode_event(("response.failed", {"response": failed}), number))
            )
        await self._database.transact(statements, guarded=True)

    async def running(self, id: str) -> bool:
        """Whether it waits or is generated; one whose owner is gone is ended."""
        rows = await self._database.fetch(
            "SELECT owner, leased_until, response FROM responses WHERE id = ? AND owner != ''", id
        )
        if rows and rows[0][1] <= self._clock():
            await self.abandon(id, str(rows[0][0]), str(rows[0][2]))
            return False
        return bool(rows)

    async def events(self, id: str, after: int) -> list[bytes]:
        """All events with a greater sequence number than `after`, as far as they are stored."""
        rows = await self._database.fetch(
            "SELECT first, events FROM response_events WHERE response = ? AND first >= COALESCE((SELECT MAX(first) "
            "FROM response_events WHERE response = ? AND first <= ?), 0) ORDER BY first",
            id,
            id,
            after + 1,
        )
        found: list[bytes] = []
        for first, text in rows:
            found += split_events(str(text).encode())[max(0, after + 1 - int(first)) :]
        return found

    async def recorded(self, id: str) -> bool:
        """Whether its events are kept."""
        query = "SELECT 1 FROM response_events WHERE response = ? AND first = 0"
        return bool(await self._database.fetch(query, id))

    def _chunk(self, id: str, owner: str, first: int, events: bytes) -> Statement:
        """Stores events of a response whose owner is `owner`; those of any other are dropped."""
        return (
            "INSERT INTO response_events (response, first, events, expires_at) SELECT id, CAST(? AS BIGINT), "
            "CAST(? AS TEXT), expires_at FROM responses WHERE id = ? AND owner = ? "
            "ON CONFLICT (response, first) DO UPDATE SET events = EXCLUDED.events",
            (first, events.decode(), id, owner),
        )


def split_events(data: bytes) -> list[bytes]:
    """The single events of what a renderer wrote, without comments."""
    return [event + b"\n\n" for event in data.split(b"\n\n") if event.startswith(b"event: ")]
