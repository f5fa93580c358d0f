"""What a request for a response refers to: earlier responses, items of theirs, and where its own response is stored."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.gateway.api.openai.responses import item_ids
from penstock.gateway.api.openai.responses.input_items import REFERENCE, kind_of, reference_of
from penstock.gateway.api.openai.responses.store import NoResponseStore, ResponseRecord, ResponseStore, Sees
from penstock.gateway.api.openai.responses.stored import store_reached
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.generation.schemas import ChatMessage
from penstock.identity import Caller
from penstock.protocol.errors import InvalidRequest


class ResponseReferences:
    """Finds only what the caller may see."""

    def __init__(self, store: ResponseStore | NoResponseStore, permissions: Permissions) -> None:
        self._store = store
        self._permissions = permissions

    async def earlier(self, exchange: Exchange, previous: str | None) -> list[ChatMessage]:
        """The conversation of an earlier response."""
        if previous is None:
            return []
        caller = exchange.caller
        found = await store_reached(
            self._store.conversation(previous, caller.tenant, caller.only_user, self._sees(caller))
        )
        if found is None:
            known = await store_reached(
                self._store.response(previous, caller.tenant, caller.only_user, self._sees(caller))
            )
            if known is not None:
                status = msgspec.json.decode(known)["status"]
                raise InvalidRequest(
                    f"The response `{previous}` is `{status}`; only one that has an answer can be continued.",
                    param="previous_response_id",
                )
            raise InvalidRequest(
                f"There is no stored response `{previous}`.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found

    async def resolved(self, exchange: Exchange, given: str | Sequence[msgspec.Raw]) -> str | Sequence[msgspec.Raw]:
        """The input, with items of stored responses in the place of references to them."""
        if isinstance(given, str):
            return given
        caller, items = exchange.caller, list(given)
        known: dict[str, dict[str, Any]] = {}
        for index, raw in enumerate(given):
            at = f"input[{index}]"
            if kind_of(raw, at) != REFERENCE:
                continue
            id = reference_of(exchange, raw, at)
            if id not in known and (response := item_ids.response_of(id)) is not None:
                found = await store_reached(
                    self._store.all_items(response, caller.tenant, caller.only_user, self._sees(caller))
                )
                known |= {item["id"]: item for item in found}
            if id not in known:
                raise InvalidRequest(
                    f"There is no stored item `{id[:128]}`; send the item itself.",
                    param=f"{at}.id",
                    code="item_not_found",
                )
            items[index] = msgspec.Raw(msgspec.json.encode(known[id]))
        return items

    async def record(
        self,
        exchange: Exchange,
        previous: str | None,
        items: str | Sequence[msgspec.Raw],
        conversation: list[ChatMessage],
    ) -> ResponseRecord:
        """What is stored with a response."""
        caller, user = exchange.caller, exchange.record.user_id or ""
        before: list[dict[str, Any]] = []
        if previous is not None:
            before = await store_reached(
                self._store.all_items(previous, caller.tenant, caller.only_user, self._sees(caller))
            )
        return ResponseRecord(caller.tenant, user, before, items, conversation)

    async def put(self, record: ResponseRecord, id: str, response: bytes, said: list[ChatMessage]) -> None:
        """Stores a response with everything that it answers."""
        whole = [*record.conversation, *said]
        await store_reached(
            self._store.put(id, record.tenant, response, whole, items=record.items(id), user=record.user)
        )

    def _sees(self, caller: Caller) -> Sees:
        return functools.partial(self._permissions.sees, caller)
