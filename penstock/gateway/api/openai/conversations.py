"""/v1/conversations as the OpenAI SDK has it: making conversations, and their messages as items.

Stored are messages, as chat templates take them; items are a view of them. A message of the assistant with two calls is
three items. Ids of items hold the number of their message, so they stay when others are deleted.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from penstock.conversations import Conversation, HeldConversation, Message, Owner, SessionBusy, Sessions
from penstock.conversations.conversation import leading_system
from penstock.gateway.api.openai.responses.input_files import with_file_texts
from penstock.gateway.api.openai.responses.input_items import conversation_of
from penstock.gateway.api.openai.responses.stored import ItemsQuery, page_of
from penstock.gateway.api.openai.responses.tools import OfferedTools
from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.dialects import renamed
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.conversations.endpoints import ConversationQuery, owner_named, store_reached, unknown_conversation
from penstock.gateway.generation.chat_messages import call_names, template_messages
from penstock.gateway.generation.input_files import InputFiles
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.schemas import ChatMessage, Metadata
from penstock.gateway.generation.stages import ContentFilter
from penstock.protocol.errors import ConversationBusy, NotFound, ServiceUnavailable
from penstock.storage import DatabaseError

_NAMES = ((r"input\b", "items"), (r"messages\b", "items"))
_SYSTEM = "msg_system"
_ITEM = re.compile(r"(msg|fc|fco)_(\d{1,18})(?:_(\d{1,6}))?")


class ConversationRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/conversations"""

    items: Annotated[list[Raw], Meta(max_length=1024)] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/conversations/{id}"""

    metadata: Metadata | None


class ItemsRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/conversations/{id}/items"""

    items: Annotated[list[Raw], Meta(min_length=1, max_length=1024)]


class ConversationItemsQuery(ItemsQuery):
    user: Annotated[str, Meta(max_length=512)] | None = None
    """The user of the conversation, for a key that several users share."""


_create = RequestDecoder(ConversationRequest)
_update = RequestDecoder(ConversationUpdate)
_add = RequestDecoder(ItemsRequest)


class ConversationItemEndpoints:
    """What `ConversationEndpoints` do not have: conversations made and changed by hand."""

    def __init__(self, sessions: Sessions, content_filter: ContentFilter, body_limit: int, files: InputFiles) -> None:
        self._files = files
        self._sessions = sessions
        self._content_filter = content_filter
        self._limit = body_limit

    async def create_conversation(self, exchange: Exchange) -> None:
        request = _create(exchange, await exchange.body(self._limit) or b"{}")
        owner, id = _owner(exchange), f"conv_{uuid.uuid4().hex}"
        fresh = Conversation(metadata=request.metadata or {})
        conversation = await self._extended(exchange, fresh, request.items or ())
        async with self._held(owner, id) as held:
            await self._sessions.commit(held, conversation)
        await exchange.reply_json(_shown(id, time.time(), conversation))

    async def update_conversation(self, exchange: Exchange) -> None:
        request = _update(exchange, await exchange.body(self._limit))
        async with self._held(_owner(exchange), _id(exchange), existing=True) as held:
            changed = msgspec.structs.replace(held.conversation, metadata=request.metadata or {})
            await self._sessions.commit(held, changed)
        await exchange.reply_json(_shown(held.id, held.created_at, changed))

    async def create_conversation_items(self, exchange: Exchange) -> None:
        request = _add(exchange, await exchange.body(self._limit))
        async with self._held(_owner(exchange), _id(exchange), existing=True) as held:
            before = held.conversation
            conversation = await self._extended(exchange, before, request.items)
            await self._sessions.commit(held, conversation)
        known = {item["id"] for item in _items(before)}
        added = [item for item in _items(conversation) if item["id"] not in known]
        await exchange.reply_json(page_of(added, ItemsQuery(limit=max(1, len(added)), order="asc")))

    async def list_conversation_items(self, exchange: Exchange) -> None:
        asked = decode_query(ConversationItemsQuery, exchange.scope)
        owner = owner_named(exchange, ConversationQuery(asked.user))
        await exchange.reply_json(page_of(_items(await self._stored(owner, _id(exchange))), asked))

    async def get_conversation_item(self, exchange: Exchange) -> None:
        found = _items(await self._stored(_owner(exchange), _id(exchange)))
        wanted = exchange.path.rpartition("/")[2]
        for item in found:
            if item["id"] == wanted:
                await exchange.reply_json(item)
                return
        raise _no_item(wanted)

    async def delete_conversation_item(self, exchange: Exchange) -> None:
        wanted = exchange.path.rpartition("/")[2]
        async with self._held(_owner(exchange), _id(exchange), existing=True) as held:
            conversation = _without(held.conversation, wanted)
            await self._sessions.commit(held, conversation)
        await exchange.reply_json(_shown(held.id, held.created_at, conversation))

    async def _extended(self, exchange: Exchange, before: Conversation, items: Sequence[Raw]) -> Conversation:
        """The conversation with `items` at its end, checked and filtered as those of a request."""
        if not items:
            return before
        history = msgspec.convert(before.since(0), list[ChatMessage])
        calls = call_names(before.since(0))
        with renamed(_NAMES):
            read = await with_file_texts(exchange, self._files, items, None, free=True)
            said = conversation_of(exchange, read, history, OfferedTools(exchange, None))[len(history) :]
            messages = template_messages(said, calls)
        if messages:
            messages = await self._content_filter.messages(exchange, messages)
        if not before.turns and not before.system:
            head = leading_system(messages)
            system = "\n\n".join(str(message["content"]) for message in messages[:head])
            before, messages = msgspec.structs.replace(before, system=system), messages[head:]
        return before.followed_by(messages)

    async def _stored(self, owner: Owner, id: str) -> Conversation:
        found = await store_reached(self._sessions.get(owner, id))
        if found is None:
            raise unknown_conversation(id)
        return found[1]

    @asynccontextmanager
    async def _held(self, owner: Owner, id: str, *, existing: bool = False) -> AsyncIterator[HeldConversation]:
        """The conversation between its turns."""
        try:
            async with self._sessions.turn(owner, id) as held:
                if existing and not held.exists:
                    raise unknown_conversation(id)
                yield held
        except SessionBusy as busy:
            raise ConversationBusy(f"The conversation `{id}` is busy: {busy}; send this again.") from busy
        except DatabaseError as error:
            raise ServiceUnavailable("The conversation store is unavailable at the moment.") from error


