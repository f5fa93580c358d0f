"""/v1/conversations: the stored conversations of a caller; each belongs to a tenant and a user."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from penstock.conversations import Owner, Sessions
from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.store_access import store_of
from penstock.protocol.errors import NotFound, PermissionDenied

T = TypeVar("T")


class ConversationQuery(msgspec.Struct, forbid_unknown_fields=True):
    user: Annotated[str, Meta(max_length=512)] | None = None
    """The user of the conversation, for a key that several users share."""


class ConversationsQuery(ConversationQuery):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 20


class ConversationEndpoints:
    """Stored conversations."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def list_conversations(self, exchange: Exchange) -> None:
        asked = decode_query(ConversationsQuery, exchange.scope)
        owner = owner_named(exchange, asked)
        found = await store_reached(self._sessions.store.list(owner, asked.limit))
        data = [
            conversation_object(entry.id, entry.created_at, entry.updated_at, entry.expires_at, entry.turns, owner)
            for entry in found
        ]
        await exchange.reply_json({"object": "list", "data": data})

    async def get_conversation(self, exchange: Exchange) -> None:
        owner, id = _asked(exchange)
        found = await store_reached(self._sessions.get(owner, id))
        if found is None:
            raise unknown_conversation(id)
        stored, conversation, summary = found
        described = conversation_object(
            id, stored.created_at, stored.updated_at, stored.expires_at, conversation.end, owner
        )
        system = [{"role": "system", "content": conversation.system}] if conversation.system else []
        await exchange.reply_json(
            {
                **described,
                "metadata": conversation.metadata,
                "messages": [*system, *conversation.since(0)],
                "forgotten_turns": conversation.first,
                "summary": {"turns": summary.covers, "text": summary.text} if summary.notes else None,
            }
        )

    async def delete_conversation(self, exchange: Exchange) -> None:
        owner, id = _asked(exchange)
        if not await store_reached(self._sessions.store.delete(owner, id)):
            raise unknown_conversation(id)
        await exchange.reply_json({"id": id, "object": "conversation.deleted", "deleted": True})


class NoConversations(ConversationEndpoints):
    """Answers where no conversations are stored."""

    def __init__(self) -> None:
        return

    async def list_conversations(self, exchange: Exchange) -> None:
        owner_named(exchange, decode_query(ConversationsQuery, exchange.scope))
        await exchange.reply_json({"object": "list", "data": []})

    async def get_conversation(self, exchange: Exchange) -> None:
        _, id = _asked(exchange)
        raise unknown_conversation(id)

    async def delete_conversation(self, exchange: Exchange) -> None:
        _, id = _asked(exchange)
        raise unknown_conversation(id)


def _asked(exchange: Exchange) -> tuple[Owner, str]:
    return owner_named(exchange, decode_query(ConversationQuery, exchange.scope)), exchange.path.rpartition("/")[2]


def owner_named(exchange: Exchange, asked: ConversationQuery) -> Owner:
    """The user of the key; a key that several users share names the user in the query."""
    caller, user = exchange.caller, asked.user
    if caller.user and user not in (None, caller.user):
        raise PermissionDenied(f"The API key {caller.key} belongs to the user `{caller.user}`.")
    return Owner(caller.tenant, caller.user or user or "")


def conversation_object(
    id: str, created_at: float, updated_at: float, expires_at: float, turns: int, owner: Owner
) -> dict[str, Any]:
    return {
        "id": id,
        "object": "conversation",
        "created_at": int(created_at),
        "updated_at": int(updated_at),
        "expires_at": int(expires_at),
        "turns": turns,
        "user": owner.user or None,
    }


def unknown_conversation(id: str) -> NotFound:
    return NotFound(f"There is no conversation `{id[:128]}`.")


async def store_reached(work: Awaitable[T]) -> T:
    with store_of("conversations"):
        return await work
