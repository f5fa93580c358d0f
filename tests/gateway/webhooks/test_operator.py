"""What operators see of webhooks and do about them, over the admin API on a real gateway with a real receiver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config.webhooks import WebhooksConfig
from penstock.gateway.batches.store import BatchStore
from penstock.gateway.webhooks import store as store_module
from penstock.gateway.webhooks.delivery import WebhookClient, WebhookDeliveries
from penstock.gateway.webhooks.store import WebhookStore
from penstock.identity import IdentityStore
from penstock.storage import DatabaseError, open_database
from penstock.telemetry.exposition import MetricRegistry
from tests.gateway.conftest import Running, Serving, until
from tests.gateway.webhooks.test_webhooks import (
    LOCAL,
    Receiver,
    ended_batch,
    hook,
    impatient,
    outbox,
    receiver,
    settings,
    store_url,
)

__all__ = ["impatient", "receiver", "store_url"]

KEPT = 4


async def batch_ended(running: Running) -> str:
    """A batch of the tenant `acme` fails; returns its id."""
    assert running.parts.database is not None
    batches, store = BatchStore(running.parts.database), WebhookStore(running.parts.database, most_waiting=10)
    batches.announce = lambda event, id: store.event("batches", event, id)
    return await ended_batch(batches)


async def registered(running: Running, url: str, key: str = "") -> str:
    body = {"name": "Hook", "url": url, "event_types": ["batch.failed"]}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    reply = await running.client.post("/v1/webhook_endpoints", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


async def test_an_operator_finds_out_what_is_wrong_and_mends_it(
    serving: Serving, text: Any, tmp_path: Path, receiver: Receiver
) -> None:
    config = settings(tmp_path)
    database = await open_database(config["store_url"])
    identities = IdentityStore(database)
    await identities.prepare()
    await identities.create_tenant("acme")
    await identities.create_tenant("beta")
    key = (await identities.create_key("acme"))[1].text
    admin = (await identities.create_key("beta", scopes=("admin",)))[1].text
    await database.close()
    async with serving(**config) as running:
        headers = {"authorization": f"Bearer {admin}"}

        async def asked(method: str, path: str = "", body: Any = None, status: int = 200) -> Any:
            reply = await running.client.request(method, f"/v1/admin/webhooks{path}", json=body, headers=headers)
            assert reply.status_code == status, reply.text
            return reply.json()

        id = await registered(running, receiver.url, key)
        (one,) = (await asked("GET"))["data"]
        assert (one["id"], one["tenant"], one["state"], one["waiting"]) == (id, "acme", "unused", 0)
        assert "signing_secret" not in one and "secret" not in one
        assert one["last_delivery_at"] is one["last_problem"] is None
        refused = await running.client.get("/v1/admin/webhooks", headers={"authorization": f"Bearer {key}"})
        assert refused.status_code == 403
        for path, status in (("?tenant=beta", 200), ("?state=failing", 200), ("?state=odd", 400), ("/whe_none", 404)):
            found = await asked("GET", path, status=status)
            assert status != 200 or found["data"] == []

        # It fails for as long as it replies with errors, and the reason can be seen.
        receiver.statuses = [503] * 1_000_000
        subject = await batch_ended(running)
        one = await until(lambda: asked("GET", f"/{id}"), lambda found: found["failures"] >= 2)
        assert one["state"] == "failing" and one["last_problem"] == "status 503" and one["waiting"] == 1
        (waiting,) = one["deliveries"]
        assert waiting["data"] == {"id": subject} and waiting["status"] == "waiting" and waiting["attempts"] >= 1
        assert [found["id"] for found in (await asked("GET", "?state=failing"))["data"]] == [id]
        tested = await asked("POST", f"/{id}/test", {})
        assert tested["status_code"] == 503 and tested["success"] is False and tested["event_type"] == "batch.failed"

        # Disabled: nothing arrives any more, new events are not recorded, and the tenant sees it.
        assert (await asked("PATCH", f"/{id}", {"disabled": True}))["state"] == "disabled"
        assert (await asked("GET", "?state=disabled"))["data"][0]["disabled_at"] > 0
        mine = {"authorization": f"Bearer {key}"}
        shown = await running.client.get(f"/v1/webhook_endpoints/{id}", headers=mine)
        assert shown.json()["disabled"] is True and "state" not in shown.json()
        tried = await running.client.post(
            f"/v1/webhook_endpoints/{id}/test", json={"event_type": "batch.failed"}, headers=mine
        )
        assert tried.status_code == 400 and "disabled by an operator" in tried.json()["error"]["message"]
        await batch_ended(running)
        assert (await asked("GET", f"/{id}"))["waiting"] == 1
        refusal = await asked("POST", f"/{id}/resend", {}, status=400)
        assert refusal["error"]["code"] == "webhook_disabled" and "enable it first" in refusal["error"]["message"]
        receiver.statuses.clear()
        assert (await asked("POST", f"/{id}/test", {"event_type": "response.completed"}))["success"] is True

        # Enabled and sent again.
        assert (await asked("PATCH", f"/{id}", {"disabled": False}))["disabled"] is False
        await asked("POST", f"/{id}/resend", {"event": "evt_none"}, status=404)
        one = await until(lambda: asked("GET", f"/{id}"), lambda found: found["waiting"] == 0)
        one = await until(lambda: asked("GET", f"/{id}"), lambda found: found["state"] == "delivering")
        assert one["last_delivery_at"] and one["last_problem"] is None and one["failures"] == 0
        assert one["deliveries"] == []
        assert (await asked("DELETE", f"/{id}"))["deleted"] is True
        assert (await asked("GET"))["data"] == []


async def test_without_webhooks_there_is_nothing_to_see(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(tmp_path, WebhooksConfig())) as running:
        reply = await running.client.get("/v1/admin/webhooks")
        assert reply.status_code == 404 and "webhooks.enabled" in reply.json()["error"]["message"]


async def test_what_was_given_up_is_kept_and_sent_again(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "KEPT", KEPT)
    now = [1000.0]
    database, store, batches = await outbox(store_url, now, most=1)
    await store.add(hook(), 9)
    for _ in range(KEPT + 2):
        await ended_batch(batches)
        claimed = await store.claim(60.0)
        assert claimed is not None
        now[0] += 1
        await store.give_up(claimed[0])
    assert await store.claim(60.0) is None
    left = (await store.outstanding(["whe_1", "whe_none"]))["whe_1"]
    assert (left.waiting, left.given_up) == (0, KEPT)
    kept = await store.deliveries("whe_1", 1000)
    assert [one.created_at for one in kept] == [1000.0 + number for number in reversed(range(2, KEPT + 2))]
    assert await store.send_again("whe_1", kept[-1].event) == 1
    again = await store.claim(60.0)
    assert again is not None and again[0].event == kept[-1].event and again[0].attempts == 1
    # Asked for while it is being sent: it stays due, whatever comes of this attempt.
    assert await store.send_again("whe_1", again[0].event) == 1
    await store.give_up(again[0])
    assert await store.claim(60.0) is not None
    assert await store.send_again("whe_1") == KEPT
    # What one endpoint was not told of is no other's, and a disabled one is passed over.
    await store.add(msgspec.structs.replace(hook(), id="whe_2"), 9)
    assert await store.send_again("whe_2") == 0
    await store.change("whe_1", {"disabled_at": now[0]})
    assert await store.claim(60.0) is None
    await ended_batch(batches)
    claimed = await store.claim(60.0)
    assert claimed is not None and claimed[0].endpoint == "whe_2"
    assert await store.dropped() == [], "what a disabled endpoint misses is not dropped for want of room"
    await database.close()


async def test_what_was_given_up_is_not_read_to_find_what_is_due(tmp_path: Path) -> None:
    database, store, _ = await outbox(f"sqlite:///{tmp_path / 'x.db'}", [1000.0])
    asked: list[tuple[str, tuple[Any, ...]]] = []
    fetch = database.fetch

    async def noted(query: str, *values: Any) -> Any:
        asked.append((query, values))
        return await fetch(query, *values)

    database.fetch = noted  # type: ignore[method-assign, assignment]
    assert await store.claim(60.0) is None
    ((query, values),) = asked
    plan = str(await fetch(f"EXPLAIN QUERY PLAN {query}", *values))
    assert "webhook_deliveries_waiting" in plan, plan
    await database.close()


async def test_what_has_arrived_is_not_sent_again_for_want_of_a_note(tmp_path: Path, receiver: Receiver) -> None:
    database, store, batches = await outbox(f"sqlite:///{tmp_path / 'x.db'}", [1000.0])
    await store.add(hook(receiver.url), 1)
    await ended_batch(batches)
    claimed = await store.claim(60.0)
    assert claimed is not None

    async def away(*_: Any) -> None:
        raise DatabaseError("the store is away")

    store.tried = away  # type: ignore[method-assign, assignment]
    client = WebhookClient(LOCAL)
    await WebhookDeliveries(store, client, LOCAL, MetricRegistry())._deliver(*claimed)
    assert len(receiver.got) == 1 and await store.deliveries("whe_1", 10) == []
    await client.close()
    await database.close()


@pytest.mark.parametrize(
    ("about", "state"),
    [
        ({}, "unused"),
        ({"delivered_at": 5.0}, "delivering"),
        ({"delivered_at": 5.0, "failures": 1}, "failing"),
        ({"failures": 1, "disabled_at": 9.0}, "disabled"),
    ],
)
def test_states(about: dict[str, Any], state: str) -> None:
    assert msgspec.structs.replace(hook(), **about).state == state
