"""Batches of messages with Anthropic's own client, on a real gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest

from penstock.config.batches import BatchesConfig
from tests.gateway.accounting.test_quotas import sign_in
from tests.gateway.batches.test_batches import ANSWER, settings
from tests.gateway.conftest import Running, Serving, eventually, until
from tests.scripted import ScriptedEngine


def sdk(running: Running, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{running.port}", api_key=key, max_retries=0)


def asked(id: str, **params: Any) -> Any:
    message = {"role": "user", "content": "hi"}
    return {"custom_id": id, "params": {"model": "tiny", "max_tokens": 50, "messages": [message], **params}}


async def ended(client: anthropic.AsyncAnthropic, id: str) -> Any:
    return await until(lambda: client.messages.batches.retrieve(id), lambda batch: batch.processing_status == "ended")


async def results(client: anthropic.AsyncAnthropic, id: str) -> dict[str, Any]:
    return {line.custom_id: line.result async for line in await client.messages.batches.results(id)}


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'batches.db'}"


async def test_a_batch_of_messages_is_answered_for_half_the_price(serving: Serving, store: str) -> None:
    async with serving(**settings(store)) as running:
        client = sdk(running)
        made = await client.messages.batches.create(
            requests=[
                asked("a"),
                asked("b", max_tokens=3, thinking={"type": "adaptive"}),
                asked("wrong", temperature=9),
            ]
        )
        assert made.id.startswith("msgbatch_") and made.type == "message_batch"
        assert made.processing_status == "in_progress" and made.results_url is None
        assert (made.expires_at - made.created_at).total_seconds() == 86400
        assert sum(made.request_counts.model_dump().values()) == 3
        batch = await ended(client, made.id)
        assert batch.request_counts.model_dump() == {
            "processing": 0, "succeeded": 2, "errored": 1, "canceled": 0, "expired": 0
        }  # fmt: skip
        assert batch.ended_at >= batch.created_at and batch.cancel_initiated_at is None
        found = await results(client, made.id)
        assert found["a"].type == "succeeded" and found["a"].message.content[0].text == "Hello, world!"
        assert found["b"].message.stop_reason == "max_tokens"
        assert found["wrong"].type == "errored" and found["wrong"].error.error.type == "invalid_request_error"
        assert "temperature" in found["wrong"].error.error.message
        raw = (await running.client.get(batch.results_url)).text
        assert '"ignored_parameters":"thinking"' in raw
        # Run last, and billed half.
        assert {seen.priority for seen in running.engine.seen} == {2}
        (used,) = (await running.client.get("/v1/usage")).json()["data"]
        assert (used["requests"], used["completion_tokens"]) == (2, ANSWER + 3)
        full = (used["prompt_tokens"] - used["cached_tokens"]) + used["cached_tokens"] * 0.5 + (ANSWER + 3) * 2
        assert float(used["cost"]) == pytest.approx(full / 2 / 1e6)
        # Pages, in both directions; the beta part of the SDK is the same.
        others = [(await client.messages.batches.create(requests=[asked("a")])).id for _ in range(3)]
        newest = [one.id async for one in client.beta.messages.batches.list(limit=2)]
        assert newest == [*reversed(others), made.id]
        before = await client.messages.batches.list(before_id=made.id, limit=2)
        assert [one.id for one in before.data] == [others[1], others[0]] and before.has_more
        assert (await running.client.get("/v1/batches")).json()["data"][0]["endpoint"] == "/v1/messages"
        # Deleting takes the results along.
        deleted = await client.messages.batches.delete(made.id)
        assert (deleted.id, deleted.type) == (made.id, "message_batch_deleted")
        for gone in (client.messages.batches.retrieve, client.messages.batches.delete):
            with pytest.raises(anthropic.NotFoundError):
                await gone(made.id)
        for id in others:
            await ended(client, id)
            await client.messages.batches.delete(id)
        assert (await running.client.get("/v1/files")).json()["data"] == []


async def test_a_batch_can_be_cancelled_and_survives_a_restart(serving: Serving, text: Any, store: str) -> None:
    idle = settings(store, batches=BatchesConfig(lines_at_once=0))
    async with serving(**idle) as running:  # this gateway takes batches and runs none
        client = sdk(running)
        kept = await client.messages.batches.create(requests=[asked(str(n)) for n in range(3)])
        with pytest.raises(anthropic.AnthropicError):
            await client.messages.batches.results(kept.id)
        early = await running.client.get(f"/v1/messages/batches/{kept.id}/results")
        assert early.status_code == 400 and early.json()["type"] == "error"
        with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
            await client.messages.batches.delete(kept.id)
    engine = ScriptedEngine(text)
    async with serving(engine, **settings(store, batches=BatchesConfig(lines_at_once=1))) as running:
        client = sdk(running)
        assert {one.type for one in (await _after(client, kept.id)).values()} == {"succeeded"}
        engine.hold = True
        cut = await client.messages.batches.create(requests=[asked(str(n)) for n in range(3)])
        await eventually(lambda: engine.has_work)
        going = await client.messages.batches.cancel(cut.id)
        assert going.processing_status in ("canceling", "ended") and going.cancel_initiated_at is not None
        over = await ended(client, cut.id)
        assert over.request_counts.canceled == 3 and over.request_counts.errored == 0
        assert {one.type for one in (await results(client, cut.id)).values()} == {"canceled"}
        with pytest.raises(anthropic.BadRequestError, match="has ended"):
            await client.messages.batches.cancel(cut.id)


async def _after(client: anthropic.AsyncAnthropic, id: str) -> dict[str, Any]:
    await ended(client, id)
    return await results(client, id)


async def test_what_is_wrong_is_said_at_once_and_tenants_are_apart(serving: Serving, store: str) -> None:
    async with serving(**settings(store, batches=BatchesConfig(most_lines=2, tenant_limit=4096))) as running:
        for body, says in (
            ({"requests": []}, "requests"),
            ({"requests": [asked("a"), asked("a")]}, "requests[1].custom_id"),
            ({"requests": [asked("a b")]}, "requests[0].custom_id"),
            ({"requests": [asked("a", stream=True)]}, "requests[0].params.stream"),
            ({"requests": [{"custom_id": "a", "params": 1}]}, "requests[0].params"),
            ({"requests": [asked("a"), asked("b"), asked("c")]}, "at most 2"),
            ({"requests": [asked("a", system="x" * 5000)]}, "Delete some"),
            ({"requests": [asked("a")], "more": 1}, "more"),
        ):
            refused = await running.client.post("/v1/messages/batches", json=body)
            assert refused.status_code == 400, body
            assert refused.json()["type"] == "error" and says in refused.json()["error"]["message"]
        broken = await running.client.post(
            "/v1/messages/batches",
            content=b'{"requests":[{"custom_id":"a","params":{"model":"\xff"}}]}',
            headers={"content-type": "application/json"},
        )
        assert broken.status_code == 400
        both = await running.client.get("/v1/messages/batches?after_id=a&before_id=b")
        assert both.status_code == 400
        assert (await running.client.get("/v1/messages/batches/batch_x")).status_code == 404
        await sign_in(running, "theirs")
        theirs = running.client.headers["authorization"].removeprefix("Bearer ")
        running.admin = running.client.headers["authorization"]  # type: ignore[attr-defined]
        await sign_in(running, "ours")
        ours = running.client.headers["authorization"].removeprefix("Bearer ")
        made = await sdk(running, ours).messages.batches.create(requests=[asked("a")])
        await ended(sdk(running, ours), made.id)
        stranger = sdk(running, theirs).messages.batches
        assert [one.id async for one in stranger.list()] == []
        for request in (stranger.retrieve, stranger.cancel, stranger.delete, stranger.results):
            with pytest.raises(anthropic.NotFoundError):
                await request(made.id)
