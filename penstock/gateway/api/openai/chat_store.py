"""Stored chat completions (`store: true`) in the database: the object and the messages that it answers.

A completion belongs to a tenant, and to a user if there is one, and is never found by another. It is deleted after
`keep_s`, and a tenant has at most `most`: the oldest are deleted first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from penstock.storage import Database, Where

_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS chat_completions (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, "
        "user_id TEXT NOT NULL, created_at DOUBLE PRECISION NOT NULL, expires_at DOUBLE PRECISION NOT NULL, "
        "model TEXT NOT NULL, metadata TEXT NOT NULL, completion TEXT NOT NULL, messages TEXT NOT NULL)",
        "CREATE INDEX IF NOT EXISTS chat_completions_by_tenant ON chat_completions (tenant, created_at)",
        "CREATE INDEX IF NOT EXISTS chat_completions_by_end ON chat_completions (expires_at)",
    ),
)
_SCANNED = 10_000
"""Completions that a list with a filter by metadata looks at."""
_object = msgspec.json.Decoder(dict[str, Any])
_list = msgspec.json.Decoder(list[dict[str, Any]])
_metadata = msgspec.json.Decoder(dict[str, str])


def anything(model: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Reader:
    """Who asks. `user`: only what is theirs is found; None: everything of the tenant."""

    tenant: str
    user: str | None = None
    sees: Callable[[str], bool] = anything
    """Whether answers of a model are found."""


class ChatStore:
    """All stored completions."""

    def __init__(self, database: Database, *, keep_s: float, most: int, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._keep_s = keep_s
        self._most = most
        self._clock = clock

    async def prepare(self) -> None:
        await self._database.migrate("chat_completions", _VERSIONS)

    async def put(
        self, completion: Mapping[str, Any], messages: bytes, metadata: Mapping[str, str], tenant: str, user: str
    ) -> None:
        """A completion whose end is sent again, to a client that resumes its stream, is there already."""
        now = self._clock()
        values = (completion["id"], tenant, user.replace("\0", ""), now, now + self._keep_s, completion["model"])
        body = (_text(metadata), _text(completion), messages.decode())
        await self._database.transact(
            [
                (
                    "INSERT INTO chat_completions (id, tenant, user_id, created_at, expires_at, model, metadata, "
                    "completion, messages) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
                    (*values, *body),
                ),
                ("DELETE FROM chat_completions WHERE expires_at <= ?", (now,)),
                (
                    "DELETE FROM chat_completions WHERE tenant = ? AND created_at <= (SELECT created_at FROM "
                    "chat_completions WHERE tenant = ? ORDER BY created_at DESC LIMIT 1 OFFSET ?)",
                    (tenant, tenant, self._most),
                ),
            ]
        )

    async def get(self, id: str, reader: Reader) -> dict[str, Any] | None:
        where = self._of(reader, ("id = ?", id))
        rows = await self._database.fetch(
            f"SELECT completion, metadata, model FROM chat_completions WHERE {where}", *where.values
        )
        return _shown(rows[0]) if rows and reader.sees(str(rows[0][2])) else None

    async def messages(self, id: str, reader: Reader) -> list[dict[str, Any]] | None:
        """The messages that it answers, oldest first."""
        where = self._of(reader, ("id = ?", id))
        rows = await self._database.fetch(f"SELECT messages, model FROM chat_completions WHERE {where}", *where.values)
        return _list.decode(str(rows[0][0])) if rows and reader.sees(str(rows[0][1])) else None

    async def list(
        self,
        reader: Reader,
        *,
        limit: int,
        newest_first: bool,
        after: str | None = None,
        model: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> list[dict[str, Any]] | None:
        """At most `limit` completions; None when there is no completion `after`."""
        where = self._of(reader, ("model = ?", model))
        order: Literal["ASC", "DESC"] = "DESC" if newest_first else "ASC"
        if after is not None:
            last = self._of(reader, ("id = ?", after), ("model = ?", model))
            rows = await self._database.fetch(
                f"SELECT created_at, model FROM chat_completions WHERE {last}", *last.values
            )
            if not rows or not reader.sees(str(rows[0][1])):
                return None
            where.beyond(float(str(rows[0][0])), after, order)
        rows = await self._database.fetch(
            f"SELECT completion, metadata, model FROM chat_completions WHERE {where} "
            f"ORDER BY created_at {order}, id {order} LIMIT ?",
            *where.values,
            _SCANNED if metadata or reader.sees is not anything else limit,
        )
        wanted = set((metadata or {}).items())
        seen = (row for row in rows if reader.sees(str(row[2])))
        found = (row for row in seen if not wanted or wanted <= _metadata.decode(str(row[1])).items())
        return [_shown(row) for _, row in zip(range(limit), found, strict=False)]

    async def update(self, id: str, metadata: Mapping[str, str], reader: Reader) -> bool:
        if await self.messages(id, reader) is None:
            return False
        where = self._of(reader, ("id = ?", id))
        changed = await self._database.execute(
            f"UPDATE chat_completions SET metadata = ? WHERE {where}", _text(metadata), *where.values
        )
        return changed > 0

    async def delete(self, id: str, reader: Reader) -> bool:
        if await self.messages(id, reader) is None:
            return False
        where = self._of(reader, ("id = ?", id))
        return await self._database.execute(f"DELETE FROM chat_completions WHERE {where}", *where.values) > 0

    def _of(self, reader: Reader, *which: tuple[str, Any]) -> Where:
        whose = ("tenant = ?", reader.tenant), ("expires_at > ?", self._clock()), ("user_id = ?", reader.user)
        return Where(*which, *whose)


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _shown(row: tuple[object, ...]) -> dict[str, Any]:
    return {**_object.decode(str(row[0])), "metadata": _metadata.decode(str(row[1]))}
