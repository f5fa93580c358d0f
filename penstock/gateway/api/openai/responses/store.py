"""Stored responses in the database: the object for GET requests, the items of its input, the conversation for the next
turn. Responses that are still generated, in the background, are there too; see `background_store`.

A response belongs to a tenant, and to a user if there is one, and is never found by another. It is deleted after
`keep_s`, and a tenant has at most `most`: the oldest are deleted first. Each row holds its whole conversation, so
deleting one leaves those that follow it intact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.gateway.api.openai.responses.background_store import UNFINISHED, BackgroundStore
from penstock.gateway.api.openai.responses.item_ids import input_items
from penstock.gateway.generation.schemas import ChatMessage
from penstock.storage import Database, Where

Item = dict[str, Any]
_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS responses (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, "
        "created_at DOUBLE PRECISION NOT NULL, expires_at DOUBLE PRECISION NOT NULL, "
        "response TEXT NOT NULL, conversation TEXT NOT NULL)",
        "CREATE INDEX IF NOT EXISTS responses_by_tenant ON responses (tenant, created_at)",
        "CREATE INDEX IF NOT EXISTS responses_by_end ON responses (expires_at)",
    ),
    ("ALTER TABLE responses ADD COLUMN user_id TEXT NOT NULL DEFAULT ''",),
    ("ALTER TABLE responses ADD COLUMN input_items TEXT NOT NULL DEFAULT '[]'",),
    (
        "ALTER TABLE responses ADD COLUMN owner TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE responses ADD COLUMN leased_until DOUBLE PRECISION NOT NULL DEFAULT 0",
        "CREATE INDEX IF NOT EXISTS responses_by_owner ON responses (owner)",
        "CREATE TABLE IF NOT EXISTS response_events (response TEXT NOT NULL, first BIGINT NOT NULL, "
        "events TEXT NOT NULL, expires_at DOUBLE PRECISION NOT NULL, PRIMARY KEY (response, first))",
        "CREATE INDEX IF NOT EXISTS response_events_by_end ON response_events (expires_at)",
    ),
    (
        "ALTER TABLE responses ADD COLUMN work TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE responses ADD COLUMN attempts BIGINT NOT NULL DEFAULT 0",
    ),
)
Sees = Callable[[str], bool]


class _Answered(msgspec.Struct):
    model: str = ""


def anything(model: str) -> bool:
    return True


_model = msgspec.json.Decoder(_Answered)
_messages = msgspec.json.Decoder(list[ChatMessage])
_items = msgspec.json.Decoder(list[Item])
_output = msgspec.json.Decoder(dict[str, Any])


class ResponseRecord(msgspec.Struct, frozen=True):
    """What is stored with a response beside its answer."""

    tenant: str
    user: str
    before: list[Item]
    """Items of the responses that it follows."""
    given: str | Sequence[msgspec.Raw]
    """Its own input."""
    conversation: list[ChatMessage]
    """Everything said before the answer."""

    def items(self, id: str) -> list[Item]:
        """All input items of the response with this id."""
        return [*self.before, *input_items(id, self.given)]


class NoResponseStore:
    """A gateway that stores no responses."""

    enabled = False

    async def put(
        self,
        id: str,
        tenant: str,
        response: bytes,
        conversation: Sequence[ChatMessage],
        *,
        items: Sequence[Item] = (),
        user: str = "",
    ) -> None:
        return

    async def response(self, id: str, tenant: str, user: str | None = None, sees: Sees = anything) -> bytes | None:
        return None

    async def conversation(
        self, id: str, tenant: str, user: str | None = None, sees: Sees = anything
    ) -> list[ChatMessage] | None:
        return None

    async def input_items(
        self, id: str, tenant: str, user: str | None = None, sees: Sees = anything
    ) -> list[Item] | None:
        return None

    async def all_items(self, id: str, tenant: str, user: str | None = None, sees: Sees = anything) -> list[Item]:
        return []

    async def delete(self, id: str, tenant: str, user: str | None = None, sees: Sees = anything) -> bool:
        return False


class ResponseStore:
    """All stored responses. Where a user is given, only those of this user are found."""

    enabled = True

    def __init__(self, database: Database, *, keep_s: float, most: int, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._keep_s = keep_s
        self._clock = clock
        self.background = BackgroundStore(database, keep_s=keep_s, most=most, clock=clock)

    async def prepare(self) -> None:
        await self._database.migrate("responses", _VERSIONS)

    async def put(
        self,
        id: str,
        tenant: str,
        response: bytes,
        conversation: Sequence[ChatMessage],
        *,
        items: Sequence[Item] = (),
        user: str = "",
    ) -> None:
        """A response whose end is sent again, to a client that resumes its stream, is there already."""
        now = self._clock()
        text = msgspec.json.encode(conversation).decode()
        given = msgspec.json.encode(items).decode()
        await self._database.transact(
            [
                (
                    "INSERT INTO responses (id, tenant, created_at, expires_at, response, conversation, user_id, "
                    "input_items) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
                    (id, tenant, now, now + self._keep_s, response.decode(), text, user.replace("\0", ""), given),
                ),
                *self.background.pruned(tenant),
            ]
        )

    async def response(self, id: str, tenant: str, user: str | None = None, sees: Sees = anything) -> bytes | None:
        """The object as it was answered; None when this tenant has none with this id. `sees`: whether the reader may
        see answers of a model."""
        found = await self._columns("response", id, tenant, user, sees)
        return None if found is None else found[0].encode()

    async def conversation(
        self, id: str, tenant: str, user: str | None = None, sees: Sees = anything
    ) -> list[ChatMessage] | None:
        """Everything said up to and with this response; None also where it has no end to go on from."""
        found = await self._columns("conversation", id, tenant, user, sees)
        return None if found is None or found[0] in ("", UNFINISHED) else _messages.decode(found[0])

    async def input_items(
        self, id: str, tenant: str, user: str | None = None, sees: Sees = anything
    ) -> list[Item] | None:
        """Everything that the response answers, oldest first."""
        found = await self._columns("input_items", id, tenant, user, sees)
        return None if found is None else _items.decode(found[0])

    async def all_items(self, id: str, tenant: str, user: str | None = None, sees: Sees = anything) -> list[Item]:
        """The same and the response's own output; nothing when there is no such response."""
        found = await self._columns("input_items, response", id, tenant, user, sees)
        return [] if found is None else [*_items.decode(found[0]), *_output.decode(found[1])["output"]]

    async def delete(self, id: str, tenant: str, user: str | None = None, sees: Sees = anything) -> bool:
        if await self._columns("id", id, tenant, user, sees) is None:
            return False
        where = self._which(id, tenant, user)
        deleted = [(f"DELETE FROM responses WHERE {where}", where.values)]
        deleted.append(("DELETE FROM response_events WHERE response = ?", [id]))
        return (await self._database.transact(deleted, guarded=True))[0] > 0

    async def _columns(self, names: str, id: str, tenant: str, user: str | None, sees: Sees) -> list[str] | None:
        where = self._which(id, tenant, user)
        query = f"SELECT {names}, owner, leased_until, response FROM responses WHERE {where}"
        rows = await self._database.fetch(query, *where.values)
        if rows and rows[0][-3] and rows[0][-2] <= self._clock() and not await self.background.running(id):
            rows = await self._database.fetch(query, *where.values)
        if not rows or not sees(_model.decode(str(rows[0][-1])).model):
            return None
        return [str(value) for value in rows[0][:-3]]

    def _which(self, id: str, tenant: str, user: str | None) -> Where:
        return Where(("id = ?", id), ("tenant = ?", tenant), ("expires_at > ?", self._clock()), ("user_id = ?", user))
