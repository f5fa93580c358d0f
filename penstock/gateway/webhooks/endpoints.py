"""/v1/webhook_endpoints as the OpenAI SDK has it: where a tenant wants to be told of events. The secret that signs
deliveries is shown when it is made, and never again."""

from __future__ import annotations

import ipaddress
import uuid
from collections.abc import Awaitable
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from penstock.config.webhooks import WebhooksConfig
from penstock.gateway.app.decoding import decode, decode_query
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.pagination import NoQuery, page
from penstock.gateway.app.store_access import store_of
from penstock.gateway.app.uploads import UploadSlots
from penstock.gateway.webhooks.delivery import Unreachable, WebhookClient
from penstock.gateway.webhooks.signature import new_secret
from penstock.gateway.webhooks.store import (
    EVENT_TYPES,
    OLD_SECRET_S,
    Delivery,
    EventType,
    WebhookEndpoint,
    WebhookStore,
    types_column,
)
from penstock.protocol.errors import InvalidRequest, NotFound

T = TypeVar("T")
TESTS_AT_ONCE, TESTS_OF_A_TENANT = 16, 2
EventTypes = Annotated[list[EventType], msgspec.Meta(min_length=1, max_length=64)]
EndpointName = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]
Url = Annotated[str, msgspec.Meta(min_length=1, max_length=2048)]


class WebhookEndpointRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """POST /v1/webhook_endpoints"""

    name: EndpointName
    url: Url
    event_types: EventTypes


