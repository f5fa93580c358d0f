"""An event outlives `kill -9` of the gateway that recorded it (real processes, one database)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.drill import drill
from tests.e2e.test_background_takeover import begun, sdk, status
from tests.gateway.conftest import eventually
from tests.gateway.webhooks.test_webhooks import Receiver

pytestmark = pytest.mark.slow
SETTINGS = "webhooks: {enabled: true, plain_http: true, networks: [127.0.0.0/8]}\n"


async def test_an_event_is_delivered_after_its_gateway_was_killed(tmp_path: Path) -> None:
    receiver = Receiver()
    try:
        with drill(tmp_path, SETTINGS) as running:
            client = sdk(running.url)
            hook = await client.webhooks.create(
                name="h", url=receiver.url, event_types=["response.completed", "response.incomplete"]
            )
            receiver.statuses = [500]
            id = (await begun(client, 20)).id
            await eventually(lambda: len(receiver.got) == 1)
            await asyncio.to_thread(running.kill_gateway)
            await asyncio.to_thread(running.ready)
            await eventually(lambda: len(receiver.got) == 2)
            (first, _), (headers, body) = receiver.got
            event = client.webhooks.unwrap(body, headers, secret=hook.signing_secret)
            assert event.data.id == id and headers["webhook-id"] == first["webhook-id"]  # type: ignore[union-attr]
            assert (await status(client, id, "completed", "incomplete")).id == id
    finally:
        receiver.close()
