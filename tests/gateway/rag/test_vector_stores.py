"""R-RAG-1 in the words of OpenAI's API, with the official SDK as the judge: vector stores are collections."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.config.knowledge import KnowledgeConfig
from penstock.text import TextModel
from tests.gateway.api.test_identity import make_key
from tests.gateway.conftest import Running, Serving
from tests.gateway.rag.test_collections import library
from tests.gateway.server_tools.test_server_tools import calls, script
from tests.knowledge.files import make_pdf

pytestmark = pytest.mark.usefixtures("readers_here")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "knowledge.md"

LEAVE = b"# Leave\n\nParents receive twelve weeks of paid leave after the birth of a child.\n"
HOURS = b"The office opens at eight in the morning and closes at six in the evening.\n"
CATS = b"Cats sleep for most of the day and hunt at night.\n"


def client_of(running: Running, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key=key, max_retries=0)


@asynccontextmanager
async def sdk(
    serving: Serving, endpoint: str, folder: Path, **settings: Any
) -> AsyncIterator[tuple[Running, openai.AsyncOpenAI]]:
    async with library(serving, endpoint, folder, **settings) as running, client_of(running) as client:
        yield running, client


async def sent(client: openai.AsyncOpenAI, name: str, body: bytes, purpose: Any = "assistants") -> str:
    return (await client.files.create(file=(name, body), purpose=purpose)).id


async def processed(client: openai.AsyncOpenAI, store: str) -> Any:
    for _ in range(3000):
        found = await client.vector_stores.retrieve(store)
        if found.status != "in_progress":
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(found)


async def test_a_store_from_its_files_to_a_search(serving: Serving, encoder_endpoint: str, tmp_path: Path) -> None:
    async with sdk(serving, encoder_endpoint, tmp_path) as (running, client):
        files = [await sent(client, "leave.md", LEAVE), await sent(client, "hours.txt", HOURS, "user_data")]
        store = await client.vector_stores.create(
            name="Staff handbook", description="For all", file_ids=files, metadata={"team": "people"}
        )
        assert (store.name, store.metadata, store.file_counts.total) == ("Staff handbook", {"team": "people"}, 2)
        done = await processed(client, store.id)
        assert (done.status, done.file_counts.completed) == ("completed", 2)
        assert done.usage_bytes == len(LEAVE) + len(HOURS) and done.expires_at is None

        pdf = make_pdf(["A page.", "The boiler needs water every second week."])
        upload = await client.uploads.upload_file_chunked(
            file=pdf, filename="boiler.pdf", bytes=len(pdf), mime_type="application/pdf", purpose="assistants",
            part_size=300,
        )  # fmt: skip
        assert upload.file is not None
        added = await client.vector_stores.files.create_and_poll(upload.file.id, vector_store_id=store.id)
        assert (added.status, added.last_error, added.usage_bytes) == ("completed", None, len(pdf))
        content = await client.files.content(added.id)
        assert content.read() == pdf

        found = await client.vector_stores.search(store.id, query="When does the office open?", max_num_results=2)
        assert (found.data[0].file_id, found.data[0].filename) == (files[1], "hours.txt")
        assert found.data[0].content[0].text == HOURS.decode().strip() and len(found.data) == 2
        assert 1.0 >= found.data[0].score > found.data[1].score >= 0.0
        strict = {"score_threshold": (found.data[0].score + found.data[1].score) / 2}
        again = await client.vector_stores.search(
            store.id,
            query="When does the office open?",
            ranking_options=strict,  # type: ignore[arg-type]
        )
        assert [one.file_id for one in again.data] == [files[1]]
        both = await client.vector_stores.search(store.id, query=["opening hours", "paid leave for parents"])
        assert {one.file_id for one in both.data[:2]} == set(files)
        plain = await client.vector_stores.search(store.id, query="boiler water", ranking_options={"ranker": "none"})
        assert plain.data[0].filename == "boiler.pdf" and 0.0 < plain.data[0].score <= 1.0

        # The same collection in the other API, which has a name for paths.
        seen = (await running.client.get(f"/v1/collections/{store.id}")).json()
        assert (seen["name"], seen["documents"]["ready"]) == ("Staff-handbook", 3)
        assert (await client.vector_stores.retrieve("Staff-handbook")).id == store.id

        changed = await client.vector_stores.update(store.id, name="Handbook", metadata=None)
        assert (changed.name, changed.metadata, changed.file_counts.total) == ("Handbook", {}, 3)
        twin = await client.vector_stores.create(name="Staff handbook")
        assert twin.name == "Staff handbook" and twin.id != store.id, "names are not unique"
        assert (await client.vector_stores.create()).file_counts.total == 0

        assert (await client.vector_stores.delete(store.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.vector_stores.retrieve(store.id)
        assert (await client.files.retrieve(files[0])).purpose == "assistants", "files outlive their stores"


async def test_files_of_a_store(serving: Serving, encoder_endpoint: str, tmp_path: Path) -> None:
    async with sdk(serving, encoder_endpoint, tmp_path) as (_, client):
        store = await client.vector_stores.create()
        files = client.vector_stores.files
        leave = await sent(client, "leave.md", LEAVE)
        made = await files.create_and_poll(
            leave,
            vector_store_id=store.id,
            attributes={"year": 2024, "public": True},
            chunking_strategy={
                "type": "static",
                "static": {"max_chunk_size_tokens": 120, "chunk_overlap_tokens": 60},
            },
        )
        sizes = made.chunking_strategy
        assert sizes is not None and sizes.type == "static"
        assert (sizes.static.max_chunk_size_tokens, sizes.static.chunk_overlap_tokens) == (120, 60)
        assert (made.status, made.attributes, made.vector_store_id) == (
            "completed", {"year": 2024, "public": True}, store.id,
        )  # fmt: skip
        changed = await files.update(leave, vector_store_id=store.id, attributes={"year": 2025, "by": "ann"})
        assert changed.attributes == {"year": 2025, "by": "ann"} and changed.status == "completed"
        text = await files.content(leave, vector_store_id=store.id)
        assert [part.text async for part in text] == [LEAVE.decode().partition("\n\n")[2].strip()]

        # The same content under another id is a file of its own, with its own attributes.
        copy = await sent(client, "copy.md", LEAVE)
        await files.create_and_poll(copy, vector_store_id=store.id, attributes={"year": 1999})
        old = await client.vector_stores.search(
            store.id, query="leave", filters={"type": "lt", "key": "year", "value": 2000}
        )
        assert [one.file_id for one in old.data] == [copy]

        with pytest.raises(openai.NotFoundError, match="no file"):
            await files.create(store.id, file_id="file-unknown")
        with pytest.raises(openai.BadRequestError) as refused:
            await files.create(store.id, file_id=await sent(client, "a.bin", b"\xff\xfe\x00\x01binary"))
        assert refused.value.code == "unsupported_file"
        batch_file = await sent(client, "b.jsonl", b"{}\n", "batch")
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await files.create(store.id, file_id=batch_file)
        with pytest.raises(openai.BadRequestError, match="window of"):
            await files.create(
                store.id,
                file_id=leave,
                chunking_strategy={
                    "type": "static", "static": {"max_chunk_size_tokens": 4096, "chunk_overlap_tokens": 0},
                },
            )  # fmt: skip
        with pytest.raises(openai.BadRequestError, match="half"):
            await files.create(
                store.id,
                file_id=leave,
                chunking_strategy={
                    "type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 51},
                },
            )  # fmt: skip

        gone = await files.delete(copy, vector_store_id=store.id)
        assert gone.deleted and (await client.files.retrieve(copy)).id == copy, "the file itself stays"
        with pytest.raises(openai.NotFoundError):
            await files.retrieve(copy, vector_store_id=store.id)
        await client.files.delete(leave)
        with pytest.raises(openai.NotFoundError):
            await files.retrieve(leave, vector_store_id=store.id)
        assert not (await client.vector_stores.search(store.id, query="paid leave")).data


async def test_batches(serving: Serving, encoder_endpoint: str, tmp_path: Path) -> None:
    async with sdk(serving, encoder_endpoint, tmp_path) as (running, client):
        store = await client.vector_stores.create(name="batched")
        batches = client.vector_stores.file_batches
        unreadable = await sent(client, "a.bin", b"\xff\xfe\x00\x01binary")
        made = await batches.upload_and_poll(
            store.id, files=[("leave.md", LEAVE), ("hours.txt", HOURS)], file_ids=[unreadable]
        )
        assert made.status == "completed"
        assert (made.file_counts.completed, made.file_counts.failed, made.file_counts.total) == (2, 1, 3)
        failed = [one async for one in batches.list_files(made.id, vector_store_id=store.id, filter="failed")]
        assert [one.id for one in failed] == [unreadable]
        assert failed[0].last_error is not None and failed[0].last_error.code == "unsupported_file"

        cats = await sent(client, "cats.txt", CATS)
        each = await batches.create_and_poll(store.id, files=[{"file_id": cats, "attributes": {"about": "cats"}}])
        assert each.file_counts.completed == 1
        assert (await batches.retrieve(each.id, vector_store_id=store.id)).id == each.id
        with pytest.raises(openai.BadRequestError, match="either"):
            await batches.create(store.id, file_ids=[cats], files=[{"file_id": cats}])
        with pytest.raises(openai.BadRequestError) as refused:
            await batches.create(store.id, file_ids=[f"file-{number}" for number in range(501)])
        assert refused.value.param == "file_ids"
        with pytest.raises(openai.NotFoundError):
            await batches.retrieve("vsfb_none", vector_store_id=store.id)

        # Nothing is ingested while the reader is away: what waits is cancelled, and nothing of it is found.
        knowledge = await running.parts.knowledge.library()
        await knowledge._ingestor.close()
        slow = await sent(client, "slow.txt", b"The zebra is striped.")
        waiting = await batches.create(store.id, file_ids=[slow, cats])
        assert (waiting.status, waiting.file_counts.in_progress, waiting.file_counts.completed) == ("in_progress", 1, 1)
        assert (await client.vector_stores.retrieve(store.id)).status == "in_progress"
        cancelled = await batches.cancel(waiting.id, vector_store_id=store.id)
        assert (cancelled.status, cancelled.file_counts.cancelled, cancelled.file_counts.completed) == (
            "cancelled",
            1,
            1,
        )
        file = await client.vector_stores.files.retrieve(slow, vector_store_id=store.id)
        assert (file.status, file.usage_bytes) == ("cancelled", 0)
        assert (await client.vector_stores.retrieve(store.id)).file_counts.cancelled == 1
        assert await knowledge.queue.waiting_tenants() == []


@pytest.mark.slow
async def test_filters_and_weights(serving: Serving, encoder_endpoint: str, tmp_path: Path) -> None:
    async with sdk(serving, encoder_endpoint, tmp_path) as (_, client):
        store = await client.vector_stores.create()
        ids = {}
        for year, kind in ((2022, "note"), (2023, "note"), (2024, "report")):
            body = f"The budget was decided in the meeting of {year}.".encode()
            ids[year] = await sent(client, f"{year}.txt", body)
            await client.vector_stores.files.create(
                store.id, file_id=ids[year], attributes={"year": year, "kind": kind}
            )
        await processed(client, store.id)

        async def years(**more: Any) -> set[int]:
            found = await client.vector_stores.search(store.id, query="When was the budget decided?", **more)
            return {year for year, id in ids.items() if id in {one.file_id for one in found.data}}

        assert await years() == {2022, 2023, 2024}
        notes = {"type": "eq", "key": "kind", "value": "note"}
        recent = {"type": "gte", "key": "year", "value": 2023}
        assert await years(filters=notes) == {2022, 2023}
        assert await years(filters={"type": "and", "filters": [notes, recent]}) == {2023}
        assert await years(filters={"type": "or", "filters": [notes, recent]}) == {2022, 2023, 2024}
        assert await years(filters={"type": "in", "key": "year", "value": [2022, 2024]}) == {2022, 2024}
        assert await years(filters={"type": "eq", "key": "nothing", "value": 1}) == set()
        for weights in ({"embedding_weight": 1, "text_weight": 0}, {"embedding_weight": 0, "text_weight": 1}):
            assert 2023 in await years(filters=recent, ranking_options={"hybrid_search": weights})
        for wrong, message in (
            ({"filters": {"type": "eq", "key": "x"}}, "`key` and a `value`"),
            ({"filters": {"type": "in", "key": "x", "value": "y"}}, "is a list"),
            ({"filters": {"type": "and", "key": "x"}}, "has `filters`"),
            ({"rewrite_query": True}, "rewrite_query"),
            ({"max_num_results": 51}, "max_num_results"),
            ({"ranking_options": {"ranker": "mine"}}, "ranker"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                await years(**wrong)


async def test_lists_are_walked_in_both_directions(serving: Serving, encoder_endpoint: str, tmp_path: Path) -> None:
    async with sdk(serving, encoder_endpoint, tmp_path) as (_, client):
        stores = [(await client.vector_stores.create(name=f"s{number}")).id for number in range(5)]
        assert [one.id async for one in client.vector_stores.list(limit=2)] == stores[::-1]
        assert [one.id async for one in client.vector_stores.list(limit=2, order="asc")] == stores
        back = await client.vector_stores.list(order="asc", before=stores[3], limit=2)
        assert [one.id for one in back.data] == stores[1:3] and back.has_more
        first = await client.vector_stores.list(order="asc", before=stores[1])
        assert [one.id for one in first.data] == stores[:1] and not first.has_more

        files = [await sent(client, f"{number}.txt", f"Number {number}.".encode()) for number in range(4)]
        for id in files:
            await client.vector_stores.files.create(stores[0], file_id=id)
        listed = client.vector_stores.files.list
        assert [one.id async for one in listed(stores[0], limit=3)] == files[::-1]
        page = await listed(stores[0], order="asc", after=files[0], before=files[3])
        assert [one.id for one in page.data] == files[1:3]
        assert [one.id async for one in listed(stores[0], filter="failed")] == []
        states = [[one async for one in listed(stores[0], filter=name)] for name in ("in_progress", "completed")]
        assert len(states[0]) + len(states[1]) >= 4, "one may end between the two questions"
        with pytest.raises(openai.NotFoundError):
            await client.vector_stores.list(after="col_unknown")


async def test_a_store_that_nobody_uses_expires(serving: Serving, encoder_endpoint: str, tmp_path: Path) -> None:
    async with sdk(serving, encoder_endpoint, tmp_path) as (running, client):
        file = await sent(client, "hours.txt", HOURS)
        store = await client.vector_stores.create(
            file_ids=[file], expires_after={"anchor": "last_active_at", "days": 2}
        )
        assert store.expires_after is not None and store.expires_after.days == 2
        assert store.last_active_at is not None and store.expires_at == store.last_active_at + 2 * 86400
        await processed(client, store.id)
        knowledge = await running.parts.knowledge.library()
        database = knowledge._database

        async def last_used(ago_s: float) -> None:
            await database.execute("UPDATE collections SET last_active_at = ?", time.time() - ago_s)

        await last_used(1.9 * 86400)
        await client.vector_stores.search(store.id, query="hours")
        used = (await client.vector_stores.retrieve(store.id)).last_active_at
        assert used is not None and used > time.time() - 60, "a search is a use"
        await last_used(2.1 * 86400)
        assert (await client.vector_stores.retrieve(store.id)).status == "expired"
        for refused in (
            client.vector_stores.search(store.id, query="hours"),
            client.vector_stores.files.create(store.id, file_id=file),
            client.vector_stores.update(store.id, expires_after=None),
        ):
            with pytest.raises(openai.BadRequestError, match="expired"):
                await refused
        rag = {"collection": store.id}
        assert (await running.chat(rag=rag)).status_code == 400
        # What was in it is deleted, by whichever gateway looks first.
        sweeping = asyncio.create_task(knowledge._sweep())
        for _ in range(6000):
            if not (emptied := (await client.vector_stores.retrieve(store.id)).file_counts.total):
                break
            await asyncio.sleep(0.01)
        sweeping.cancel()
        assert emptied == 0 and await knowledge.catalogue.expired_collections() == []
        assert (await client.vector_stores.delete(store.id)).deleted


async def test_another_gateway_goes_on_where_one_died(serving: Serving, encoder_endpoint: str, tmp_path: Path) -> None:
    async with sdk(serving, encoder_endpoint, tmp_path) as (running, client):
        await (await running.parts.knowledge.library())._ingestor.close()  # nothing is read here any more
        store = await client.vector_stores.create()
        made = await client.vector_stores.file_batches.create(
            store.id, file_ids=[await sent(client, "hours.txt", HOURS), await sent(client, "cats.txt", CATS)]
        )
        assert made.status == "in_progress"
        async with sdk(serving, encoder_endpoint, tmp_path) as (_, other):
            done = await other.vector_stores.file_batches.poll(made.id, vector_store_id=store.id)
            assert (done.status, done.file_counts.completed) == ("completed", 2)
        again = await client.vector_stores.file_batches.retrieve(made.id, vector_store_id=store.id)
        assert again.status == "completed"
        found = await client.vector_stores.search(store.id, query="When does the office open?", max_num_results=1)
        assert found.data[0].filename == "hours.txt"


@pytest.mark.slow
async def test_the_example_of_the_page(
    serving: Serving, encoder_endpoint: str, tmp_path: Path, text: TextModel, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 2
    call = calls(("file_search", {"queries": ["When does the office open?"]}))
    engine = script(text, call, "At eight in the morning [1].")
    async with library(serving, encoder_endpoint, tmp_path, engine) as running:
        code = "\n".join(blocks).replace("127.0.0.1:8000", f"127.0.0.1:{running.port}").replace("smollm2-135m", "tiny")
        await asyncio.to_thread(exec, compile(code, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "completed 2" and printed[1].startswith("hours.txt 0.")
    assert printed[2].startswith("['When does the office open?'] ['hours.txt'")
    assert printed[3] == "At eight in the morning [1]."


async def test_tenants_are_apart(serving: Serving, encoder_endpoint: str, tmp_path: Path) -> None:
    async with library(serving, encoder_endpoint, tmp_path) as running:
        for tenant in ("acme", "beta"):
            await running.client.post("/v1/admin/tenants", json={"id": tenant})
        admin = await make_key(running, scopes=["admin", "inference"])
        key, other = [await make_key(running, admin, tenant=tenant) for tenant in ("acme", "beta")]
        async with client_of(running, key) as acme, client_of(running, other) as beta:
            file = await sent(acme, "leave.md", LEAVE)
            store = await acme.vector_stores.create(name="secret", file_ids=[file])
            batch = await acme.vector_stores.file_batches.create(store.id, file_ids=[file])
            stores = beta.vector_stores
            for hidden in (
                stores.retrieve(store.id),
                stores.retrieve("secret"),
                stores.update(store.id, name="mine"),
                stores.delete(store.id),
                stores.search(store.id, query="leave"),
                stores.files.create(store.id, file_id=file),
                stores.files.retrieve(file, vector_store_id=store.id),
                stores.files.content(file, vector_store_id=store.id),
                stores.files.update(file, vector_store_id=store.id, attributes={}),
                stores.files.delete(file, vector_store_id=store.id),
                stores.file_batches.retrieve(batch.id, vector_store_id=store.id),
                stores.file_batches.cancel(batch.id, vector_store_id=store.id),
            ):
                with pytest.raises(openai.NotFoundError) as refused:
                    await hidden
                assert refused.value.code == "vector_store_not_found"
            assert [one async for one in stores.list()] == []
            mine = await stores.create(name="secret")
            assert mine.name == "secret", "names of others do not show"
            with pytest.raises(openai.NotFoundError):
                await stores.files.create(mine.id, file_id=file)
            with pytest.raises(openai.NotFoundError):
                await stores.create(file_ids=[file])
            with pytest.raises(openai.NotFoundError):
                await stores.files.retrieve(file, vector_store_id=mine.id)
            assert (await processed(acme, store.id)).file_counts.completed == 1


async def test_quotas_are_those_of_collections(serving: Serving, encoder_endpoint: str, tmp_path: Path) -> None:
    config = KnowledgeConfig(collections_per_tenant=2, documents_per_collection=1, document_limit=1024)
    async with sdk(serving, encoder_endpoint, tmp_path, knowledge=config) as (_, client):
        files = [await sent(client, "a.txt", HOURS), await sent(client, "b.txt", CATS)]
        store = await client.vector_stores.create()
        with pytest.raises(openai.RateLimitError):
            await client.vector_stores.create(file_ids=files)
        listed = [one.id async for one in client.vector_stores.list()]
        assert listed == [store.id], "a store that cannot have its files does not stay behind"
        await client.vector_stores.create()
        with pytest.raises(openai.RateLimitError):
            await client.vector_stores.create()
        await client.vector_stores.files.create(store.id, file_id=files[0])
        with pytest.raises(openai.RateLimitError):
            await client.vector_stores.files.create(store.id, file_id=files[1])
        large = await sent(client, "large.txt", b"word " * 1000)
        with pytest.raises(openai.BadRequestError, match="at most 1,024"):
            await client.vector_stores.files.create(store.id, file_id=large)
