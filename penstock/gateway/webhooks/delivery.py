"""Makes the deliveries of the outbox: signed POST requests to endpoints of tenants, tried again with longer and longer
pauses until one is answered with 2xx or `retry_s` have passed.

URLs come from tenants: connections are made to public addresses and configured networks only, redirects are not
followed, and nothing of a reply is read but its status. A place that becomes free goes first to a tenant that has none,
then to an endpoint that has none: who has slow endpoints holds up its own deliveries.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from contextlib import suppress

import httpx

from penstock.config.webhooks import WebhooksConfig
from penstock.gateway.webhooks.signature import signed_headers
from penstock.gateway.webhooks.store import Delivery, WebhookEndpoint, WebhookStore
from penstock.storage import DatabaseError
from penstock.telemetry.exposition import MetricRegistry
from penstock.tools.execution import ToolError
from penstock.tools.execution.addresses import Addresses, PinnedTransport, no_cookies

log = logging.getLogger(__name__)

AT_ONCE = 64
OF_A_TENANT = 4
TO_AN_ENDPOINT = 2
POLL_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 6 * 3600.0
USER_AGENT = "Penstock-Webhooks"


class Unreachable(Exception):
    """There was no reply; the reason is for the owner of the endpoint."""


class WebhookClient:
    """Sends one request."""

    def __init__(self, config: WebhooksConfig) -> None:
        self.addresses = Addresses(config.networks, setting="webhooks.networks")
        self._plain_http = config.plain_http
        self._timeout_s = config.timeout_s
        # Connections are not kept: those of different names at one address must not be mixed up.
        self._client = httpx.AsyncClient(
            transport=PinnedTransport(self.addresses, keep_alive=False),
            trust_env=False,
            timeout=config.timeout_s,
            cookies=no_cookies(),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def post(self, endpoint: WebhookEndpoint, id: str, body: bytes, now: float) -> int:
        """The status of the reply."""
        if not self._plain_http and not endpoint.url.lower().startswith("https:"):
            raise Unreachable("its URL does not begin with https:// (`webhooks.plain_http`)")
        headers = {
            "content-type": "application/json",
            "user-agent": USER_AGENT,
            **signed_headers(id, int(now), body, endpoint.secrets(now)),
        }
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.stream("POST", endpoint.url, content=body, headers=headers) as reply,
            ):
                return reply.status_code
        except ToolError as error:
            raise Unreachable(str(error)) from error
        except TimeoutError as error:
            raise Unreachable(f"no reply within {self._timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, OSError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}"[:256]) from error


class WebhookDeliveries:
    """Every gateway process makes deliveries; leases keep them from making the same one."""

    def __init__(
        self, store: WebhookStore, client: WebhookClient, config: WebhooksConfig, metrics: MetricRegistry
    ) -> None:
        self._store = store
        self._client = client
        self._retry_s = config.retry_s
        self._lease_s = config.timeout_s + 30.0
        self._task: asyncio.Task[None] | None = None
        self._running: dict[asyncio.Task[None], Delivery] = {}
        self._outcomes = metrics.counter(
            "penstock_webhook_deliveries_total",
            "Deliveries of webhooks: delivered, failed (tried again later), given_up, or dropped (too many waited).",
            ("outcome",),
        )

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="webhook deliveries")

    async def close(self) -> None:
        """What is being delivered is interrupted, and due again at once: at another gateway, or after a restart."""
        tasks = [*self._running, *([self._task] if self._task is not None else [])]
        interrupted = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for delivery in interrupted:
            with suppress(DatabaseError):
                await self._store.again(delivery, 0.0, counted=False)

    async def _run(self) -> None:
        look_at = 0.0
        while True:
            try:
                await self._begin_due()
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + POLL_S
                    await self._tell_dropped()
            except DatabaseError as error:
                log.warning("cannot read the deliveries of webhooks: %s", error)
            except Exception:  # without this task nothing would be delivered any more
                log.exception("the deliveries of webhooks failed, and go on")
            if self._running:  # a place may become free before the next look
                await asyncio.wait(self._running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(POLL_S)

    async def _begin_due(self) -> None:
        while len(self._running) < AT_ONCE:
            claimed = await self._next()
            if claimed is None:
                return
            task = asyncio.create_task(self._deliver(*claimed), name=f"webhook {claimed[0].event}")
            self._running[task] = claimed[0]
            task.add_done_callback(lambda done: self._running.pop(done, None))

    async def _next(self) -> tuple[Delivery, WebhookEndpoint | None] | None:
        tenants = Counter(delivery.tenant for delivery in self._running.values())
        endpoints = Counter(delivery.endpoint for delivery in self._running.values())
        full = [tenant for tenant, count in tenants.items() if count >= OF_A_TENANT]
        busy = [endpoint for endpoint, count in endpoints.items() if count >= TO_AN_ENDPOINT]
        if not tenants:
            return await self._store.claim(self._lease_s)
        return (
            await self._store.claim(self._lease_s, not_of=list(tenants))
            or await self._store.claim(self._lease_s, not_of=full, not_to=list(endpoints))
            or await self._store.claim(self._lease_s, not_of=full, not_to=busy)
        )

    async def _tell_dropped(self) -> None:
        for dropped in await self._store.dropped():
            self._outcomes.child("dropped").inc(dropped.events)
            log.warning(
                "webhooks were dropped: too many deliveries to their endpoint are waiting "
                "(`webhooks.waiting_per_endpoint`)",
                extra={"endpoint": dropped.endpoint, "tenant": dropped.tenant, "events": dropped.events},
            )

    async def _deliver(self, delivery: Delivery, endpoint: WebhookEndpoint | None) -> None:
        try:
            if endpoint is None:  # deleted meanwhile
                await self._store.made(delivery)
                return
            try:
                status = await self._client.post(endpoint, delivery.event, delivery.body(), self._store.clock())
                why = "" if 200 <= status < 300 else f"status {status}"
            except Unreachable as error:
                why = str(error)
            except Exception as error:  # a fault here, but no reason to try for ever
                log.exception("a webhook failed", extra={"event": delivery.event})
                why = type(error).__name__
            about = {"endpoint": delivery.endpoint, "event": delivery.event, "tenant": delivery.tenant, "why": why}
            pause = pause_s(delivery.attempts + 1)
            if not why:
                await self._store.made(delivery)
                self._outcomes.child("delivered").inc()
            elif self._store.clock() + pause > delivery.created_at + self._retry_s:
                log.warning("a webhook was given up", extra=about)
                await self._store.give_up(delivery)
                self._outcomes.child("given_up").inc()
            else:
                log.info("a webhook could not be delivered; it is tried again", extra={**about, "after_s": pause})
                await self._store.again(delivery, pause)
                self._outcomes.child("failed").inc()
            await self._store.tried(endpoint.id, why)  # last: what has arrived is not sent again for want of this note
        except DatabaseError as error:  # its lease expires, and it is delivered once more
            log.warning("the outcome of a webhook could not be stored: %s", error, extra={"event": delivery.event})
        except Exception:
            log.exception("a webhook failed", extra={"event": delivery.event})


def pause_s(attempts: int) -> float:
    """Between an attempt and the next: 5 s, 20 s, 80 s, ... up to six hours, give or take a tenth."""
    pause: float = min(FIRST_PAUSE_S * 4.0 ** min(attempts - 1, 10), LONGEST_PAUSE_S)
    return pause * random.uniform(0.9, 1.1)
