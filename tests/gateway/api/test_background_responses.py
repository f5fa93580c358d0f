"""`background: true` of responses: through the official SDK, over two gateways, through shutdown and loss."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from penstock.gateway.api.openai.responses import background
from penstock.gateway.api.openai.responses.background_run import BackgroundRun
from penstock.gateway.api.openai.responses.background_store import (
    GIVE_UP_S,
    RUN_EVENTS,
    UNFINISHED,
    BackgroundStore,
    TakenOver,
    Work,
    number_of,
    split_events,
)
from penstock.gateway.api.openai.responses.replay import encode_event
from penstock.gateway.api.openai.responses.store import ResponseStore
from penstock.gateway.app.authentication import OpenAuthentication
from penstock.gateway.app.memory_request import Reply
from penstock.gateway.generation.chat_messages import template_messages
from penstock.gateway.generation.schemas import ChatMessage
from penstock.identity import Caller
from penstock.protocol.errors import InvalidRequest, KeyStoreUnavailable
from penstock.storage import Database, DatabaseError, open_database
from penstock.text import TextModel
from tests.gateway.accounting.test_admission import held, one_at_a_time
from tests.gateway.accounting.test_quotas import sign_in
from tests.gateway.api.test_responses import create, prompt, sdk, stored
from tests.gateway.conftest import Running, Serving, eventually, until
from tests.gateway.process.test_request_log import read, settings
from tests.scripted import ScriptedEngine
from tests.services import emptied


async def ended(running: Running, id: str) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        return (await running.client.get(f"/v1/responses/{id}")).json()

    return await until(ask, lambda found: found["status"] not in ("queued", "in_progress"))


def numbers(events: list[Any]) -> list[int]:
    return [event.sequence_number for event in events]


async def test_a_response_is_polled(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(held(text), **settings(tmp_path)) as running:
        client = sdk(running)
        begun = await client.responses.create(model="tiny", input="hi", background=True, metadata={"a": "b"})
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        assert (await client.responses.retrieve(begun.id)).status == "queued"
        assert [item.id for item in (await client.responses.input_items.list(begun.id)).data]
        early = await create(running, previous_response_id=begun.id)
        assert early.status_code == 400 and "is `queued`" in early.json()["error"]["message"]
        running.engine.hold = False
        await ended(running, begun.id)
        found = await client.responses.retrieve(begun.id)
        assert (found.status, found.output_text, found.metadata) == ("completed", "Hello, world!", {"a": "b"})
        assert found.usage is not None and found.usage.output_tokens == 14 and found.background
        assert found.created_at == begun.created_at and found.output[0].id.startswith(f"msg_{found.id[5:]}")
        again = await client.responses.create(model="tiny", input="more", previous_response_id=found.id)
        assert again.output_text == "Hello, world!"
        assert (await client.responses.cancel(found.id)).status == "completed"

        # It was one request for the log and the ledger.
        async def logged() -> list[int]:
            return sorted(row["completion_tokens"] for row in await read(running) if row["route"] == "/v1/responses")

        assert await until(logged, lambda tokens: len(tokens) >= 3) == [0, 14, 14]
        (used,) = (await running.client.get("/v1/usage?by=model")).json()["data"]
        assert used["completion_tokens"] == 28
        # A stream of it can be read even though it was not asked for as one.
        events = [event async for event in await client.responses.retrieve(found.id, stream=True)]
        assert events[-1].type == "response.completed"


async def test_a_client_leaves_its_stream_and_comes_back(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(held(text), **stored(tmp_path)) as running:
        client = sdk(running)
        stream: Any = await client.responses.create(model="tiny", input="hi", background=True, stream=True)
        first = [await anext(stream), await anext(stream)]
        assert [event.type for event in first] == ["response.created", "response.queued"]
        await stream.close()
        id = first[0].response.id
        following: Any = await client.responses.retrieve(id, stream=True, starting_after=1)
        beginning: Any = await client.responses.retrieve(id, stream=True)
        (run,) = running.parts.background_responses._tasks  # type: ignore[union-attr]
        assert run.stored_events == 2 and not run.events  # what is stored needs no memory
        running.engine.hold = False
        rest = [event async for event in following]
        assert rest[0].type == "response.in_progress" and rest[-1].type == "response.completed"
        assert rest[-1].response.output_text == "Hello, world!"
        assert numbers(first + rest) == list(range(len(first + rest)))
        assert numbers([event async for event in beginning]) == numbers(first + rest)
        # The same events come from the store, from any of them on.
        for after in (None, 0, 7, len(rest)):
            asked = {} if after is None else {"starting_after": after}
            again = [event async for event in await client.responses.retrieve(id, stream=True, **asked)]  # type: ignore[call-overload]
            begin = 0 if after is None else after + 1
            assert [event.to_dict() for event in again] == [event.to_dict() for event in (first + rest)[begin:]]


async def test_a_response_is_cancelled(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(held(text), **stored(tmp_path)) as running:
        client = sdk(running)
        begun = await client.responses.create(model="tiny", input="hi", background=True)
        await eventually(lambda: bool(running.engine.seen))
        stopped = await client.responses.cancel(begun.id)
        assert (stopped.id, stopped.status) == (begun.id, "cancelled")
        await eventually(lambda: bool(running.engine.aborted))
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
        assert (await client.responses.retrieve(begun.id)).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="is `cancelled`"):
            await client.responses.create(model="tiny", input="x", previous_response_id=begun.id)
        deleted = await client.responses.create(model="tiny", input="hi", background=True, stream=False)
        await client.responses.delete(deleted.id)
        await eventually(lambda: len(running.engine.aborted) == 2)
        assert (await running.client.get(f"/v1/responses/{deleted.id}")).status_code == 404
        await eventually(lambda: not running.parts.background_responses._tasks)  # type: ignore[union-attr]


async def test_what_is_wrong_is_said_at_once(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(**stored(tmp_path)) as running:
        for body, status, param in (
            ({"store": False}, 400, "background"),
            ({"model": "other"}, 404, "model"),
            ({"input": "a" * 600}, 400, "input"),
            ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
            (
                {"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]},
                400,
                "tools[0].parameters",
            ),
        ):
            for stream in (False, True):
                refused = await create(running, background=True, stream=stream, **body)
                assert refused.status_code == status, refused.text
                assert refused.json()["error"]["param"] == param
                assert refused.headers["x-request-id"]
        resumed = await running.client.post(
            "/v1/responses",
            json={"model": "tiny", "input": "hi", "background": True, "stream": True},
            headers={"last-event-id": "new"},
        )
        assert resumed.status_code == 400 and not running.engine.seen
        whole = await create(running)
        assert (await running.client.post(f"/v1/responses/{whole.json()['id']}/cancel")).status_code == 400
        ignored = await create(running, background=True, client_metadata={"a": 1})
        assert ignored.headers["x-penstock-ignored"] == "client_metadata"
        await ended(running, ignored.json()["id"])
    async with serving() as running:
        assert (await create(running, background=True)).json()["error"]["param"] == "background"
    async with serving(**stored(tmp_path), background_per_tenant=0) as running:
        assert (await create(running, background=True)).json()["error"]["param"] == "background"


async def test_there_is_a_limit_per_tenant(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(held(text), **stored(tmp_path), background_per_tenant=2) as running:
        begun = [await create(running, background=True) for _ in range(2)]
        refused = await create(running, background=True)
        assert refused.status_code == 429 and refused.headers["retry-after"]
        assert "2 responses of yours" in refused.json()["error"]["message"]
        running.engine.hold = False
        for reply in begun:
            assert (await ended(running, reply.json()["id"]))["status"] == "completed"
        assert (await create(running, background=True)).status_code == 200


async def test_tenants_do_not_see_each_other(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(held(text), **stored(tmp_path)) as running:
        await sign_in(running, "acme")
        running.admin = running.client.headers["authorization"]  # type: ignore[attr-defined]
        id = (await create(running, background=True, stream=False)).json()["id"]
        await sign_in(running, "rival")
        at = f"/v1/responses/{id}"
        for reply in (
            await running.client.get(at),
            await running.client.get(at, params={"stream": "true"}),
            await running.client.post(f"{at}/cancel"),
            await running.client.delete(at),
        ):
            assert reply.status_code == 404
        running.client.headers["authorization"] = running.admin  # type: ignore[attr-defined]
        refused = await running.client.get(at, params={"stream": "true"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream"
        running.engine.hold = False
        assert (await ended(running, id))["status"] == "completed"


async def test_a_place_is_asked_for_again(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def pause(reply: Reply, attempt: int) -> float | None:
        asked.append(reply.status or 0)
        return 0.01 if reply.status == 503 else None

    monkeypatch.setattr(background, "_pause", pause)
    async with serving(held(text), **stored(tmp_path), admission=one_at_a_time(wait_s=0.05)) as running:
        begun = [(await create(running, background=True)).json() for _ in range(2)]
        ids = [response["id"] for response in begun]
        await eventually(lambda: len(asked) >= 3)
        assert set(asked) == {503}
        assert (await running.client.get(f"/v1/responses/{ids[1]}")).json()["status"] == "queued"
        running.engine.hold = False
        for response in begun:
            found = await ended(running, response["id"])
            assert (found["status"], found["created_at"]) == ("completed", response["created_at"])
            vote = {"response_id": found["id"], "rating": "up"}
            voted = await running.client.post("/v1/feedback", json=vote)
            assert voted.status_code == 200, voted.text


async def test_a_key_that_was_revoked_gets_no_place(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_pause", lambda reply, attempt: 0.05 if reply.status == 503 else None)
    one = one_at_a_time(wait_s=0.05)
    async with serving(held(text), **stored(tmp_path), admission=one, key_fresh_s=0.05) as running:
        await sign_in(running)
        await create(running, background=True)
        asked = {"tenant": "acme", "scopes": ["inference"]}
        key = (await running.client.post("/v1/admin/keys", json=asked)).json()["key"]
        waiting = await running.client.post(
            "/v1/responses",
            json={"model": "tiny", "input": "hi", "background": True},
            headers={"authorization": f"Bearer {key}"},
        )
        gone = await running.client.delete(f"/v1/admin/keys/{key.rpartition('_')[0]}")
        assert gone.status_code == 200, gone.text
        found = await ended(running, waiting.json()["id"])
        assert found["status"] == "failed" and "is revoked" in found["error"]["message"], found
        running.engine.hold = False


async def test_the_end_waits_for_the_store(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_end, failed = BackgroundStore.end, list[str]()

    async def end(self: BackgroundStore, id: str, *about: Any) -> bool:
        if not failed:
            failed.append(id)
            raise DatabaseError("away")
        return await store_end(self, id, *about)

    monkeypatch.setattr(BackgroundStore, "end", end)
    monkeypatch.setattr(background, "BEAT_S", 0.02)
    async with serving(**stored(tmp_path)) as running:
        id = (await create(running, background=True)).json()["id"]
        assert (await ended(running, id))["status"] == "completed" and failed == [id]


def charged(running: Running) -> Any:
    """What the ledger has of responses: how many charges, how many tokens."""

    async def ask() -> tuple[int, int]:
        data = (await running.client.get("/v1/usage?by=model")).json()["data"]
        return sum(row["requests"] for row in data), sum(row["completion_tokens"] for row in data)

    return ask


async def test_what_a_shutdown_interrupts_goes_on_at_the_next_start(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    async with serving(held(text), **stored(tmp_path), drain_s=0.05) as running:
        ids = [(await create(running, background=True, stream=False)).json()["id"] for _ in range(2)]
        client = sdk(running)
        stream: Any = await client.responses.create(model="tiny", input="hi", background=True, stream=True)
        ids.append((await anext(stream)).response.id)
        await eventually(lambda: len(running.engine.seen) == 3)
        running.stop.set()
        with suppress(httpx.HTTPError, openai.APIError):  # a busy machine may cut the connection first
            async for event in stream:
                assert event.type in ("response.queued", "response.in_progress")
    async with serving(**stored(tmp_path)) as running:  # at once, though leases last for 20 s
        for id in ids:
            found = await ended(running, id)
            assert found["status"] == "completed" and found["output"][0]["content"][0]["text"] == "Hello, world!"
        assert await running.metric("penstock_background_takeovers_total") == 3
        events = [event async for event in await sdk(running).responses.retrieve(ids[2], stream=True)]
        assert [event.type for event in events].count("response.queued") == 2 and events[
            -1
        ].type == "response.completed"
        assert await until(charged(running), lambda usage: usage[0] >= 3) == (3, 3 * 14)


async def test_what_was_generated_half_is_billed_once(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    slow = ScriptedEngine(text, lambda request: [ord("a")] * 400, step_s=0.01)
    async with serving(slow, **settings(tmp_path), drain_s=0.05) as running:
        stream: Any = await sdk(running).responses.create(
            model="tiny", input="hi", background=True, stream=True, max_output_tokens=400
        )
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        id, seen = event.item_id, event.sequence_number
        running.stop.set()
    async with serving(**settings(tmp_path)) as running:
        (response,) = await running.parts.database.fetch("SELECT id FROM responses")  # type: ignore[union-attr]
        found = await ended(running, response[0])
        assert found["status"] == "completed" and found["output"][0]["id"] == id
        # A client that comes back gets the whole new answer, and knows that it begins again.
        rest = [e async for e in await sdk(running).responses.retrieve(found["id"], stream=True, starting_after=seen)]
        again = next(at for at, event in enumerate(rest) if event.type == "response.queued")
        assert [event.type for event in rest[again : again + 2]] == ["response.queued", "response.in_progress"]
        said = [event.delta for event in rest[again:] if event.type == "response.output_text.delta"]
        assert "".join(said) == "Hello, world!" == rest[-1].response.output_text  # type: ignore[union-attr]
        assert numbers(rest[again:]) == list(range(RUN_EVENTS, RUN_EVENTS + len(rest) - again))
        assert await until(charged(running), lambda usage: usage[0] >= 1) == (1, 14)
        vote = {"response_id": found["id"], "rating": "up"}
        assert (await running.client.post("/v1/feedback", json=vote)).status_code == 200


async def test_leases_are_kept_whatever_happens(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wrong(self: BackgroundStore, *about: Any, **more: Any) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(BackgroundStore, "take_over", wrong)
    monkeypatch.setattr(background, "BEAT_S", 0.02)
    async with serving(held(text), **stored(tmp_path), gateway_timeout_s=0.4) as running:
        id = (await create(running, background=True)).json()["id"]
        await asyncio.sleep(0.8)
        assert await running.parts.database.fetch("SELECT 1 FROM responses WHERE leased_until > ?", time.time())  # type: ignore[union-attr]
        running.engine.hold = False
        assert (await ended(running, id))["status"] == "completed"


async def test_a_shutdown_waits_for_ends_that_are_being_stored(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_end, closing = BackgroundStore.end, asyncio.Event()
    close = background.BackgroundResponses.close

    async def slowly(self: BackgroundStore, *about: Any) -> bool:
        await closing.wait()  # the drain is over before the first of them is written
        await asyncio.sleep(0)
        return await store_end(self, *about)

    async def told(self: background.BackgroundResponses) -> None:
        asyncio.get_running_loop().call_later(0.05, closing.set)
        await close(self)

    monkeypatch.setattr(BackgroundStore, "end", slowly)
    monkeypatch.setattr(background.BackgroundResponses, "close", told)
    async with serving(**stored(tmp_path), drain_s=0.05) as running:
        ids = [(await create(running, background=True)).json()["id"] for _ in range(3)]
        await eventually(lambda: all(run.ended for run in running.parts.background_responses._tasks))  # type: ignore[union-attr]
    async with serving(**stored(tmp_path), background_per_tenant=0) as running:
        for id in ids:
            assert (await running.client.get(f"/v1/responses/{id}")).json()["status"] == "completed"


async def test_what_waits_for_a_place_at_a_shutdown_is_handed_over(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []

    def pause(reply: Reply, attempt: int) -> float | None:
        refused.append(reply.status or 0)
        return 300.0 if reply.status == 503 else None

    monkeypatch.setattr(background, "_pause", pause)
    one = one_at_a_time(wait_s=0.05)
    async with serving(held(text), **stored(tmp_path), drain_s=30.0, admission=one) as running:
        runs, waiting = [(await create(running, background=True)).json()["id"] for _ in range(2)]
        try:
            await eventually(lambda: refused == [503])
            running.stop.set()
            await eventually(lambda: running.parts.drain.active)
        finally:
            running.engine.hold = False
    async with serving(**stored(tmp_path)) as running:
        assert (await running.client.get(f"/v1/responses/{runs}")).json()["status"] == "completed"
        assert (await ended(running, waiting))["status"] == "completed"
        assert len(running.engine.seen) == 1


async def test_what_is_taken_over_obeys_its_key_and_its_limits(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    """A key that was revoked meanwhile, and a tenant that has as many as it may."""
    options = {**stored(tmp_path), "key_fresh_s": 0.05, "drain_s": 0.05}
    async with serving(held(text), **options) as running:
        await sign_in(running)
        admin = running.client.headers["authorization"]
        kept = [(await create(running, background=True)).json()["id"] for _ in range(3)]
        key = (await running.client.post("/v1/admin/keys", json={"tenant": "acme", "scopes": ["inference"]})).json()[
            "key"
        ]
        lost = await running.client.post(
            "/v1/responses",
            json={"model": "tiny", "input": "hi", "background": True},
            headers={"authorization": f"Bearer {key}"},
        )
        await running.client.delete(f"/v1/admin/keys/{key.rpartition('_')[0]}")
    async with serving(held(text), **options, background_per_tenant=2) as running:
        running.client.headers["authorization"] = admin
        await eventually(lambda: len(running.engine.seen) == 2)
        running.engine.hold = False
        for id in kept:
            assert (await ended(running, id))["status"] == "completed"
        found = await ended(running, lost.json()["id"])
        assert found["status"] == "failed" and "is revoked" in found["error"]["message"], found
        assert len(running.engine.seen) == 3


async def test_a_slow_gateway_finds_that_another_has_taken_over(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    async with serving(held(text), **settings(tmp_path), gateway_timeout_s=2.0) as slow:
        stream: Any = await sdk(slow).responses.create(model="tiny", input="hi", background=True, stream=True)
        id = (await anext(stream)).response.id
        await eventually(lambda: bool(slow.engine.seen))
        assert slow.parts.database is not None and slow.parts.background_responses is not None
        slow.parts.background_responses._most = 0  # too slow to take anything over
        await slow.parts.database.execute("UPDATE responses SET owner = 'somebody'")
        async with serving(held(text), **settings(tmp_path), gateway_timeout_s=2.0) as other:
            # It stops at once, which is neither an end nor billed, and its readers follow the other's events.
            await eventually(lambda: bool(slow.engine.aborted))
            await slow.parts.database.execute("UPDATE responses SET leased_until = ?", time.time())
            await eventually(lambda: bool(other.engine.seen))
            assert (await slow.client.get(f"/v1/responses/{id}")).json()["status"] == "queued"
            other.engine.hold = False
            events = [event async for event in stream]
            assert events[-1].type == "response.completed" and events[-1].sequence_number > RUN_EVENTS
            assert await until(charged(other), lambda usage: usage[0] >= 1) == (1, 14)


async def test_what_a_client_ended_is_billed_and_what_another_gateway_may_have_ended_is_not(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "BEAT_S", 0.1)
    slow = ScriptedEngine(text, lambda request: [ord("a")] * 400, step_s=0.01)
    async with serving(slow, **settings(tmp_path)) as running:
        assert running.parts.database is not None and running.parts.background_responses is not None
        tasks = running.parts.background_responses._tasks
        for late in (True, False):
            stream: Any = await sdk(running).responses.create(
                model="tiny", input="hi", background=True, stream=True, max_output_tokens=400
            )
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
            (run,) = tasks
            if late:  # this process stood still for longer than its lease
                run.leased_until = time.monotonic() - 1.0
            await running.parts.database.execute("UPDATE responses SET owner = ''")
            await eventually(lambda: not tasks)
            assert run.goes_on is late and len(slow.aborted) == (1 if late else 2)
        charges, tokens = await until(charged(running), lambda usage: usage[0] >= 1)
        assert charges == 1 and 0 < tokens < 400


@pytest.mark.parametrize("lost", [False, True])
async def test_a_turn_is_stored_by_the_gateway_that_ends_the_response(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    async def notice_nothing(self: background.BackgroundResponses, runs: Any) -> None:
        """The end comes first."""

    monkeypatch.setattr(background.BackgroundResponses, "_store_news", notice_nothing)
    async with serving(held(text), **stored(tmp_path)) as running:
        id = (await create(running, background=True, conversation="trip")).json()["id"]
        await eventually(lambda: bool(running.engine.seen))
        assert running.parts.database is not None and running.parts.background_responses is not None
        if lost:
            await running.parts.database.execute("UPDATE responses SET owner = 'other', leased_until = 1e12")
        running.engine.hold = False
        await eventually(lambda: not running.parts.background_responses._tasks)  # type: ignore[union-attr]
        assert ((await running.client.get(f"/v1/responses/{id}")).json()["status"] == "completed") is not lost
        await create(running, conversation="trip")
        assert ("Hello, world!" in prompt(running, text)) is not lost


async def test_leases_are_renewed_between_takeovers(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where keys cannot be looked up, so that nothing can be taken over."""
    async with serving(held(text), **stored(tmp_path), drain_s=0.05) as running:
        lost = [(await create(running, background=True)).json()["id"] for _ in range(5)]
    calls: list[str] = []
    take_over, keep = BackgroundStore.take_over, BackgroundStore.keep

    async def taking(self: BackgroundStore, *about: Any, **more: Any) -> TakenOver | None:
        calls.append("take over")
        return await take_over(self, *about, **more)

    async def keeping(self: BackgroundStore, *about: Any) -> dict[str, str]:
        calls.append("keep")
        return await keep(self, *about)

    holder, away = OpenAuthentication.holder, [True]

    async def holding(self: OpenAuthentication, tenant: str, key: str) -> Caller:
        if away[0]:
            raise KeyStoreUnavailable
        return await holder(self, tenant, key)

    monkeypatch.setattr(BackgroundStore, "take_over", taking)
    monkeypatch.setattr(BackgroundStore, "keep", keeping)
    monkeypatch.setattr(background, "TAKEN_AT_ONCE", 2)
    monkeypatch.setattr(background, "BEAT_S", 0.05)
    monkeypatch.setattr(OpenAuthentication, "holder", holding)
    async with serving(held(text), **stored(tmp_path), gateway_timeout_s=0.8) as running:
        await eventually(lambda: bool(calls))
        own = (await create(running, background=True)).json()["id"]
        await asyncio.sleep(0.6)
        assert "keep" in calls and calls.count("take over") < 30, calls
        assert len(running.engine.seen) == 1
        away[0] = False
        calls.clear()
        assert running.parts.background_responses is not None
        tasks = running.parts.background_responses._tasks
        await eventually(lambda: len(tasks) == 6)
        runs = [len(run) for run in " ".join(calls).replace("take over", "t").replace(" ", "").split("keep")]
        assert max(runs) <= 2, calls
        running.engine.hold = False
        for id in (own, *lost):
            assert (await ended(running, id))["status"] == "completed"