class WebhookEndpointChange(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """POST /v1/webhook_endpoints/{webhook_endpoint}"""

    name: EndpointName | None = None
    url: Url | None = None
    event_types: EventTypes | None = None


class RotateSecretRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """POST /v1/webhook_endpoints/{webhook_endpoint}/rotate_secret"""

    keep_old_secret_active_for_24_hours: bool | None = None


class WebhookTestRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """POST /v1/webhook_endpoints/{webhook_endpoint}/test"""

    event_type: EventType


class WebhookEndpointsQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20


_create = msgspec.json.Decoder(WebhookEndpointRequest)
_change = msgspec.json.Decoder(WebhookEndpointChange)
_rotate = msgspec.json.Decoder(RotateSecretRequest)
_test = msgspec.json.Decoder(WebhookTestRequest)


class WebhookEndpoints:
    """The webhook endpoints of a tenant; with a user's key, those of that user."""

    def __init__(self, store: WebhookStore, client: WebhookClient, config: WebhooksConfig, body_limit: int) -> None:
        self._store = store
        self._client = client
        self._config = config
        self._limit = body_limit
        self._tests = UploadSlots(TESTS_AT_ONCE, TESTS_OF_A_TENANT)
        """So that examples leave connections for deliveries."""

    async def create_webhook_endpoint(self, exchange: Exchange) -> None:
        asked = decode(_create, await exchange.body(self._limit))
        self._check(asked.url)
        caller, now = exchange.caller, self._store.clock()
        made = WebhookEndpoint(
            f"whe_{uuid.uuid4().hex}", caller.tenant, caller.only_user or "", asked.name, asked.url,
            types_column(asked.event_types), new_secret(), "", 0.0, now, now,
        )  # fmt: skip
        if not await store_reached(self._store.add(made, self._config.per_tenant)):
            raise InvalidRequest(
                f"This tenant has {self._config.per_tenant} webhook endpoints, which is the limit "
                "(`webhooks.per_tenant`). Delete one.",
                code="too_many_webhook_endpoints",
            )
        await exchange.reply_json({**made.shown(), "signing_secret": made.secret})

    async def list_webhook_endpoints(self, exchange: Exchange) -> None:
        asked = decode_query(WebhookEndpointsQuery, exchange.scope)
        after = await self._found(exchange, asked.after) if asked.after else None
        caller = exchange.caller
        found = await store_reached(
            self._store.page(caller.tenant, caller.only_user, after=after, limit=asked.limit + 1)
        )
        await exchange.reply_json(page(found, asked.limit))

    async def get_webhook_endpoint(self, exchange: Exchange) -> None:
        decode_query(NoQuery, exchange.scope)
        await exchange.reply_json((await self._named(exchange)).shown())

    async def update_webhook_endpoint(self, exchange: Exchange) -> None:
        asked = decode(_change, await exchange.body(self._limit))
        if asked.url is not None:
            self._check(asked.url)
        known = await self._named(exchange)
        changes: dict[str, Any] = {"name": asked.name or known.name, "url": asked.url or known.url}
        if asked.event_types is not None:
            changes["event_types"] = types_column(asked.event_types)
        changes = {name: value for name, value in changes.items() if value != getattr(known, name)}
        changed = await self._changed(known, **changes) if changes else known
        await exchange.reply_json(changed.shown())

    async def delete_webhook_endpoint(self, exchange: Exchange) -> None:
        decode_query(NoQuery, exchange.scope)
        known = await self._named(exchange)
        await store_reached(self._store.delete(known.id))
        await exchange.reply_json({"id": known.id, "object": "webhook_endpoint.deleted", "deleted": True})

    async def rotate_webhook_secret(self, exchange: Exchange) -> None:
        asked = decode(_rotate, await exchange.body(self._limit) or b"{}")
        known, kept = await self._named(exchange), bool(asked.keep_old_secret_active_for_24_hours)
        changed = await self._changed(
            known,
            secret=new_secret(),
            old_secret=known.secret if kept else "",
            old_secret_until=self._store.clock() + OLD_SECRET_S if kept else 0.0,
        )
        await exchange.reply_json({**changed.shown(), "signing_secret": changed.secret})

    async def test_webhook_endpoint(self, exchange: Exchange) -> None:
        """Sends an example at once; it is not tried again."""
        asked = decode(_test, await exchange.body(self._limit))
        known = await self._named(exchange)
        if known.disabled_at:
            raise InvalidRequest(
                "This endpoint was disabled by an operator; nothing is sent to it.", code="webhook_disabled"
            )
        async with self._tests.slot(known.tenant):
            status = await send_example(self._client, known, asked.event_type, self._store.clock())
        result = {"object": "webhook_endpoint.test", "webhook_endpoint_id": known.id, "event_type": asked.event_type}
        await exchange.reply_json({**result, "status_code": status, "success": True})

    async def list_webhook_event_types(self, exchange: Exchange) -> None:
        decode_query(NoQuery, exchange.scope)
        await exchange.reply_json({"object": "list", "data": list(EVENT_TYPES)})

    def _check(self, url: str) -> None:
        """Refuses what can be told from the URL; addresses of names are checked whenever something is sent there."""
        schemes = ("https", "http") if self._config.plain_http else ("https",)
        try:
            parts = urlsplit(url)
            host, _ = httpx.URL(url).host, parts.port  # as the client that sends reads it
        except (ValueError, httpx.InvalidURL):
            host, parts = "", urlsplit("")
        if parts.scheme not in schemes or not host or not url.isprintable() or " " in url:
            raise InvalidRequest(
                f"`url` must begin with {' or '.join(f'{one}://' for one in schemes)} and have a valid host.",
                param="url",
            )
        if parts.username is not None or parts.password is not None:
            raise InvalidRequest("`url` must not contain a name or a password.", param="url")
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return
        if not self._client.addresses.allows(address):
            raise InvalidRequest(
                "`url` has a private address, to which nothing is sent from here (`webhooks.networks`).", param="url"
            )

    async def _changed(self, known: WebhookEndpoint, **changes: Any) -> WebhookEndpoint:
        changes["updated_at"] = self._store.clock()
        if not await store_reached(self._store.change(known.id, changes)):
            raise unknown_endpoint(known.id)  # deleted meanwhile
        return msgspec.structs.replace(known, **changes)

    async def _named(self, exchange: Exchange) -> WebhookEndpoint:
        return await self._found(exchange, exchange.path.split("/")[3])

    async def _found(self, exchange: Exchange, id: str) -> WebhookEndpoint:
        caller = exchange.caller
        found = None if "\0" in id else await store_reached(self._store.get(id, caller.tenant, caller.only_user))
        if found is None:
            raise unknown_endpoint(id)
        return found


async def send_example(client: WebhookClient, endpoint: WebhookEndpoint, type: str, now: float) -> int:
    """Sends an example of an event at once; returns the status that came back."""
    about = "batch_test" if type.startswith("batch.") else "resp_test"
    sample = Delivery(f"evt_{uuid.uuid4().hex}", endpoint.id, endpoint.tenant, type, about, now, now, 0)
    try:
        return await client.post(endpoint, sample.event, sample.body(), now)
    except Unreachable as error:
        raise InvalidRequest(f"The endpoint cannot be reached: {error}.", code="webhook_unreachable") from None


def unknown_endpoint(id: str) -> NotFound:
    return NotFound(f"There is no webhook endpoint `{id[:128]}`.")


async def store_reached(work: Awaitable[T]) -> T:
    with store_of("webhooks"):
        return await work
