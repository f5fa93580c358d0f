"""/v1/chat/completions/{id}: chat completions that were stored, as the OpenAI SDK reads them, and how they are kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qs

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.api.openai.chat_store import ChatStore, Reader, anything
from penstock.gateway.app.decoding import convert_query, decode_query, plain
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.pagination import listed
from penstock.gateway.app.store_access import store_of
from penstock.gateway.generation.choice import Piece
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.schemas import ChatRequest, Metadata
from penstock.gateway.server_tools.steps import StepsRenderer
from penstock.protocol.errors import ApiError, InvalidRequest, NotFound

T = TypeVar("T")
_SHOWN = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "tools", "tool_choice")
"""Parameters of the request that the stored object shows."""
Keep = Callable[[bytes], Awaitable[None]]
"""Stores the body of an answer."""


class CompletionsQuery(Struct, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "asc"
    after: Annotated[str, Meta(max_length=128)] | None = None
    """The id of the last completion of the page before."""
    model: Annotated[str, Meta(max_length=256)] | None = None
    """Only those of this model. `metadata[KEY]=VALUE`: only those with this metadata."""


class MessagesQuery(Struct, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "asc"
    after: Annotated[str, Meta(max_length=160)] | None = None
    """The id of the last message of the page before."""


class CompletionUpdate(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions/{id}"""

    metadata: Metadata | None


_update = RequestDecoder(CompletionUpdate)


class StoredChatEndpoints:
    def __init__(self, store: ChatStore, permissions: Permissions, body_limit: int) -> None:
        self._store = store
        self._permissions = permissions
        self._limit = body_limit

    async def list_chat_completions(self, exchange: Exchange) -> None:
        query = parse_qs(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True, errors="replace")
        given = {name: values[-1] for name, values in query.items()}
        metadata = {name[9:-1]: given.pop(name) for name in list(given) if _is_metadata(name)}
        asked = convert_query(CompletionsQuery, given)
        found = await store_reached(
            self._store.list(
                self._reader(exchange),
                limit=asked.limit + 1,
                newest_first=asked.order == "desc",
                after=asked.after,
                model=asked.model,
                metadata=metadata,
            )
        )
        if found is None:
            raise InvalidRequest("`after` names no stored completion.", param="after")
        await exchange.reply_json(listed(found, asked.limit))

    async def get_chat_completion(self, exchange: Exchange) -> None:
        await exchange.reply_json(await self._found(exchange))

    async def update_chat_completion(self, exchange: Exchange) -> None:
        request = _update(exchange, await exchange.body(self._limit))
        await store_reached(self._store.update(_id(exchange), request.metadata or {}, self._reader(exchange)))
        await exchange.reply_json(await self._found(exchange))

    async def delete_chat_completion(self, exchange: Exchange) -> None:
        id = _id(exchange)
        if not await store_reached(self._store.delete(id, self._reader(exchange))):
            raise _unknown(id)
        await exchange.reply_json({"id": id, "object": "chat.completion.deleted", "deleted": True})

    async def list_chat_completion_messages(self, exchange: Exchange) -> None:
        asked = decode_query(MessagesQuery, exchange.scope)
        id = _id(exchange)
        found = await store_reached(self._store.messages(id, self._reader(exchange)))
        if found is None:
            raise _unknown(id)
        messages = [{"id": f"{id}-{index}", **message} for index, message in enumerate(found)]
        if asked.order == "desc":
            messages.reverse()
        if asked.after is not None:
            ids = [message["id"] for message in messages]
            if asked.after not in ids:
                raise InvalidRequest("`after` names no message of this completion.", param="after")
            messages = messages[ids.index(asked.after) + 1 :]
        await exchange.reply_json(listed(messages, asked.limit))

    def _reader(self, exchange: Exchange) -> Reader:
        caller = exchange.caller
        sees = partial(self._permissions.sees, caller) if caller.access.limited else anything
        return Reader(caller.tenant, caller.only_user, sees)

    async def _found(self, exchange: Exchange) -> dict[str, Any]:
        id = _id(exchange)
        found = await store_reached(self._store.get(id, self._reader(exchange)))
        if found is None:
            raise _unknown(id)
        return found


class StoringRenderer(StepsRenderer):
    """Renders with `inner`, and stores the whole answer before its end is sent. `plain` renders it whole."""

    def __init__(self, inner: StepsRenderer, plain: StepsRenderer, choices: int, keep: Keep) -> None:
        self._inner = inner
        self._plain = plain
        self._head = inner.head
        self._pieces: list[list[Piece]] = [[] for _ in range(choices)]
        self._keep = keep
        self._body = b""
        self.keep_alive = inner.keep_alive

    def opening(self) -> bytes:
        return self._inner.opening()

    def event(self, piece: Piece) -> bytes:
        self._pieces[piece.index].append(piece)
        return self._inner.event(piece)

    def tool_event(self, event: dict[str, Any]) -> bytes:
        return self._inner.tool_event(event)

    def closing(self) -> bytes:
        self._body = self._plain.whole(self._pieces)
        return self._inner.closing()

    def whole(self, pieces: list[list[Piece]]) -> bytes:
        self._body = self._inner.whole(pieces)
        return self._body

    def limit_reached(self, limit: str, scope: str) -> bytes:
        return self._inner.limit_reached(limit, scope)

    def failure(self, error: ApiError) -> bytes:
        return self._inner.failure(error)

    async def before_end(self) -> None:
        await self._inner.before_end()
        await self.keep()

    async def keep(self) -> None:
        await self._keep(self._body)


def keeper(store: ChatStore, exchange: Exchange, request: ChatRequest) -> Keep:
    """Stores the answer to `request`."""
    tenant, user = exchange.caller.tenant, exchange.record.user_id or ""
    given = plain(request)
    shown = {name: given.get(name) for name in _SHOWN}
    messages = msgspec.json.encode(
        [
            {name: value for name, value in message.items() if value is not None or name == "content"}
            for message in given["messages"]
        ]
    )

    async def keep(body: bytes) -> None:
        completion = {**msgspec.json.decode(body), "object": "chat.completion", **shown}
        await store_reached(store.put(completion, messages, request.metadata or {}, tenant, user))

    return keep


def _is_metadata(name: str) -> bool:
    return name.startswith("metadata[") and name.endswith("]")


def _id(exchange: Exchange) -> str:
    return exchange.path.split("/")[4]


def _unknown(id: str) -> NotFound:
    return NotFound(f"There is no stored chat completion `{id[:128]}`.")


async def store_reached(work: Awaitable[T]) -> T:
    with store_of("chat completions"):
        return await work
