"""Responses in the background outlive their gateway: shutdown, loss, takeover by another, billed once."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.gateway.api.openai.responses import background
from penstock.gateway.api.openai.responses.background_store import (
    RUN_EVENTS,
    BackgroundStore,
    TakenOver,
)
from penstock.gateway.app.authentication import OpenAuthentication
from penstock.gateway.app.memory_request import Reply
from penstock.identity import Caller
from penstock.protocol.errors import KeyStoreUnavailable
from penstock.text import TextModel
from tests.gateway.accounting.test_admission import held, one_at_a_time
from tests.gateway.accounting.test_quotas import sign_in
from tests.gateway.api.test_background_responses import ended, numbers
from tests.gateway.api.test_responses import create, prompt, sdk, stored
from tests.gateway.conftest import Running, Serving, eventually, until
from tests.gateway.process.test_request_log import settings
from tests.scripted import ScriptedEngine


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
    async with serving(held(text), **stored(tmp_path)) as running:
        id = (await create(running, background=True)).json()["id"]

        async def leased_until() -> float:
            [[at]] = await running.parts.database.fetch("SELECT leased_until FROM responses")  # type: ignore[union-attr]
            return float(at)

        for _ in range(5):
            before = await leased_until()
            await until(leased_until, lambda at: at > before)  # noqa: B023
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
    monkeypatch.setattr(background, "LOOK_S", 0.2)
    monkeypatch.setattr(OpenAuthentication, "holder", holding)
    async with serving(held(text), **stored(tmp_path)) as running:
        await eventually(lambda: bool(calls))
        own = (await create(running, background=True)).json()["id"]
        await asyncio.sleep(0.6)
        await eventually(lambda: "keep" in calls)
        assert calls.count("take over") < 30, calls
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