async def test_another_gateway_shows_follows_and_cancels(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(held(text), **stored(tmp_path)) as one, serving(**stored(tmp_path)) as other:
        kept = (await create(one, background=True)).json()["id"]
        assert (await other.client.get(f"/v1/responses/{kept}")).json()["status"] == "queued"
        first: Any = await sdk(one).responses.create(model="tiny", input="hi", background=True, stream=True)
        followed = (await anext(first)).response.id
        cancelled = (await create(one, background=True)).json()["id"]
        await eventually(lambda: len(one.engine.seen) == 3)
        assert (await other.client.post(f"/v1/responses/{cancelled}/cancel")).json()["status"] == "cancelled"
        await eventually(lambda: len(one.engine.aborted) == 1)
        following: Any = await sdk(other).responses.retrieve(followed, stream=True)
        seen = [await anext(following), await anext(following)]
        one.engine.hold = False
        seen += [event async for event in following]
        assert numbers(seen) == list(range(len(seen))) and seen[-1].type == "response.completed"
        assert (await ended(other, kept))["status"] == "completed"
        assert (await ended(one, cancelled))["status"] == "cancelled"


@asynccontextmanager
async def kept(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    """An empty database."""
    url = f"sqlite:///{tmp_path / 'state.db'}"
    if kind == "postgres":
        url = request.getfixturevalue("postgres_url")
        await emptied(url)
    database = await open_database(url)
    try:
        yield database
    finally:
        await database.close()


ASKED = Work("/v1/responses", '{"input": "hi"}', [("x-feature", "f")], "t", "k", False)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_response_is_taken_over_a_few_times(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    now = [1000.0]
    async with kept(tmp_path, kind, request) as database:
        store = ResponseStore(database, keep_s=1e6, most=10, clock=lambda: now[0])
        await store.prepare()
        begun, take_over = store.background, store.background.take_over

        async def shown(id: str) -> dict[str, Any]:
            found: dict[str, Any] = json.loads(await store.response(id, "t") or b"")
            return found

        response = {"id": "resp_1", "model": "m", "status": "in_progress", "background": True}
        about: Any = {"tenant": "t", "user": "", "response": json.dumps(response).encode(), "items": []}
        await begun.begin("resp_1", "one", 20.0, events=b"", work=ASKED, **about)
        assert await begun.running("resp_1") and await store.conversation("resp_1", "t") is None
        now[0] += 15.0
        assert await begun.keep("one", 20.0, ["resp_1"], [], []) == {"resp_1": "one"}
        now[0] += 15.0
        assert await take_over("two", 20.0) is None
        now[0] += 10.0
        # Its owner is dead. Readers wait, and one gateway takes it over, unless its tenant has too many there.
        assert await begun.running("resp_1") and (await shown("resp_1"))["status"] == "in_progress"
        assert await take_over("two", 20.0, not_of=["t"]) is None
        found = await take_over("two", 20.0)
        assert found is not None and (found.id, found.work, found.first_event) == ("resp_1", ASKED, 0)
        assert await take_over("three", 20.0) is None and (await shown("resp_1"))["status"] == "queued"
        # The owner before was only slow: nothing that it writes counts.
        assert await begun.keep("one", 20.0, ["resp_1"], [("resp_1", b"{}")], []) == {"resp_1": "two"}
        assert not await begun.end("resp_1", "one", b"{}", [])
        # Handing over costs no attempt; dying does, and the third time is the last.
        await begun.release("resp_1", "two")
        assert await take_over("three", 20.0) is not None
        now[0] += 20.0
        assert await take_over("four", 20.0) is not None
        now[0] += 20.0
        assert await take_over("five", 20.0) is None
        failed = await shown("resp_1")
        assert failed["status"] == "failed" and "3 times" in failed["error"]["message"]
        assert not await begun.running("resp_1") and not await begun.end("resp_1", "four", b"{}", [])
        # What no gateway wants for a day is given up; so is what an earlier version has begun.
        await begun.begin("resp_2", "one", 20.0, events=b"", work=ASKED, **about)
        now[0] += GIVE_UP_S + 21.0
        assert "within a day" in (await shown("resp_2"))["error"]["message"]
        await begun.begin("resp_3", "one", 20.0, events=b"", work=ASKED, **about)
        await begun.begin("resp_5", "one", 20.0, events=b"", work=ASKED, **about)
        await database.execute("UPDATE responses SET work = '' WHERE id = 'resp_3'")
        await database.execute("UPDATE responses SET work = '{}' WHERE id = 'resp_5'")
        now[0] += 21.0
        assert await take_over("two", 20.0) is None
        for id in ("resp_3", "resp_5"):
            assert "stopped before its end" in (await shown(id))["error"]["message"]
        # Nobody takes over what was cancelled, whoever had it.
        await begun.begin("resp_4", "one", 20.0, events=b"", work=ASKED, **about)
        now[0] += 21.0
        assert await begun.end("resp_4", None, json.dumps({**response, "status": "cancelled"}).encode())
        assert await take_over("two", 20.0) is None and (await shown("resp_4"))["status"] == "cancelled"
        assert not [row for row in await database.fetch("SELECT work FROM responses") if row[0]]


async def test_a_tenant_with_many_lost_responses_keeps_nobody_waiting(tmp_path: Path) -> None:
    database = await open_database(f"sqlite:///{tmp_path / 'state.db'}")
    now = [1000.0]
    store = ResponseStore(database, keep_s=1e6, most=1000, clock=lambda: now[0])
    await store.prepare()
    for number in range(101):
        tenant = "few" if number == 100 else "many"
        about: Any = {"tenant": tenant, "user": "", "response": b'{"model": "m"}', "items": [], "events": b""}
        work = msgspec.structs.replace(ASKED, tenant=tenant)
        await store.background.begin(f"resp_{number}", "dead", 20.0, work=work, **about)
        now[0] += 0.01
    now[0] += 30.0
    found = await store.background.take_over("me", 20.0, not_of=["many", "else"])
    assert found is not None and found.work.tenant == "few"
    assert await store.background.take_over("me", 20.0, not_of=["many", "else"]) is None
    await database.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_every_run_numbers_its_events_apart(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    now = [1000.0]
    async with kept(tmp_path, kind, request) as database:
        store = ResponseStore(database, keep_s=1e6, most=10, clock=lambda: now[0])
        await store.prepare()
        begun = store.background
        response = json.dumps({"id": "resp_2", "model": "m", "status": "queued", "background": True}).encode()
        about: Any = {"tenant": "t", "user": "", "response": response, "items": []}

        def events(first: int, count: int) -> bytes:
            return b"".join(encode_event(("e", {}), first + number) for number in range(count))

        work = msgspec.structs.replace(ASKED, stream=True)
        await begun.begin("resp_2", "me", 20.0, events=events(0, 2), work=work, **about)
        # Events come in chunks, and one that is written again replaces itself.
        await begun.keep("me", 20.0, ["resp_2"], [("resp_2", response)], [("resp_2", 2, events(2, 1))])
        await begun.keep("me", 20.0, ["resp_2"], [], [("resp_2", 2, events(2, 2))])
        whole = split_events(events(0, 4))
        for after in range(-1, 4):
            assert await begun.events("resp_2", after) == whole[after + 1 :]
        now[0] += 30.0
        found = await begun.take_over("you", 20.0)
        assert found is not None and found.first_event == RUN_EVENTS + 1
        # Readers of the first run may have got more of its events than were stored: they get all of the second.
        (again,) = await begun.events("resp_2", 3)
        assert again.startswith(b"event: response.queued") and number_of(again) == RUN_EVENTS
        assert await begun.events("resp_2", 57) == [again] and await begun.events("resp_2", RUN_EVENTS) == []
        await begun.keep("me", 20.0, ["resp_2"], [], [("resp_2", 4, events(4, 3))])  # too late
        await begun.keep("you", 20.0, ["resp_2"], [], [("resp_2", RUN_EVENTS + 1, events(RUN_EVENTS + 1, 2))])
        assert [number_of(event) - RUN_EVENTS for event in await begun.events("resp_2", 57)] == [0, 1, 2]
        for run in (2, 3):
            now[0] += 30.0
            found = await begun.take_over("her", 20.0)
            assert (None if found is None else found.first_event) == (run * RUN_EVENTS + 1 if run < 3 else None)
        # The stream of what was given up has an end, and nothing behind it.
        assert not await begun.running("resp_2")
        (failed,) = await begun.events("resp_2", 2 * RUN_EVENTS)
        assert failed.startswith(b"event: response.failed") and number_of(failed) == 2 * RUN_EVENTS + 1
        late = [("resp_2", 2 * RUN_EVENTS + number, events(number, 1)) for number in (1, 2)]
        assert await begun.keep("her", 20.0, ["resp_2"], [], late) == {"resp_2": ""}
        assert await begun.events("resp_2", 2 * RUN_EVENTS) == [failed]
        assert await store.delete("resp_2", "t")
        assert await begun.keep("her", 20.0, ["resp_2"], [], late) == {}
        assert not await begun.events("resp_2", -1) and not await begun.recorded("resp_2")


async def test_charges_have_the_same_ids_in_every_run() -> None:
    """A response may take several generations, as one that searches does; each is billed, and once."""
    found = TakenOver("resp_abc", {}, ASKED, 0)
    runs = [BackgroundRun.taken_over(found, Caller("t")) for _ in range(2)]
    ids = [[run.next_charge_id() for _ in range(3)] for run in runs]
    assert ids[0] == ids[1] and ids[0][0] == "abc" and len(set(ids[0])) == 3


def test_gateways_of_the_last_release_refuse_to_continue_what_has_no_answer() -> None:
    """They take every stored conversation for one that can be continued: this one they must refuse with a 400."""
    with pytest.raises(InvalidRequest, match="unfinished_response"):
        template_messages(msgspec.json.decode(UNFINISHED, type=list[ChatMessage]))


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_the_oldest_are_deleted_and_leases_are_single(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    now = [1000.0]
    async with kept(tmp_path, kind, request) as database:
        store = ResponseStore(database, keep_s=1000.0, most=2, clock=lambda: now[0])
        await store.prepare()
        response = json.dumps({"id": "x", "model": "m", "status": "queued", "background": True}).encode()
        about: Any = {
            "tenant": "t",
            "user": "",
            "response": response,
            "items": [],
            "events": b"event: a\n\n",
            "work": ASKED,
        }
        for number in range(4):
            now[0] += 1.0
            await store.background.begin(f"resp_{number}", "me", 20.0, **about)
            if number:
                assert await store.background.end(f"resp_{number}", "me", response, [])
        # The first is still generated; of the others two are left, with their events.
        await store.put("resp_4", "t", response, [])
        left = {str(row[0]) for row in await database.fetch("SELECT id FROM responses")}
        assert left == {"resp_0", "resp_3", "resp_4"}
        assert {row[0] for row in await database.fetch("SELECT response FROM response_events")} == {"resp_0", "resp_3"}
        # A lease that is not renewed expires, whatever else its owner generates.
        await store.background.begin("resp_5", "me", 20.0, **about)
        now[0] += 15.0
        assert await store.background.keep("me", 20.0, ["resp_5"], [], []) == {"resp_5": "me"}
        now[0] += 10.0
        found = await store.background.take_over("you", 20.0)
        assert found is not None and found.id == "resp_0" and await store.background.take_over("you", 20.0) is None
