"""The interface of conversation stores, and the SQL store.

The gateway that answers a turn holds the conversation's lease; only the holder of the newest lease can write, so two
gateways never overwrite each other's turns. The lease of a dead gateway expires. A conversation is deleted when it was
not used for its time to live; one that was deleted while a turn was answered stays deleted. A summary may be written
without the lease, because it does not change the history.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from penstock.conversations.conversation import Owner
from penstock.storage import Database


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A stored conversation. `data` empty: it does not exist yet."""

    data: bytes = b""
    summary: bytes = b""
    created_at: float = 0.0
    """Also distinguishes a conversation from a later one with the same id."""
    updated_at: float = 0.0
    expires_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ListedConversation:
    """An entry in a list of conversations."""

    id: str
    created_at: float
    updated_at: float
    expires_at: float
    turns: int


class ConversationStore(ABC):
    """All calls raise `DatabaseError` when the store cannot be reached."""

    async def prepare(self) -> None:
        """Creates tables; does nothing by default."""
        return

    @abstractmethod
    async def begin(self, owner: Owner, id: str, lease: str, lease_s: float) -> StoredConversation | None:
        """Takes the lease and reads the conversation; None when the lease is held."""

    @abstractmethod
    async def renew(self, owner: Owner, id: str, lease: str, lease_s: float) -> None:
        """Extends the lease to `lease_s` from now, if it is still held."""

    @abstractmethod
    async def commit(self, owner: Owner, id: str, lease: str, data: bytes, turns: int) -> bool:
        """Writes the conversation and releases the lease; False, without writing, when it was no longer held."""

    @abstractmethod
    async def release(self, owner: Owner, id: str, lease: str) -> None:
        """Releases the lease without writing."""

    @abstractmethod
    async def summarise(self, owner: Owner, id: str, created_at: float, summary: bytes) -> bool:
        """Writes a summary; False when the conversation is gone."""

    @abstractmethod
    async def get(self, owner: Owner, id: str) -> StoredConversation | None: ...

    @abstractmethod
    async def list(self, owner: Owner, limit: int) -> list[ListedConversation]:
        """The owner's conversations, most recently used first."""

    @abstractmethod
    async def delete(self, owner: Owner, id: str) -> bool:
        """Whether there was one."""

    async def close(self) -> None:
        """Closes connections; does nothing by default."""
        return


_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS conversations (tenant TEXT NOT NULL, user_id TEXT NOT NULL, id TEXT NOT NULL, "
        "created_at DOUBLE PRECISION NOT NULL, updated_at DOUBLE PRECISION NOT NULL, "
        "expires_at DOUBLE PRECISION NOT NULL, turns BIGINT NOT NULL, data BYTEA NOT NULL, summary BYTEA NOT NULL, "
        "lease TEXT NOT NULL, lease_until DOUBLE PRECISION NOT NULL, PRIMARY KEY (tenant, user_id, id))",
        "CREATE INDEX IF NOT EXISTS conversations_by_use ON conversations (tenant, user_id, updated_at)",
        "CREATE INDEX IF NOT EXISTS conversations_by_end ON conversations (expires_at)",
    ),
)
_WHOSE = "tenant = ? AND user_id = ? AND id = ?"


