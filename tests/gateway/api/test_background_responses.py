"""`background: true` of responses: through the official SDK."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.gateway.api.openai.responses import background
from penstock.gateway.api.openai.responses.background_store import (
    BackgroundStore,
)
from penstock.gateway.app.memory_request import Reply
from penstock.storage import DatabaseError
from penstock.text import TextModel
from tests.gateway.accounting.test_admission import held, one_at_a_time
from tests.gateway.accounting.test_quotas import sign_in
from tests.gateway.api.test_responses import create, sdk, stored
from tests.gateway.conftest import Running, Serving, eventually, until
from tests.gateway.process.test_request_log import read, settings


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
