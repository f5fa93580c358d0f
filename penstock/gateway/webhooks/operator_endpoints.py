"""/v1/admin/webhooks: the webhook endpoints of all tenants for an operator: how deliveries to them go, what they were
not told of, and disabling one that does harm. Secrets are never shown."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from penstock.gateway.app.decoding import decode, decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.pagination import NoQuery, listed
from penstock.gateway.app.uploads import UploadSlots
from penstock.gateway.webhooks.delivery import WebhookClient
from penstock.gateway.webhooks.endpoints import send_example, store_reached, unknown_endpoint
from penstock.gateway.webhooks.store import EventType, Outstanding, WebhookEndpoint, WebhookStore
from penstock.protocol.errors import InvalidRequest, NotFound

MOST_DELIVERIES = 100
"""That one endpoint is shown with."""


class OperatorWebhooksQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    tenant: str | None = None
    state: Literal["disabled", "failing"] | None = None
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 100


class OperatorWebhookChange(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """PATCH /v1/admin/webhooks/{webhook_endpoint}"""

    disabled: bool


class OperatorWebhookTest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """POST /v1/admin/webhooks/{webhook_endpoint}/test"""

    event_type: EventType | None = None
    """The first that the endpoint wants to be told of, by default."""


class ResendRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """POST /v1/admin/webhooks/{webhook_endpoint}/resend"""

    event: str | None = None
    """Everything that the endpoint was not told of, by default."""


_change = msgspec.json.Decoder(OperatorWebhookChange)
_test = msgspec.json.Decoder(OperatorWebhookTest)
_resend = msgspec.json.Decoder(ResendRequest)


class OperatorWebhookEndpoints:
    """The webhook endpoints of all tenants."""

    def __init__(self, store: WebhookStore, client: WebhookClient, body_limit: int) -> None:
        self._store = store
        self._client = client
        self._limit = body_limit
        self._tests = UploadSlots()

    async def list_all_webhooks(self, exchange: Exchange) -> None:
        asked = decode_query(OperatorWebhooksQuery, exchange.scope)
        after = await self._found(asked.after) if asked.after else None
        found = await store_reached(
            self._store.page(asked.tenant, after=after, state=asked.state, limit=asked.limit + 1)
        )
        counts = await store_reached(self._store.outstanding([one.id for one in found]))
        await exchange.reply_json(listed([_shown(one, counts.get(one.id)) for one in found], asked.limit))

    async def show_webhook(self, exchange: Exchange) -> None:
        decode_query(NoQuery, exchange.scope)
        known = await self._named(exchange)
        deliveries = await store_reached(self._store.deliveries(known.id, MOST_DELIVERIES))
        shown = await self._with_counts(known)
        await exchange.reply_json({**shown, "deliveries": [delivery.shown() for delivery in deliveries]})

    async def change_webhook(self, exchange: Exchange) -> None:
        asked = decode(_change, await exchange.body(self._limit))
        known = await self._named(exchange)
        if asked.disabled != bool(known.disabled_at):
            changes: dict[str, Any] = {"disabled_at": self._store.clock() if asked.disabled else 0.0}
            if not await store_reached(self._store.change(known.id, changes)):
                raise unknown_endpoint(known.id)
            known = msgspec.structs.replace(known, **changes)
        await exchange.reply_json(await self._with_counts(known))

    async def delete_webhook(self, exchange: Exchange) -> None:
        decode_query(NoQuery, exchange.scope)
        known = await self._named(exchange)
        await store_reached(self._store.delete(known.id))
        await exchange.reply_json({"id": known.id, "object": "webhook_endpoint.deleted", "deleted": True})

    async def test_webhook(self, exchange: Exchange) -> None:
        """Sends an example, also to an endpoint that is disabled: that is how to find out whether it works again."""
        asked = decode(_test, await exchange.body(self._limit) or b"{}")
        known = await self._named(exchange)
        type = asked.event_type or known.event_types.strip("|").split("|")[0]
        async with self._tests.slot(known.tenant):
            status = await send_example(self._client, known, type, self._store.clock())
        result = {"object": "webhook_endpoint.test", "webhook_endpoint_id": known.id, "event_type": type}
        await exchange.reply_json({**result, "status_code": status, "success": 200 <= status < 300})

    async def resend_webhook(self, exchange: Exchange) -> None:
        asked = decode(_resend, await exchange.body(self._limit) or b"{}")
        known = await self._named(exchange)
        if known.disabled_at:
            raise InvalidRequest(
                "This endpoint is disabled, so nothing is sent to it; enable it first.", code="webhook_disabled"
            )
        event = None if asked.event is None else asked.event.replace("\0", "")
        count = await store_reached(self._store.send_again(known.id, event))
        if event is not None and not count:
            raise NotFound(f"There is no event `{event[:128]}` that this endpoint was not told of.")
        await exchange.reply_json({"id": known.id, "object": "webhook_endpoint.resent", "deliveries": count})

    async def _with_counts(self, known: WebhookEndpoint) -> dict[str, Any]:
        return _shown(known, (await store_reached(self._store.outstanding([known.id]))).get(known.id))

    async def _named(self, exchange: Exchange) -> WebhookEndpoint:
        return await self._found(exchange.path.split("/")[4])

    async def _found(self, id: str) -> WebhookEndpoint:
        found = None if "\0" in id else await store_reached(self._store.get(id, None))
        if found is None:
            raise unknown_endpoint(id)
        return found


def _shown(one: WebhookEndpoint, outstanding: Outstanding | None) -> dict[str, Any]:
    left = outstanding or Outstanding()
    return {
        **one.shown(),
        "tenant": one.tenant,
        "user": one.user_id or None,
        "state": one.state,
        "disabled_at": int(one.disabled_at) or None,
        "last_attempt_at": int(one.tried_at) or None,
        "last_delivery_at": int(one.delivered_at) or None,
        "last_problem": one.problem or None,
        "failures": one.failures,
        "waiting": left.waiting,
        "given_up": left.given_up,
    }