class SqlConversations(ConversationStore):
    """Conversations in the database. A row without data is a lease on a conversation that does not exist yet."""

    def __init__(self, database: Database, *, ttl_s: float, most: int, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._ttl_s = ttl_s
        self._most = most
        self._clock = clock

    async def prepare(self) -> None:
        await self._database.migrate("conversations", _VERSIONS)

    async def begin(self, owner: Owner, id: str, lease: str, lease_s: float) -> StoredConversation | None:
        now = self._clock()
        whose = (owner.tenant, owner.user, id)
        _, taken = await self._database.transact(
            [
                (f"DELETE FROM conversations WHERE {_WHOSE} AND expires_at <= ? AND lease_until <= ?",
                 (*whose, now, now)),
                ("INSERT INTO conversations (tenant, user_id, id, created_at, updated_at, expires_at, turns, data, "
                 "summary, lease, lease_until) VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?) "
                 "ON CONFLICT (tenant, user_id, id) DO UPDATE SET lease = excluded.lease, "
                 "lease_until = excluded.lease_until WHERE conversations.lease_until <= ?",
                 (*whose, now, now, now + lease_s, b"", b"", lease, now + lease_s, now)),
            ]
        )  # fmt: skip
        if not taken:
            return None
        rows = await self._database.fetch(
            f"SELECT data, summary, created_at, updated_at, expires_at FROM conversations WHERE {_WHOSE}", *whose
        )
        return _stored(rows[0]) if rows else None

    async def renew(self, owner: Owner, id: str, lease: str, lease_s: float) -> None:
        await self._database.execute(
            f"UPDATE conversations SET lease_until = ? WHERE {_WHOSE} AND lease = ?",
            self._clock() + lease_s, owner.tenant, owner.user, id, lease,
        )  # fmt: skip

    async def commit(self, owner: Owner, id: str, lease: str, data: bytes, turns: int) -> bool:
        now = self._clock()
        counts = await self._database.transact(
            [
                (f"UPDATE conversations SET data = ?, turns = ?, updated_at = ?, expires_at = ?, lease = '', "
                 f"lease_until = 0 WHERE {_WHOSE} AND lease = ?",
                 (data, turns, now, now + self._ttl_s, owner.tenant, owner.user, id, lease)),
                ("DELETE FROM conversations WHERE expires_at <= ? AND lease_until <= ?", (now, now)),
                ("DELETE FROM conversations WHERE tenant = ? AND user_id = ? AND lease_until <= ? AND updated_at <= "
                 "(SELECT updated_at FROM conversations WHERE tenant = ? AND user_id = ? AND length(data) > 0 "
                 "ORDER BY updated_at DESC LIMIT 1 OFFSET ?)",
                 (owner.tenant, owner.user, now, owner.tenant, owner.user, self._most)),
            ],
            guarded=True,
        )  # fmt: skip
        return counts[0] > 0

    async def release(self, owner: Owner, id: str, lease: str) -> None:
        whose = (owner.tenant, owner.user, id, lease)
        await self._database.transact(
            [
                (f"DELETE FROM conversations WHERE {_WHOSE} AND lease = ? AND length(data) = 0", whose),
                (f"UPDATE conversations SET lease = '', lease_until = 0 WHERE {_WHOSE} AND lease = ?", whose),
            ]
        )

    async def summarise(self, owner: Owner, id: str, created_at: float, summary: bytes) -> bool:
        changed = await self._database.execute(
            f"UPDATE conversations SET summary = ? WHERE {_WHOSE} AND created_at = ?",
            summary, owner.tenant, owner.user, id, created_at,
        )  # fmt: skip
        return changed > 0

    async def get(self, owner: Owner, id: str) -> StoredConversation | None:
        rows = await self._database.fetch(
            f"SELECT data, summary, created_at, updated_at, expires_at FROM conversations WHERE {_WHOSE} "
            "AND expires_at > ? AND length(data) > 0",
            owner.tenant, owner.user, id, self._clock(),
        )  # fmt: skip
        return _stored(rows[0]) if rows else None

    async def list(self, owner: Owner, limit: int) -> list[ListedConversation]:
        rows = await self._database.fetch(
            "SELECT id, created_at, updated_at, expires_at, turns FROM conversations WHERE tenant = ? AND user_id = ? "
            "AND expires_at > ? AND length(data) > 0 ORDER BY updated_at DESC LIMIT ?",
            owner.tenant, owner.user, self._clock(), limit,
        )  # fmt: skip
        return [ListedConversation(*row) for row in rows]

    async def delete(self, owner: Owner, id: str) -> bool:
        counts = await self._database.transact(
            [
                (f"DELETE FROM conversations WHERE {_WHOSE} AND length(data) > 0 AND expires_at > ?",
                 (owner.tenant, owner.user, id, self._clock())),
            ]
        )  # fmt: skip
        return counts[0] > 0


def _stored(row: tuple[object, ...]) -> StoredConversation:
    data, summary, created, updated, expires = row
    assert isinstance(data, bytes) and isinstance(summary, bytes)
    return StoredConversation(data, summary, float(str(created)), float(str(updated)), float(str(expires)))
