"""Webhooks: registered, delivered and verified with the official SDK, on a real gateway and a real receiver."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from penstock.config.webhooks import WebhooksConfig
from penstock.gateway.batches.files import FileStore
from penstock.gateway.batches.store import BatchStore
from penstock.gateway.webhooks import delivery
from penstock.gateway.webhooks.delivery import Unreachable, WebhookClient, WebhookDeliveries, pause_s
from penstock.gateway.webhooks.signature import new_secret, signed_headers
from penstock.gateway.webhooks.store import EVENT_TYPES, WebhookEndpoint, WebhookStore, types_column
from penstock.identity import IdentityStore
from penstock.storage import Database, open_database
from penstock.telemetry.exposition import MetricRegistry
from tests.gateway.accounting.test_admission import held
from tests.gateway.api.test_background_responses import ended
from tests.gateway.batches.test_batches import client_of, jsonl, over
from tests.gateway.batches.test_batches import request as line
from tests.gateway.conftest import Serving, eventually, until
from tests.services import emptied

LOCAL = WebhooksConfig(enabled=True, networks=("127.0.0.0/8",), plain_http=True, timeout_s=5.0)


class Receiver:
    """A server that keeps what it is sent, and replies with the statuses it was given, then 200."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.got.append(({**self.headers, "path": self.path}, body))  # before its sender goes on
                status = receiver.statuses.pop(0) if receiver.statuses else 200
                self.send_response(status)
                if status == 302:
                    self.send_header("location", f"{receiver.url}/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def types(self) -> list[str]:
        return [json.loads(body)["type"] for _, body in self.got]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
async def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'x.db'}"
    url: str = request.getfixturevalue("postgres_url")
    await emptied(url)
    return url


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "POLL_S", 0.01)
    monkeypatch.setattr(delivery, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(delivery, "LONGEST_PAUSE_S", 0.01)


def settings(tmp_path: Path, config: WebhooksConfig = LOCAL) -> dict[str, Any]:
    return {"store_url": f"sqlite:///{tmp_path / 'x.db'}", "gateway_timeout_s": 5.0, "webhooks": config}


async def drained(database: Database | None) -> None:
    assert database is not None
    await until(lambda: database.fetch("SELECT 1 FROM webhook_deliveries"), lambda waiting: not waiting)


async def test_ends_of_responses_and_batches_are_told(
    serving: Serving, text: Any, tmp_path: Path, receiver: Receiver
) -> None:
    async with serving(held(text), **settings(tmp_path)) as running, client_of(running) as client:
        assert (await client.webhooks.event_types.list()).data == list(EVENT_TYPES)
        hook = await client.webhooks.create(name="All", url=f"{receiver.url}/hook", event_types=list(EVENT_TYPES))  # type: ignore[arg-type]
        assert hook.signing_secret.startswith("whsec_") and hook.event_types == list(EVENT_TYPES)
        receiver.statuses = [500, 302]
        begun = await client.responses.create(model="tiny", input="hi", background=True)
        cancelled = await client.responses.create(model="tiny", input="hi", background=True)
        await client.responses.cancel(cancelled.id)
        running.engine.hold = False
        await ended(running, begun.id)
        short = await client.responses.create(model="tiny", input="hi", background=True, max_output_tokens=2)
        await ended(running, short.id)
        file = await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
        good = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        wrong = await client.files.create(file=("in.jsonl", b"nonsense\n"), purpose="batch")
        bad = await client.batches.create(
            input_file_id=wrong.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        await over(client, good.id)
        await over(client, bad.id)
        await client.responses.create(model="tiny", input="hi")  # nobody need be told of what was waited for
        expected = {
            begun.id: "response.completed",
            cancelled.id: "response.cancelled",
            short.id: "response.incomplete",
            good.id: "batch.completed",
            bad.id: "batch.failed",
        }
        await eventually(lambda: len(receiver.got) >= 7)  # two of them came twice
        events = [client.webhooks.unwrap(body, headers, secret=hook.signing_secret) for headers, body in receiver.got]
        assert {event.data.id: event.type for event in events} == expected  # type: ignore[union-attr]
        assert len(events) == 7 and len({event.id for event in events}) == 5
        assert {headers["path"] for headers, _ in receiver.got} == {"/hook"}  # redirects are not followed
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(receiver.got[0][1], receiver.got[0][0], secret=new_secret())

        async def counted(outcome: str) -> float:
            return await running.metric(f'penstock_webhook_deliveries_total{{outcome="{outcome}"}}')

        assert await counted("failed") == 2
        await drained(running.parts.database)
        assert await counted("delivered") == 5


async def test_endpoints_are_managed(serving: Serving, tmp_path: Path, receiver: Receiver) -> None:
    async with serving(**settings(tmp_path)) as running, client_of(running) as client:
        hooks = client.webhooks
        made = [
            await hooks.create(name=f"hook {n}", url=receiver.url, event_types=["batch.completed"]) for n in range(3)
        ]
        assert [one.id async for one in hooks.list(limit=2)] == [one.id for one in reversed(made)]
        shown = await hooks.retrieve(made[0].id)
        assert shown.name == "hook 0" and made[0].signing_secret not in shown.to_json()
        assert shown.signing_secret_hint and made[0].signing_secret.endswith(shown.signing_secret_hint[-5:])
        changed = await hooks.update(made[0].id, event_types=["response.failed"], name="new")
        assert (changed.name, changed.event_types, changed.url) == ("new", ["response.failed"], receiver.url)
        # A test says how the endpoint replied; after a rotation both secrets sign for a day, if that is wanted.
        receiver.statuses = [503]
        result = await hooks.test(made[0].id, event_type="response.failed")
        assert (result.status_code, result.event_type, result.success) == (503, "response.failed", True)
        rotated = await hooks.rotate_secret(made[0].id, keep_old_secret_active_for_24_hours=True)
        await hooks.test(made[0].id, event_type="response.failed")
        headers, body = receiver.got[-1]
        for secret in (made[0].signing_secret, rotated.signing_secret):
            assert hooks.unwrap(body, headers, secret=secret).type == "response.failed"
        last = await hooks.rotate_secret(made[0].id)
        await hooks.test(made[0].id, event_type="response.failed")
        headers, body = receiver.got[-1]
        assert hooks.unwrap(body, headers, secret=last.signing_secret)
        with pytest.raises(openai.InvalidWebhookSignatureError):
            hooks.unwrap(body, headers, secret=rotated.signing_secret)
        assert (await hooks.delete(made[0].id)).deleted
        with pytest.raises(openai.NotFoundError):
            await hooks.retrieve(made[0].id)


REFUSED = {
    "http://example.org": "must begin with https://",
    "https://": "must begin with https://",
    "ftp://example.org": "must begin with https://",
    "https://example.org:x/": "must begin with https://",
    "https://a b/": "must begin with https://",
    "https://xn--/": "valid host",
    "https://ann:secret@example.org": "name or a password",
    "https://127.0.0.1/hook": "private address",
    "https://[::1]/hook": "private address",
    "https://[::ffff:10.0.0.1]/hook": "private address",
    "https://169.254.169.254/latest": "private address",
}


async def test_what_is_refused(serving: Serving, tmp_path: Path) -> None:
    config = WebhooksConfig(enabled=True, per_tenant=1)
    async with serving(**settings(tmp_path, config)) as running, client_of(running) as client:
        for url, why in REFUSED.items():
            with pytest.raises(openai.BadRequestError, match=why):
                await client.webhooks.create(name="a", url=url, event_types=["batch.completed"])
        made = await client.webhooks.create(name="a", url="https://a.org", event_types=["batch.completed"])
        with pytest.raises(openai.BadRequestError, match="private address"):
            await client.webhooks.update(made.id, url="https://10.0.0.1")
        with pytest.raises(openai.BadRequestError, match="event_types"):
            await client.webhooks.update(made.id, event_types=["video.completed"])
        with pytest.raises(openai.BadRequestError, match="which is the limit"):
            await client.webhooks.create(name="a", url="https://a.org", event_types=["batch.completed"])
    async with serving(**settings(tmp_path, WebhooksConfig())) as running, client_of(running) as client:
        with pytest.raises(openai.NotFoundError, match="sends no webhooks"):
            await client.webhooks.create(name="a", url="https://a.org", event_types=["batch.completed"])


async def test_a_name_with_a_private_address_is_never_connected_to(
    serving: Serving, tmp_path: Path, receiver: Receiver
) -> None:
    config = WebhooksConfig(enabled=True, plain_http=True)
    async with serving(**settings(tmp_path, config)) as running, client_of(running) as client:
        url = receiver.url.replace("127.0.0.1", "localhost")
        hook = await client.webhooks.create(name="a", url=url, event_types=["batch.completed"])
        with pytest.raises(openai.BadRequestError, match="private address"):
            await client.webhooks.test(hook.id, event_type="batch.completed")
        assert receiver.got == []


async def test_endpoints_belong_to_tenants_and_users(serving: Serving, tmp_path: Path, receiver: Receiver) -> None:
    database = await open_database(settings(tmp_path)["store_url"])
    identities = IdentityStore(database)
    await identities.prepare()
    await identities.create_tenant("acme")
    await identities.create_tenant("beta")
    owners = {"acme": ("acme", ""), "ann": ("acme", "ann"), "ben": ("acme", "ben"), "beta": ("beta", "")}
    keys = {name: (await identities.create_key(tenant, user=user))[1].text for name, (tenant, user) in owners.items()}
    await database.close()
    async with serving(**settings(tmp_path)) as running:
        made = {}
        for name, key in keys.items():
            async with client_of(running, key) as client:
                made[name] = await client.webhooks.create(
                    name=name, url=f"{receiver.url}/{name}", event_types=["response.completed"]
                )
        for name, seen in (("ann", {"ann"}), ("beta", {"beta"}), ("acme", {"acme", "ann", "ben"})):
            async with client_of(running, keys[name]) as client:
                assert {one.name async for one in client.webhooks.list()} == seen
                for other in made.keys() - seen:
                    id = made[other].id
                    for forbidden in (
                        client.webhooks.retrieve(id),
                        client.webhooks.update(id, name="mine"),
                        client.webhooks.rotate_secret(id),
                        client.webhooks.test(id, event_type="response.completed"),
                        client.webhooks.delete(id),
                    ):
                        with pytest.raises(openai.NotFoundError):
                            await forbidden
        async with client_of(running, keys["ann"]) as client:
            begun = await client.responses.create(model="tiny", input="hi", background=True)
        await eventually(lambda: len(receiver.got) >= 2)
        await drained(running.parts.database)
        assert sorted(headers["path"] for headers, _ in receiver.got) == ["/acme", "/ann"]
        assert {json.loads(body)["data"]["id"] for _, body in receiver.got} == {begun.id}


async def outbox(url: str, now: list[float], most: int = 100) -> tuple[Database, WebhookStore, BatchStore]:
    """A store in which ends of batches are recorded."""
    database = await open_database(url)
    batches, store = BatchStore(database), WebhookStore(database, most_waiting=most, clock=lambda: now[0])
    await FileStore(database, keep_s=60).prepare()
    await batches.prepare()
    await store.prepare()
    batches.announce = lambda event, id: store.event("batches", event, id)
    return database, store, batches


async def ended_batch(batches: BatchStore) -> str:
    batch = await batches.create(
        "acme", user="", key="", endpoint="/v1/completions", input_file_id="f", window="24h", window_s=9e4, metadata={}
    )
    assert await batches.claim("me", 60.0) is not None
    await batches.failed(batch.id, "me", [])
    return batch.id


def hook(url: str = "https://example.org", types: tuple[str, ...] = ("batch.failed",)) -> WebhookEndpoint:
    return WebhookEndpoint("whe_1", "acme", "", "n", url, types_column(types), new_secret(), "", 0.0, 0.0, 0.0)


async def test_a_delivery_outlives_who_began_it(store_url: str, receiver: Receiver) -> None:
    now = [1000.0]
    database, store, batches = await outbox(store_url, now)
    assert await store.add(hook(receiver.url), 1) and not await store.add(hook(), 1)
    id = await ended_batch(batches)
    claimed = await store.claim(60.0)
    assert claimed is not None and claimed[0].subject == id and claimed[0].type == "batch.failed"
    assert await store.claim(60.0) is None  # leased
    await database.close()  # its gateway was killed

    now[0] += 61.0
    database, store, batches = await outbox(store_url, now)
    client = WebhookClient(LOCAL)
    deliveries = WebhookDeliveries(store, client, LOCAL, MetricRegistry())
    deliveries.start()
    await eventually(lambda: bool(receiver.got))
    event = json.loads(receiver.got[0][1])
    assert event == {
        "id": claimed[0].event, "object": "event", "created_at": 1000, "type": "batch.failed", "data": {"id": id},
    }  # fmt: skip
    await drained(database)
    await deliveries.close()
    await client.close()
    await database.close()


async def test_deliveries_are_tried_again_and_given_up_after_a_while(store_url: str, receiver: Receiver) -> None:
    now = [1000.0]
    database, store, batches = await outbox(store_url, now)
    await store.add(hook(receiver.url), 1)
    await ended_batch(batches)
    receiver.statuses = [500, 404]
    client, metrics = WebhookClient(LOCAL), MetricRegistry()
    deliveries = WebhookDeliveries(store, client, WebhooksConfig(enabled=True, retry_s=10.0), metrics)
    for attempts in range(2):
        claimed = await store.claim(60.0)
        assert claimed is not None and claimed[0].attempts == attempts
        await deliveries._deliver(*claimed)
        now[0] += 9.9999
    assert await store.claim(60.0) is None
    (kept,) = await store.deliveries("whe_1", 10)
    assert kept.given_up_at == 1009.9999 and kept.attempts == 2 and kept.shown()["status"] == "given_up"
    assert [headers["webhook-timestamp"] for headers, _ in receiver.got] == ["1000", "1009"]
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    await client.close()
    await database.close()


async def test_the_outbox_is_bounded_and_only_takes_what_is_wanted(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    database, store, batches = await outbox(store_url, now, most=2)

    async def waiting() -> int:
        return len(await database.fetch("SELECT 1 FROM webhook_deliveries"))

    await ended_batch(batches)
    assert await waiting() == 0  # nobody wants to know
    await store.add(hook(types=("batch.completed",)), 9)
    await ended_batch(batches)
    assert await waiting() == 0
    known = await store.get("whe_1", "acme")
    assert known is not None
    await store.delete(known.id)
    await store.add(hook(), 9)
    for _ in range(4):
        await ended_batch(batches)
    assert await waiting() == 2
    # What was not recorded is counted, and told by one gateway; another endpoint has room of its own.
    await store.add(msgspec.structs.replace(hook(), id="whe_2"), 9)
    await ended_batch(batches)
    assert await waiting() == 3
    client, metrics = WebhookClient(LOCAL), MetricRegistry()
    deliveries = WebhookDeliveries(store, client, LOCAL, metrics)
    with caplog.at_level("WARNING"):
        await deliveries._tell_dropped()
        await deliveries._tell_dropped()
    assert 'penstock_webhook_deliveries_total{outcome="dropped"} 3' in metrics.render().decode()
    assert [(one.endpoint, one.events) for one in caplog.records if "dropped" in one.message] == [("whe_1", 3)]  # type: ignore[attr-defined]
    await client.close()
    await store.delete("whe_2")
    claimed = await store.claim(60.0)
    assert claimed is not None and await store.claim(60.0, not_of=["acme"]) is None
    await store.again(claimed[0], 0.0, counted=False)
    again = await store.claim(60.0)
    assert again is not None and again[0].attempts == 0
    assert await batches.finish("batch_none", "me", "completed", output=None, errors=None, with_files=()) is False
    await store.delete("whe_1")
    assert await waiting() == 0
    await database.close()


class Silent(WebhookClient):
    """Endpoints that reply when the test says so."""

    def __init__(self) -> None:
        super().__init__(LOCAL)
        self.asked: dict[str, asyncio.Future[int]] = {}
        """By event."""

    async def post(self, endpoint: WebhookEndpoint, id: str, body: bytes, now: float) -> int:
        self.asked[id] = asyncio.get_running_loop().create_future()
        return await self.asked[id]


async def test_places_go_to_those_who_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "AT_ONCE", 4)
    now = [1000.0]
    database, store, _ = await outbox(f"sqlite:///{tmp_path / 'x.db'}", now)
    client = Silent()
    deliveries = WebhookDeliveries(store, client, LOCAL, MetricRegistry())

    async def events(tenant: str, endpoint: str, count: int) -> None:
        await store.add(msgspec.structs.replace(hook(), id=endpoint, tenant=tenant), 9)
        for number in range(count):
            now[0] += 1
            await database.execute(
                "INSERT INTO webhook_deliveries VALUES (?, ?, ?, 'batch.failed', 'b', ?, ?, 0, 0)",
                f"{endpoint}.{number}", endpoint, tenant, now[0], now[0],
            )  # fmt: skip

    async def begun() -> set[str]:
        await deliveries._begin_due()
        await eventually(lambda: len(client.asked) >= len(deliveries._running))
        return {one.event for one in deliveries._running.values()}

    async def replied(event: str) -> None:
        client.asked.pop(event).set_result(200)
        await eventually(lambda: event not in {one.event for one in deliveries._running.values()})

    await events("acme", "slow", 5)
    assert await begun() == {"slow.0", "slow.1"}  # no endpoint has all the places of its tenant
    await events("acme", "other", 5)
    assert await begun() == {"slow.0", "slow.1", "other.0", "other.1"}
    await events("beta", "late", 2)
    await replied("slow.0")
    assert await begun() == {"slow.1", "other.0", "other.1", "late.0"}  # though others have waited longer
    await replied("slow.1")
    await events("acme", "third", 1)
    assert await begun() == {"other.0", "other.1", "late.0", "slow.2"}
    await replied("other.0")
    assert await begun() == {"other.1", "late.0", "slow.2", "third.0"}
    await deliveries.close()
    await client.close()
    await database.close()


async def test_a_fault_is_an_attempt_too(tmp_path: Path, receiver: Receiver) -> None:
    """Whatever goes wrong with a delivery, it is not tried for ever."""
    now = [1000.0]
    database, store, batches = await outbox(f"sqlite:///{tmp_path / 'x.db'}", now)
    long = f"https://{'a' * 70}.example"  # no name can be that long
    await store.add(hook(long), 1)
    await ended_batch(batches)
    client = WebhookClient(LOCAL)
    claimed = await store.claim(60.0)
    assert claimed is not None and claimed[1] is not None
    with pytest.raises(Unreachable, match="cannot be found"):
        await client.post(claimed[1], "evt_1", b"{}", now[0])
    with pytest.raises(Unreachable, match="IDNA"):
        await client.post(hook("https://xn--/"), "evt_1", b"{}", now[0])
    with pytest.raises(Unreachable, match="plain_http"):  # which may have been on when it was registered
        await WebhookClient(WebhooksConfig(enabled=True)).post(hook(receiver.url), "evt_1", b"{}", now[0])

    async def broken(*_: Any) -> int:
        raise ZeroDivisionError

    client.post = broken  # type: ignore[method-assign, assignment]
    await WebhookDeliveries(store, client, LOCAL, MetricRegistry())._deliver(*claimed)
    assert await database.fetch("SELECT attempts FROM webhook_deliveries") == [(1,)]
    await client.close()
    await database.close()


async def test_a_change_leaves_what_it_does_not_name(store_url: str) -> None:
    database, store, _ = await outbox(store_url, [1000.0])
    await store.add(hook(), 1)
    assert await store.change("whe_1", {"secret": "new", "updated_at": 2.0})
    assert await store.change("whe_1", {"name": "other"})  # by somebody who read the endpoint before that
    known = await store.get("whe_1", "acme")
    assert known is not None and (known.secret, known.name, known.url) == ("new", "other", "https://example.org")
    assert not await store.change("whe_2", {"name": "other"})
    await database.close()


def test_pauses_grow_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "FIRST_PAUSE_S", 5.0)
    monkeypatch.setattr(delivery, "LONGEST_PAUSE_S", 21600.0)
    assert 4.5 <= pause_s(1) <= 5.5 and 72 <= pause_s(3) <= 88 and 19440 <= pause_s(1000) <= 23760


def test_signatures_are_those_of_the_standard() -> None:
    """The example of the specification of Standard Webhooks."""
    body = b'{"test": 2432232314}'
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    headers = signed_headers("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body, [secret])
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
