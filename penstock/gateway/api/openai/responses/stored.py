"""/v1/responses/{id}: responses that were stored, their input items, and their end."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from penstock.gateway.api.openai.responses.background import BackgroundResponses
from penstock.gateway.api.openai.responses.replay import replayed
from penstock.gateway.api.openai.responses.store import NoResponseStore, ResponseStore, Sees
from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.obfuscation import obfuscated
from penstock.gateway.app.pagination import listed
from penstock.gateway.app.store_access import store_of
from penstock.gateway.generation.permissions import Permissions
from penstock.protocol.errors import InvalidRequest, NotFound

T = TypeVar("T")
RUNNING = ("queued", "in_progress")


class ResponseQuery(msgspec.Struct, forbid_unknown_fields=True, rename={"include_list": "include[]"}):
    stream: bool = False
    """Send the response as the events of a stream."""
    starting_after: Annotated[int, Meta(ge=0)] | None = None
    """Of a stream: only the events after this sequence number."""
    include_obfuscation: bool | None = None
    """Of a stream: random characters in events with text, so that their size does not tell its length."""
    include: str | None = None
    """Nothing more can be included; what there is, is shown."""
    include_list: str | None = None
    beta: str | None = None
    """Sent by the beta part of the SDK; the same either way."""


class ItemsQuery(msgspec.Struct, forbid_unknown_fields=True, rename={"include_list": "include[]"}):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Annotated[str, Meta(max_length=256)] | None = None
    """The id of the last item of the page before."""
    before: Annotated[str, Meta(max_length=256)] | None = None
    include: str | None = None
    """Nothing more can be included; what there is, is shown."""
    include_list: str | None = None
    beta: str | None = None
    """Sent by the beta part of the SDK; the same either way."""


class StoredResponseEndpoints:
    def __init__(
        self,
        store: ResponseStore | NoResponseStore,
        permissions: Permissions,
        background: BackgroundResponses | None,
    ) -> None:
        self._store = store
        self._permissions = permissions
        self._background = background

    async def get_response(self, exchange: Exchange) -> None:
        asked = decode_query(ResponseQuery, exchange.scope)
        if asked.starting_after is not None and not asked.stream:
            raise InvalidRequest("`starting_after` is only allowed with `stream=true`.", param="starting_after")
        id = exchange.path.split("/")[3]
        found = await self._found(exchange, id)
        if asked.include_obfuscation and asked.stream:
            exchange.padding = obfuscated
        if not asked.stream:
            await exchange.reply(200, found)
            return
        after = -1 if asked.starting_after is None else asked.starting_after
        response = msgspec.json.decode(found)
        if self._background is not None and response["background"]:
            if await store_reached(self._background.recorded(id)):
                await self._background.send_events(exchange, id, after)
                return
            if response["status"] in RUNNING:
                raise InvalidRequest(
                    f"The response `{id}` was not created with `stream: true`: ask for it without `stream`.",
                    param="stream",
                )
        await exchange.start_stream()
        await exchange.end_stream(replayed(response, after))

    async def delete_response(self, exchange: Exchange) -> None:
        id = exchange.path.split("/")[3]
        if not await store_reached(self._store.delete(id, *self._reader(exchange))):
            raise _unknown(id)
        if self._background is not None:
            self._background.stop(id)
        await exchange.reply_json({"id": id, "object": "response", "deleted": True})

    async def list_input_items(self, exchange: Exchange) -> None:
        asked = decode_query(ItemsQuery, exchange.scope)
        id = exchange.path.split("/")[3]
        items = await store_reached(self._store.input_items(id, *self._reader(exchange)))
        if items is None:
            raise _unknown(id)
        await exchange.reply_json(page_of(items, asked))

    async def cancel_response(self, exchange: Exchange) -> None:
        """Cancelling a response in the background that has ended shows it as it is."""
        id = exchange.path.split("/")[3]
        response = msgspec.json.decode(await self._found(exchange, id))
        if self._background is None or not response["background"]:
            raise InvalidRequest(
                f"The response `{id}` has ended. Only responses with `background: true` can be cancelled; closing the "
                "connection ends others at once."
            )
        if response["status"] in RUNNING:
            await store_reached(self._background.cancel(id, response))
        await exchange.reply(200, await self._found(exchange, id))

    async def _found(self, exchange: Exchange, id: str) -> bytes:
        found = await store_reached(self._store.response(id, *self._reader(exchange)))
        if found is None:
            raise _unknown(id)
        return found

    def _reader(self, exchange: Exchange) -> tuple[str, str | None, Sees]:
        caller = exchange.caller
        return caller.tenant, caller.only_user, partial(self._permissions.sees, caller)


def page_of(items: list[dict[str, Any]], asked: ItemsQuery) -> dict[str, Any]:
    """One page of items that are given oldest first."""
    ordered = items if asked.order == "asc" else items[::-1]
    for name, id in (("after", asked.after), ("before", asked.before)):
        if id is None:
            continue
        at = next((index for index, item in enumerate(ordered) if item["id"] == id), None)
        if at is None:
            raise InvalidRequest(f"`{name}` names no item of this list.", param=name)
        ordered = ordered[at + 1 :] if name == "after" else ordered[:at]
    return listed(ordered, asked.limit)


def _unknown(id: str) -> NotFound:
    return NotFound(f"There is no stored response `{id[:128]}`.")


async def store_reached(work: Awaitable[T]) -> T:
    with store_of("responses"):
        return await work