def _owner(exchange: Exchange) -> Owner:
    return owner_named(exchange, decode_query(_ConversationItemQuery, exchange.scope))


class _ConversationItemQuery(ConversationQuery, rename={"include_list": "include[]"}):
    include: str | None = None
    include_list: str | None = None


def _id(exchange: Exchange) -> str:
    return exchange.path.split("/")[3]


def _shown(id: str, created_at: float, conversation: Conversation) -> dict[str, Any]:
    return {
        "id": id,
        "object": "conversation",
        "created_at": int(created_at),
        "metadata": conversation.metadata,
        "turns": conversation.end,
    }


def _items(conversation: Conversation) -> list[dict[str, Any]]:
    """Oldest first."""
    found: list[dict[str, Any]] = []
    if conversation.system:
        found.append(_message(_SYSTEM, {"role": "system", "content": conversation.system}))
    for number, message in conversation.numbered():
        if message["role"] == "tool":
            result = {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            found.append({"id": f"fco_{number}", **result, "status": "completed"})
            continue
        calls = message.get("tool_calls") or ()
        if message["content"] or not calls:
            found.append(_message(f"msg_{number}", message))
        for place, call in enumerate(calls):
            function = {"call_id": call["id"], **call["function"], "status": "completed"}
            found.append({"id": f"fc_{number}_{place}", "type": "function_call", **function})
    return found


def _message(id: str, message: Message) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "input_text", "text": message["content"]}
    if message["role"] == "assistant":
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
    return {"id": id, "type": "message", "role": message["role"], "status": "completed", "content": [part]}


def _without(conversation: Conversation, item: str) -> Conversation:
    """The conversation without one item."""
    if item == _SYSTEM and conversation.system:
        return msgspec.structs.replace(conversation, system="")
    wanted = _ITEM.fullmatch(item)
    stored = conversation.numbered()
    if wanted is None or not any(shown["id"] == item for shown in _items(conversation)):
        raise _no_item(item)
    kept: list[tuple[int, Message]] = []
    for number, message in stored:
        if number != int(wanted[2]):
            kept.append((number, message))
        elif left := _left(message, wanted[1], int(wanted[3] or 0)):
            kept.append((number, left))
    return conversation.with_messages(kept)


def _left(message: Message, kind: str, place: int) -> Message | None:
    """What is left of a message without its text, or without one of its calls."""
    calls = message.get("tool_calls") or []
    if kind == "msg" and calls:
        return {**message, "content": ""}
    if kind == "fc" and (len(calls) > 1 or message["content"]):
        left = {**message, "tool_calls": [call for at, call in enumerate(calls) if at != place]}
        return left if left["tool_calls"] else {name: left[name] for name in left if name != "tool_calls"}
    return None


def _no_item(id: str) -> NotFound:
    return NotFound(f"There is no item `{id[:128]}` in this conversation.")
