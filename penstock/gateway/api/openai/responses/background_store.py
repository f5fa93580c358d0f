"""Responses that are generated in the background, in the table of stored responses.

Such a row has an owner, the gateway process that generates it, a lease, which the owner renews, and the request that it
answers. Without an owner a response has ended. When a lease expires, or is given back, another gateway takes the
response over and generates it anew, a few times at most. Invariant: it ends once. Whoever ends it (its owner, a client
that cancels it, or whoever finds that nobody may take it over any more) takes the owner away in the same statement, and
everybody else's end changes nothing.

The events of a response that was asked for as a stream are kept in chunks, so that any process can send them again.
Each run has sequence numbers of its own, from a multiple of `RUN_EVENTS` on: a reader may have got events of a dead
gateway that were never stored, and must not mistake events of the next run for those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from penstock.gateway.api.openai.responses.replay import encode_event
from penstock.gateway.generation.schemas import ChatMessage
from penstock.storage import Database, Statement

ATTEMPTS = 3
"""Runs of a response whose gateways may die under it: what it asks for may be what kills them."""
GIVE_UP_S = 86400.0
"""How long a response may be without an owner."""
RUN_EVENTS = 1_000_000
"""Sequence numbers of one run; there are never as many events."""
LOST = "The gateway that generated this response stopped before its end. Send the request again."
LOST_OFTEN = (
    f"The gateways that generated this response stopped before its end, {ATTEMPTS} times, so it was not tried again."
)
NOBODY = "No gateway has taken over this response within a day after its own had stopped. Send the request again."
UNFINISHED = '[{"role":"user","content":[{"type":"unfinished_response"}]}]'
"""The conversation of a response that has no answer: nothing can be continued from it. Gateways of the last release do
not know such responses; to them this is a conversation that they refuse, with a 400."""
Announce = Callable[[str, str], Sequence[Statement]]
"""What to run in the transaction that ends a response; given the event and the id of the response."""
_NUMBER = re.compile(rb'"sequence_number":(\d+)')


class Work(msgspec.Struct, frozen=True):
    """The request that a response answers, as any gateway can send it to itself."""

    path: str
    body: str
    headers: list[tuple[str, str]]
    tenant: str
    key: str
    stream: bool
    """Whether its events are kept."""


class TakenOver(msgspec.Struct, frozen=True):
    """A response that another gateway has begun."""

    id: str
    response: dict[str, Any]
    work: Work
    first_event: int
    """The sequence number of its next event."""


class _Ended(msgspec.Struct):
    status: str = ""


_work = msgspec.json.Decoder(Work)
_ended = msgspec.json.Decoder(_Ended)


class BackgroundStore:
    """See above. Callers have checked whose a response is."""

    def __init__(self, database: Database, *, keep_s: float, most: int, clock: Callable[[], float]) -> None:
        """`most`: stored responses of one tenant."""
        self._database = database
        self._keep_s = keep_s
        self._most = most
        self._clock = clock
        self.announce: Announce = lambda event, id: ()

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
        work: Work,
    ) -> None:
        """A response that waits for its turn. `events`: so far; empty where the client wants no stream."""
        now = self._clock()
        given, user = msgspec.json.encode(items).decode(), user.replace("\0", "")
        statements: list[Statement] = [
            (
                "INSERT INTO responses (id, tenant, created_at, expires_at, response, conversation, user_id, "
                "input_items, owner, leased_until, work, attempts) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)",
                (
                    *(id, tenant, now, now + self._keep_s, response.decode(), UNFINISHED, user, given),
                    *(owner, now + lease_s, msgspec.json.encode(work).decode()),
                ),
            )
        ]
        if events:
            statements.append(self._chunk(id, owner, 0, events))
        await self._database.transact([*statements, *self.pruned(tenant)])

    def pruned(self, tenant: str) -> list[Statement]:
        """Deletes what is too old, or too much for a tenant; never what is still generated."""
        now = self._clock()
        old = "(SELECT created_at FROM responses WHERE tenant = ? ORDER BY created_at DESC LIMIT 1 OFFSET ?)"
        too_many = f"tenant = ? AND created_at <= {old} AND owner = ''"
        values = (tenant, tenant, self._most)
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
    ) -> dict[str, str]:
        """Renews the owner's leases of `ids`. `begun`: responses that left the queue; `events`: their new events, with
        the number of the first, which are dropped where a response has been ended, deleted or taken over by others.
        Returns whose each of them is now; it is nobody's once it has ended, and missing when it was deleted."""
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
        rows = await self._database.fetch(f"SELECT id, owner FROM responses WHERE id IN ({marks})", *ids)
        return {str(id): str(whose) for id, whose in rows}

    async def owner(self, id: str) -> str:
        """Who generates it; empty where nobody does."""
        rows = await self._database.fetch("SELECT owner FROM responses WHERE id = ?", id)
        return str(rows[0][0]) if rows else ""

    async def release(self, id: str, owner: str) -> None:
        """Give up the lease: another gateway may take over at once, and this run does not count as one that died."""
        await self._database.execute(
            "UPDATE responses SET leased_until = ?, attempts = attempts - 1 WHERE id = ? AND owner = ?",
            self._clock(), id, owner,
        )  # fmt: skip

    async def take_over(self, owner: str, lease_s: float, *, not_of: Collection[str] = ()) -> TakenOver | None:
        """Lease the oldest response whose owner has died or given it up, except those of tenants in `not_of`. What may
        not be generated again is ended."""
        others = f"AND tenant NOT IN ({', '.join('?' * len(not_of))}) " if not_of else ""
        # One at a time: a row has its whole request. Another gateway may be faster; then the next is tried.
        while rows := await self._database.fetch(
            "SELECT id, owner, leased_until, response, work, attempts FROM responses "
            f"WHERE owner > '' AND leased_until <= ? {others}ORDER BY created_at LIMIT 1",
            now := self._clock(),
            *not_of,
        ):
            id, before, until, response, work, attempts = rows[0]
            why = _given_up(work, attempts, now - until)
            try:
                asked = _work.decode(work or "{}")
            except msgspec.DecodeError:  # of another version
                why = why or LOST
            if why is not None:
                await self._abandon(id, before, response, why)
                continue
            queued = {**msgspec.json.decode(response), "status": "queued"}
            statements: list[Statement] = [
                (
                    "UPDATE responses SET owner = ?, leased_until = ?, attempts = attempts + 1, response = ? "
                    "WHERE id = ? AND owner = ? AND leased_until <= ?",
                    (owner, now + lease_s, msgspec.json.encode(queued).decode(), id, before, now),
                )
            ]
            first_event = 0
            if asked.stream:
                number = await self._next_run(id)
                # Stored at once, so that no later run gets these numbers.
                event = encode_event(("response.queued", {"response": queued}), number)
                statements.append(self._chunk(id, owner, number, event))
                first_event = number + 1
            if (await self._database.transact(statements, guarded=True))[0]:
                return TakenOver(id, queued, asked, first_event)
        return None

    async def _next_run(self, id: str) -> int:
        """The first sequence number of another run."""
        rows = await self._database.fetch("SELECT MAX(first) FROM response_events WHERE response = ?", id)
        return (int(rows[0][0] or 0) // RUN_EVENTS + 1) * RUN_EVENTS

    async def end(
        self,
        id: str,
        owner: str | None,
        response: bytes,
        conversation: Sequence[ChatMessage] | None = None,
        events: tuple[int, bytes] = (0, b""),
    ) -> bool:
        """Whether this was its end. `owner`: None for anybody's. `conversation`: to go on from, if it has an answer."""
        said = UNFINISHED if conversation is None else msgspec.json.encode(conversation).decode()
        whose, values = ("owner != ''", []) if owner is None else ("owner = ?", [owner])
        statements: list[Statement] = [
            (
                f"UPDATE responses SET owner = '', response = ?, conversation = ?, work = '' WHERE id = ? AND {whose}",
                (response.decode(), said, id, *values),
            )
        ]
        if events[1]:
            statements.append(self._chunk(id, "", *events))
        statements += self.announce(f"response.{_ended.decode(response).status}", id)
        return (await self._database.transact(statements, guarded=True))[0] > 0

    async def _abandon(self, id: str, owner: str, response: str, why: str) -> None:
        """End a response whose owner has let its lease expire."""
        failed = {
            **msgspec.json.decode(response),
            "status": "failed",
            "error": {"code": "server_error", "message": why},
        }
        statements: list[Statement] = [
            (
                "UPDATE responses SET owner = '', response = ?, work = '' WHERE id = ? AND owner = ? "
                "AND leased_until <= ?",
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
        statements += self.announce("response.failed", id)
        await self._database.transact(statements, guarded=True)

    async def running(self, id: str) -> bool:
        """Whether it waits or is generated, or will be; one that nobody may take over is ended."""
        rows = await self._database.fetch(
            "SELECT owner, leased_until, response, work, attempts FROM responses WHERE id = ? AND owner <> ''", id
        )
        if not rows:
            return False
        owner, until, response, work, attempts = rows[0]
        overdue = self._clock() - until
        if overdue >= 0 and (why := _given_up(work, attempts, overdue)) is not None:
            await self._abandon(id, owner, response, why)
            return False
        return True

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


def number_of(event: bytes) -> int:
    """The sequence number of an event."""
    found = _NUMBER.search(event)
    assert found is not None
    return int(found[1])


def _given_up(work: str, attempts: int, overdue: float) -> str | None:
    """Why a response without an owner may not be generated again; None: it may."""
    if not work:
        return LOST
    if attempts >= ATTEMPTS:
        return LOST_OFTEN
    return NOBODY if overdue > GIVE_UP_S else None
