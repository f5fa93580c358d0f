"""Files and batches with the official client, on a real gateway."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.config.batches import BatchesConfig
from penstock.config.schema import LimitConfig
from penstock.gateway.batches.files import FileStore
from penstock.gateway.batches.lines import Check, numbered
from penstock.gateway.batches.store import ACTIVE, Answer, BatchStore
from penstock.gateway.process.settings import ModelSettings
from penstock.identity import IdentityStore
from penstock.storage import Database, open_database
from tests.gateway.conftest import Running, Serving
from tests.scripted import ScriptedEngine
from tests.services import emptied

ANSWER = len("Hello, world!") + 1


def request(id: str, endpoint: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    content = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in endpoint else {"prompt": "hi"}
    return {"custom_id": id, "method": "POST", "url": endpoint, "body": {"model": "tiny", **content, **body}}


def jsonl(*requests: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in requests)


def lines(content: str) -> dict[str, Any]:
    return {line["custom_id"]: line for line in map(json.loads, content.splitlines())}


@pytest.fixture(params=["sqlite", "postgres"])
async def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'batches.db'}"
    url: str = request.getfixturevalue("postgres_url")
    await emptied(url)
    return url


def settings(store_url: str, **more: Any) -> dict[str, Any]:
    models = (ModelSettings("tiny", "", input_price=1.0, output_price=2.0),)
    return {"store_url": store_url, "models": models, "gateway_timeout_s": 0.4, **more}


@asynccontextmanager
async def client_of(running: Running, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key=key, max_retries=0) as client:
        yield client


async def over(client: openai.AsyncOpenAI, id: str, within: float = 60.0) -> Any:
    """The batch, once nothing more happens to it."""
    return await until(client, id, lambda batch: batch.status not in ACTIVE, within)


async def until(client: openai.AsyncOpenAI, id: str, condition: Callable[[Any], bool], within: float = 60.0) -> Any:
    deadline = time.monotonic() + within
    while not condition(batch := await client.batches.retrieve(id)):
        assert time.monotonic() < deadline, batch
        await asyncio.sleep(0.02)
    return batch


async def test_a_batch_is_answered_line_by_line_for_half_the_price(serving: Serving, store_url: str) -> None:
    async with serving(**settings(store_url)) as running, client_of(running) as client:
        content = jsonl(request("a"), request("b", n=2, max_tokens=3), request("wrong", temperature=9))
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        assert (file.filename, file.bytes, file.purpose) == ("in.jsonl", len(content), "batch")
        batch = await client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"job": "nightly"},
        )
        assert batch.status == "validating" and batch.expires_at == batch.created_at + 86400
        batch = await over(client, batch.id)
        assert batch.status == "completed" and batch.metadata == {"job": "nightly"}
        assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
        output = lines((await client.files.content(batch.output_file_id)).text)
        assert output["a"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello, world!"
        assert len(output["b"]["response"]["body"]["choices"]) == 2 and output["b"]["response"]["status_code"] == 200
        errors = lines((await client.files.content(batch.error_file_id)).text)
        assert errors["wrong"]["response"]["status_code"] == 400
        assert errors["wrong"]["response"]["body"]["error"]["param"] == "temperature"
        # Run last, and billed half.
        assert {seen.priority for seen in running.engine.seen} == {2}
        (used,) = (await running.client.get("/v1/usage")).json()["data"]
        assert (used["requests"], used["completion_tokens"]) == (2, ANSWER + 6)
        assert batch.usage.to_dict() == {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": used["cached_tokens"]},
            "output_tokens": ANSWER + 6,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used["prompt_tokens"] + ANSWER + 6,
        }
        full = (used["prompt_tokens"] - used["cached_tokens"]) + used["cached_tokens"] * 0.5 + (ANSWER + 6) * 2
        assert float(used["cost"]) == pytest.approx(full / 2 / 1e6)
        listed = [one async for one in client.batches.list(limit=1)]
        assert [one.id for one in listed] == [batch.id]
        names = {one.filename: one async for one in client.files.list(limit=1)}
        assert set(names) == {"in.jsonl", f"{batch.id}_output.jsonl", f"{batch.id}_error.jsonl"}
        assert names[f"{batch.id}_output.jsonl"].purpose == "batch_output"
        assert (await client.files.retrieve(file.id)).id == file.id
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(file.id)


async def test_latency_that_a_batch_cannot_keep_is_named(serving: Serving, tmp_path: Path) -> None:
    params = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    async with serving(**settings(f"sqlite:///{tmp_path / 'x.db'}")) as running, client_of(running) as client:
        file = await client.files.create(file=("x", jsonl(request("a"))), purpose="batch")
        chats = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        messages = {"requests": [{"custom_id": "a", "params": params}]}
        for path, body in (("/v1/batches", chats), ("/v1/messages/batches", messages)):
            refused = await running.client.post(path, json=body, headers={"x-slo-ttft-ms": "soon"})
            assert refused.status_code == 400 and "x-slo-ttft-ms" in refused.text
            made = await running.client.post(path, json=body, headers={"x-slo-ttft-ms": "900", "x-slo-tpot-ms": "9"})
            assert made.status_code == 200, made.text
            assert made.headers["x-penstock-ignored"] == "x-slo-ttft-ms, x-slo-tpot-ms"


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/responses"])
async def test_other_endpoints_too(serving: Serving, tmp_path: Path, endpoint: str) -> None:
    body = {"input": "hi"} if "responses" in endpoint else {"prompt": "hi"}
    line = {"custom_id": "x", "method": "POST", "url": endpoint, "body": {"model": "tiny", **body}}
    async with serving(**settings(f"sqlite:///{tmp_path / 'x.db'}")) as running, client_of(running) as client:
        file = await client.files.create(file=("x", jsonl(line)), purpose="batch")
        made = await client.batches.create(
            input_file_id=file.id,
            endpoint=endpoint,  # type: ignore[arg-type]
            completion_window="24h",
        )
        batch = await over(client, made.id)
        answer = lines((await client.files.content(batch.output_file_id)).text)["x"]["response"]["body"]
        assert "Hello, world!" in json.dumps(answer)
        assert batch.usage.output_tokens == ANSWER and batch.usage.input_tokens > 0


async def test_an_input_with_mistakes_fails_before_anything_runs(serving: Serving, tmp_path: Path) -> None:
    bad = jsonl(
        request("a"), request("a"), {**request("b"), "method": "GET"}, {**request("c"), "url": "/v1/completions"},
        {**request("d"), "more": 1}, request("e", stream=True),
    ) + b"{nonsense\n"  # fmt: skip
    async with serving(**settings(f"sqlite:///{tmp_path / 'x.db'}")) as running, client_of(running) as client:
        file = await client.files.create(file=("in.jsonl", bad), purpose="batch")
        made = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        batch = await over(client, made.id)
        assert batch.status == "failed" and batch.output_file_id is None and running.engine.seen == []
        assert [(problem.line, problem.code) for problem in batch.errors.data] == [
            (2, "duplicate_custom_id"), (3, "invalid_method"), (4, "mismatched_endpoint"), (5, "invalid_line"),
            (6, "invalid_value"), (7, "invalid_json_line"),
        ]  # fmt: skip


async def test_a_batch_that_is_cancelled_keeps_what_it_has(serving: Serving, tmp_path: Path, text: Any) -> None:
    engine = ScriptedEngine(
        text, lambda request: [ord("a")] * (5 if request.params.max_tokens == 5 else 400), step_s=0.005
    )
    options = settings(f"sqlite:///{tmp_path / 'x.db'}", batches=BatchesConfig(lines_at_once=2))
    async with serving(engine, **options) as running, client_of(running) as client:
        content = jsonl(request("quick", max_tokens=5), *(request(f"slow{i}", max_tokens=400) for i in range(5)))
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        made = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        with pytest.raises(openai.BadRequestError, match="being read"):
            await client.files.delete(file.id)
        await until(client, made.id, lambda batch: batch.request_counts.completed >= 1)
        assert (await client.batches.cancel(made.id)).status == "cancelling"
        batch = await over(client, made.id)
        assert batch.status == "cancelled" and batch.request_counts.completed == 1
        assert set(lines((await client.files.content(batch.output_file_id)).text)) == {"quick"}
        errors = lines((await client.files.content(batch.error_file_id)).text)
        assert {errors[f"slow{i}"]["error"]["code"] for i in range(5)} == {"batch_cancelled"}
        (used,) = (await running.client.get("/v1/usage")).json()["data"]
        assert (used["requests"], used["completion_tokens"]) == (1, 5)  # what came to nothing is free
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            await client.batches.cancel(made.id)


async def test_a_batch_that_nobody_has_begun_can_be_cancelled_or_expire(serving: Serving, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'x.db'}"
    ids = []
    content = jsonl(request("a")) + b"{nonsense\n"
    idle = settings(url, batches=BatchesConfig(lines_at_once=0))
    async with serving(**idle) as running, client_of(running) as client:
        for _ in range(2):
            file = await client.files.create(file=("x", content), purpose="batch")
            made = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            ids.append(made.id)
        assert (await client.batches.cancel(ids[0])).status == "cancelling"
        assert running.parts.database is not None
        good = await client.files.create(file=("x", jsonl(request("a"))), purpose="batch")
        await running.parts.database.execute(
            "UPDATE batches SET expires_at = 5, input_file_id = ? WHERE id = ?", good.id, ids[1]
        )
    async with serving(**settings(url)) as running, client_of(running) as client:
        assert [(await over(client, id)).status for id in ids] == ["cancelled", "expired"]
        assert running.engine.seen == []


async def test_what_is_not_answered_in_time_has_expired(serving: Serving, tmp_path: Path, text: Any) -> None:
    engine = ScriptedEngine(text)
    engine.hold = True
    async with serving(engine, **settings(f"sqlite:///{tmp_path / 'x.db'}")) as running, client_of(running) as client:
        file = await client.files.create(file=("in.jsonl", jsonl(request("a"))), purpose="batch")
        made = await client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="1m",  # type: ignore[arg-type]
        )
        assert running.parts.database is not None
        await running.parts.database.execute("UPDATE batches SET expires_at = ?", made.created_at + 0.5)
        # Whoever runs it took its end along when it was claimed: another claim sees the new one.
        await running.parts.database.execute("UPDATE batches SET runner = '', leased_until = 0")
        batch = await over(client, made.id)
        assert batch.status == "expired" and batch.expired_at is not None
        errors = lines((await client.files.content(batch.error_file_id)).text)
        assert errors["a"]["error"]["code"] == "batch_expired"


async def test_a_batch_goes_on_where_a_gateway_stopped_and_no_line_is_answered_or_billed_twice(
    serving: Serving, store_url: str, text: Any
) -> None:
    def slow() -> ScriptedEngine:
        return ScriptedEngine(text, lambda request: [ord("a")] * 20, step_s=0.01)

    options = settings(store_url, batches=BatchesConfig(lines_at_once=3), drain_s=0.0, gateway_timeout_s=3.0)
    content = jsonl(*(request(str(number), max_tokens=20) for number in range(12)))
    first = slow()
    async with serving(first, **options) as running, client_of(running) as client:
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        made = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        await until(client, made.id, lambda batch: batch.request_counts.completed >= 4)
    second, third = slow(), slow()
    async with (
        serving(second, **options) as running,
        serving(third, **options),  # two gateways: one of them runs it
        client_of(running) as client,
    ):
        batch = await over(client, made.id)
        assert batch.status == "completed" and batch.request_counts.completed == 12
        output = (await client.files.content(batch.output_file_id)).text
        assert len(output.splitlines()) == 12 and set(lines(output)) == {str(number) for number in range(12)}
        assert not (second.seen and third.seen)
        assert 12 <= len(first.seen) + len(second.seen) + len(third.seen) <= 12 + 3  # those that were cut, again
        (used,) = (await running.client.get("/v1/usage")).json()["data"]
        assert (used["requests"], used["completion_tokens"]) == (12, 12 * 20)


async def test_a_line_that_finds_no_room_waits(serving: Serving, tmp_path: Path) -> None:
    options = settings(f"sqlite:///{tmp_path / 'x.db'}", limits=(LimitConfig(per="tenant", concurrent_requests=1),))
    async with serving(**options) as running, client_of(running) as client:
        file = await client.files.create(file=("x", jsonl(*(request(str(n)) for n in range(2)))), purpose="batch")
        made = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        batch = await over(client, made.id)
        assert batch.request_counts.completed == 2 and batch.error_file_id is None


async def test_a_tenant_without_room_holds_up_nobody_else(serving: Serving, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'x.db'}"
    database = await open_database(url)
    identities = IdentityStore(database)
    await identities.prepare()
    keys = []
    for tenant in ("acme", "beta"):
        await identities.create_tenant(tenant)
        keys.append((await identities.create_key(tenant))[1].text)
    await database.close()
    limits = (LimitConfig(per="tenant", tenant="acme", requests_per_minute=1),)
    options = settings(url, limits=limits, batches=BatchesConfig(lines_at_once=2), gateway_timeout_s=3.0)
    async with (
        serving(**options) as running,
        client_of(running, keys[0]) as acme,
        client_of(running, keys[1]) as beta,
    ):
        made = []
        for client, number in ((acme, 10), (acme, 10), (acme, 10), (beta, 5)):
            content = jsonl(*(request(str(n)) for n in range(number)))
            file = await client.files.create(file=("x", content), purpose="batch")
            made.append(
                await client.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                )
            )
        assert (await over(beta, made[-1].id)).request_counts.completed == 5
        states = [(await acme.batches.retrieve(one.id)).status for one in made[:3]]
        assert sorted(states) == ["in_progress", "in_progress", "validating"]  # two at a time


async def test_tenants_do_not_see_each_other_s_files_and_batches(serving: Serving, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'x.db'}"
    database = await open_database(url)
    identities = IdentityStore(database)
    await identities.prepare()
    keys = []
    for tenant in ("acme", "beta"):
        await identities.create_tenant(tenant)
        keys.append((await identities.create_key(tenant))[1].text)
    revoked, text_of_revoked = await identities.create_key("acme")
    async with (
        serving(**settings(url, key_fresh_s=0.1)) as running,
        client_of(running, keys[0]) as acme,
        client_of(running, keys[1]) as beta,
        client_of(running, text_of_revoked.text) as leaving,
    ):
        file = await acme.files.create(file=("x", jsonl(request("a"))), purpose="batch")
        made = await acme.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        assert (await over(acme, made.id)).status == "completed"
        for forbidden in (
            beta.files.retrieve(file.id), beta.files.content(file.id), beta.files.delete(file.id),
            beta.batches.retrieve(made.id), beta.batches.cancel(made.id),
        ):  # fmt: skip
            with pytest.raises(openai.NotFoundError):
                await forbidden
        with pytest.raises(openai.BadRequestError, match="no file"):
            await beta.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        assert [one async for one in beta.files.list()] == [] == [one async for one in beta.batches.list()]
        # A key that is revoked does not work for its batches either.
        running.engine.hold = True
        file = await leaving.files.create(file=("x", jsonl(*(request(str(n)) for n in range(10)))), purpose="batch")
        made = await leaving.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        await identities.revoke_key(revoked.id)
        await asyncio.sleep(0.2)
        running.engine.hold = False
        batch = await over(acme, made.id)
        errors = lines((await acme.files.content(batch.error_file_id)).text)
        assert {line["response"]["status_code"] for line in errors.values()} == {401}
    await database.close()


async def test_bad_uploads_are_refused_clearly(serving: Serving, tmp_path: Path) -> None:
    options = settings(
        f"sqlite:///{tmp_path / 'x.db'}", batches=BatchesConfig(file_limit=4096, tenant_limit=6000, most_lines=2)
    )
    async with serving(**options) as running, client_of(running) as client:
        post = running.client.post

        async def refused(status: int, word: str, reply: httpx.Response) -> None:
            assert reply.status_code == status and word in reply.json()["error"]["message"], reply.text

        file = ("in.jsonl", jsonl(request("a")))
        await refused(400, "multipart", await post("/v1/files", json={"purpose": "batch"}))
        await refused(400, "`purpose`", await post("/v1/files", files={"file": file}))
        await refused(400, "`file`", await post("/v1/files", files={"purpose": (None, "batch")}))
        await refused(400, "must be `batch`", await post("/v1/files", files={"file": file}, data={"purpose": "vision"}))
        await refused(
            400, "Unknown", await post("/v1/files", files={"file": file}, data={"purpose": "batch", "x": "1"})
        )
        await refused(400, "UTF-8", await post("/v1/files", files={"file": b"\xff\xfe"}, data={"purpose": "batch"}))
        await refused(400, "NUL", await post("/v1/files", files={"file": b"a\0"}, data={"purpose": "batch"}))
        await refused(400, "empty", await post("/v1/files", files={"file": b""}, data={"purpose": "batch"}))
        await refused(413, "4096", await post("/v1/files", files={"file": b"x" * 5000}, data={"purpose": "batch"}))
        await refused(
            400, "cannot be read",
            await post("/v1/files", content=b"--x", headers={"content-type": "multipart/form-data; boundary=y"}),
        )  # fmt: skip
        await refused(
            400, "expires_after",
            await post("/v1/files", files={"file": file}, data={"purpose": "batch", "expires_after[seconds]": "5"}),
        )  # fmt: skip
        await client.files.create(
            file=b"x" * 4000, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        await refused(
            400, "Delete some", await post("/v1/files", files={"file": b"x" * 4000}, data={"purpose": "batch"})
        )
        made = await client.files.create(file=jsonl(*(request(str(n)) for n in range(3))), purpose="batch")
        for change, word in (
            ({"endpoint": "/v1/models"}, "endpoint"),
            ({"completion_window": "1y"}, "completion_window"),
            ({"input_file_id": "file-none"}, "no file"),
            ({"output_expires_after": {}}, "Unknown"),
        ):
            body = {"input_file_id": made.id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **change}
            await refused(400, word, await post("/v1/batches", json=body))
        batch = await client.batches.create(
            input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        problems = (await over(client, batch.id)).errors
        assert problems is not None and problems.data[0].code == "too_many_requests"
        assert (await running.client.get("/v1/files?color=red")).status_code == 400
        assert (await running.client.get("/v1/batches?limit=1000")).status_code == 400


@pytest.fixture
async def database(store_url: str) -> AsyncIterator[Database]:
    found = await open_database(store_url)
    yield found
    await found.close()


async def test_one_runner_has_a_batch_until_its_lease_ends(database: Database) -> None:
    now = 1000.0
    store = BatchStore(database, clock=lambda: now)
    await store.prepare()
    made = await store.create(
        "acme", user="", key="", endpoint="/v1/completions", input_file_id="f", window="24h", window_s=9e4, metadata={}
    )  # fmt: skip
    claimed = await store.claim("one", 10.0)
    assert claimed is not None and claimed.id == made.id and await store.claim("two", 10.0) is None
    now = 1008.0
    assert await store.renew(made.id, "one", 10.0) == "validating"
    now = 1015.0
    assert await store.claim("two", 10.0) is None
    now = 1019.0
    assert await store.claim("two", 10.0) is not None
    # The first one comes too late with everything, except that an answer that is there stays.
    assert await store.renew(made.id, "one", 10.0) is None
    assert not await store.begun(made.id, "one", 3) and await store.begun(made.id, "two", 3)
    await store.add([Answer(1, True, "first\n")], made.id)
    await store.add([Answer(1, True, "again\n"), Answer(2, False, "no\n")], made.id)
    assert await store.answers(made.id, ok=True) == [Answer(1, True, "first\n")]
    found = await store.get(made.id, "acme")
    assert found is not None and (found.completed, found.failed) == (1, 1)
    assert not await store.finish(made.id, "one", "completed", output=None, errors=None, with_files=[])
    assert await store.finish(made.id, "two", "completed", output="o", errors=None, with_files=[])
    found = await store.get(made.id, "acme")
    assert found is not None and (found.status, found.completed, found.failed) == ("completed", 1, 1)
    assert await store.answered(made.id) == set() and await store.get(made.id, "beta") is None


async def test_a_large_file_is_kept_in_parts_and_forgotten_in_time(database: Database) -> None:
    now = 1000.0
    store = FileStore(database, keep_s=100.0, clock=lambda: now)
    await store.prepare()
    text = "".join(f"{number} " + "ü" * 5000 + "\n" for number in range(400))
    file = await store.create("acme", "big", "batch", text)
    parts = [part async for part in store.content(file.id)]
    assert len(parts) > 2 and "".join(parts) == text and all(part.endswith("\n") for part in parts)
    assert file.bytes == len(text.encode()) == await store.used("acme")
    unfinished = await store.begin("acme", "half", "batch")
    await unfinished.add("x" * 600_000)
    assert await store.get(unfinished.file.id, "acme") is None
    now = 1101.0
    assert await store.get(file.id, "acme") is None
    await store.sweep()
    assert await database.fetch("SELECT 1 FROM file_parts") == []


def test_line_numbers_are_those_of_the_file() -> None:
    part = "\ufeff" + json.dumps(request("a")) + "\r\n\n" + json.dumps(request("b"))
    check = Check("/v1/chat/completions", 10)
    found = list(numbered(part, 1))
    check.add(found)
    assert [number for number, _ in found] == [1, 3] and check.finish() == []
