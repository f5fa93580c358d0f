"""Files that arrive in parts, with the official client, on real gateways and both databases."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.cli import batch as batch_command
from penstock.config.batches import BatchesConfig
from penstock.gateway.batches import upload_endpoints
from penstock.gateway.batches.files import FileStore
from penstock.gateway.batches.uploads import DELETED_AT_ONCE, OPEN_S, PIECE, SHOWN_S
from penstock.storage import DatabaseError, Statement, open_database
from tests.gateway.accounting.test_quotas import sign_in
from tests.gateway.batches.test_batches import client_of, jsonl, lines, over, request, settings, store_url
from tests.gateway.conftest import Serving, until

__all__ = ["store_url"]
TEXT = "".join(f"ä line {number} of ☃\n" for number in range(200)).encode()


async def begun(client: openai.AsyncOpenAI, size: int, **more: Any) -> Any:
    return await client.uploads.create(
        bytes=size, filename="in.jsonl", mime_type="application/jsonl", purpose="batch", **more
    )


async def test_a_batch_runs_from_a_file_that_came_in_parts(serving: Serving, tmp_path: Path) -> None:
    content = jsonl(*(request(f"lïne {number}") for number in range(4)))
    path = tmp_path / "questions.jsonl"
    path.write_bytes(content)
    async with serving(**settings(f"sqlite:///{tmp_path / 'x.db'}")) as running, client_of(running) as client:
        # Small parts, which cut lines and characters.
        upload = await client.uploads.upload_file_chunked(
            file=path,
            mime_type="application/jsonl",
            purpose="batch",
            part_size=101,
            md5=hashlib.md5(content).hexdigest(),
        )
        assert (upload.status, upload.bytes, upload.filename) == ("completed", len(content), "questions.jsonl")
        assert upload.expires_at == upload.created_at + 3600 and upload.file is not None
        assert (upload.file.bytes, upload.file.purpose) == (len(content), "batch")
        assert (await client.files.content(upload.file.id)).content == content
        assert (await client.files.wait_for_processing(upload.file.id)).status == "processed"
        made = await client.batches.create(
            input_file_id=upload.file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        batch = await over(client, made.id)
        assert len(lines((await client.files.content(batch.output_file_id)).text)) == 4
        assert (await client.files.delete(upload.file.id)).deleted


async def test_parts_go_where_the_list_puts_them_through_any_gateway(serving: Serving, store_url: str) -> None:
    async with (
        serving(**settings(store_url)) as one,
        serving(**settings(store_url)) as other,
        client_of(one) as here,
        client_of(other) as there,
    ):
        upload = await begun(here, len(TEXT), expires_after={"anchor": "created_at", "seconds": 7200})
        cut, unused = len(TEXT) // 2 + 1, b"sent twice"
        last = await there.uploads.parts.create(upload.id, data=TEXT[cut:])
        first = await here.uploads.parts.create(upload.id, data=TEXT[:cut])
        await here.uploads.parts.create(upload.id, data=unused)
        assert first.upload_id == upload.id and first.object == "upload.part"
        for wrong, param in (
            ([first.id], "part_ids"),
            ([first.id, last.id, last.id], "part_ids"),
            ([first.id, "part_1"], "part_ids[1]"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await here.uploads.complete(upload.id, part_ids=wrong)
            assert refused.value.param == param
        with pytest.raises(openai.BadRequestError, match="MD5 sum"):
            await here.uploads.complete(upload.id, part_ids=[first.id, last.id], md5="0" * 32)
        # Two gateways complete it at once: there is one file, which both show.
        order = [first.id, last.id]
        done = await asyncio.gather(*(client.uploads.complete(upload.id, part_ids=order) for client in (here, there)))
        (file,) = {one.file.id for one in done}
        assert [entry.id async for entry in here.files.list()] == [file]
        assert (await there.files.content(file)).content == TEXT
        assert done[0].file.expires_at == done[0].file.created_at + 7200
        assert (await here.uploads.complete(upload.id, part_ids=order)).file.id == file  # type: ignore[union-attr]
        with pytest.raises(openai.BadRequestError, match="is completed"):
            await here.uploads.complete(upload.id, part_ids=order[::-1])
        with pytest.raises(openai.BadRequestError, match="is completed"):
            await here.uploads.parts.create(upload.id, data=b"more")
        assert one.parts.database is not None
        assert not await one.parts.database.fetch("SELECT 1 FROM upload_pieces")


async def test_the_command_sends_large_files_in_parts(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.jsonl"
    path.write_bytes(TEXT)
    monkeypatch.setattr(batch_command, "PART", 1000)
    # More than a file that is sent whole may have.
    limits = BatchesConfig(file_limit=2048)
    async with (
        serving(**settings(f"sqlite:///{tmp_path / 'x.db'}", batches=limits)) as running,
        client_of(running) as c,
    ):
        id = await asyncio.to_thread(batch_command._sent, path, f"http://127.0.0.1:{running.port}", None)
        assert (await c.files.content(id)).content == TEXT
        assert (await c.files.retrieve(id)).filename == "large.jsonl"
        path.write_bytes(b"small\n")
        await asyncio.to_thread(batch_command._sent, path, f"http://127.0.0.1:{running.port}", None)
        assert len([file async for file in c.files.list()]) == 2


async def test_what_is_cancelled_or_too_old_is_gone(store_url: str) -> None:
    database, now = await open_database(store_url), [1000.0]
    files = FileStore(database, keep_s=1e6, clock=lambda: now[0])
    await files.prepare()
    uploads = files.uploads

    async def rows() -> list[int]:
        found = [await database.fetch(f"SELECT COUNT(*) FROM {name}") for name in ("upload_parts", "upload_pieces")]
        return [int(one[0][0]) for one in found]

    about: Any = {"mime_type": "text/plain", "size": PIECE + 5}
    cancelled, expired = [await uploads.create("t", "a", "batch", **about) for _ in range(2)]
    for upload in (cancelled, expired):
        assert await uploads.add_part(upload, b"x" * (PIECE + 5))
    assert await rows() == [2, 4] and await files.used("t") == 2 * (PIECE + 5)
    # A part may be sent again, but not without end; what is refused leaves nothing.
    assert await uploads.add_part(expired, b"y" * (PIECE + 5))
    assert await files.used("t") == 3 * (PIECE + 5)
    assert await uploads.add_part(expired, b"z") is None
    assert await rows() == [3, 6]
    assert await uploads.cancel(cancelled.id) and not await uploads.cancel(cancelled.id)
    assert await rows() == [2, 4] and await uploads.add_part(cancelled, b"late") is None
    now[0] += OPEN_S
    found = await uploads.get(expired.id, "t")
    assert found is not None and found.status == "expired" and await files.used("t") == 0
    assert await uploads.add_part(expired, b"late") is None
    await files.sweep()
    assert await rows() == [0, 0] and await uploads.get(expired.id, "t") is not None
    now[0] += SHOWN_S
    await files.sweep()
    assert await uploads.get(expired.id, "t") is None
    await database.close()


async def test_a_part_that_cannot_be_stored_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent again; its first copies must not fill the disk, where no limit counts them."""
    database = await open_database(f"sqlite:///{tmp_path / 'x.db'}")
    files = FileStore(database, keep_s=1e6)
    await files.prepare()
    upload = await files.uploads.create("t", "a", "batch", mime_type="text/plain", size=3 * PIECE)
    execute, written = database.execute, list[str]()

    async def full(sql: str, *values: Any) -> int:
        written.append(sql)
        if len(written) == 3:
            raise DatabaseError("disk full")
        return await execute(sql, *values)

    monkeypatch.setattr(database, "execute", full)
    assert await files.uploads.add_part(upload, b"x" * (6 * PIECE + 1)) is None
    assert not written  # what is refused is not written first
    with pytest.raises(DatabaseError, match="full"):
        await files.uploads.add_part(upload, b"x" * (3 * PIECE))
    assert not await database.fetch("SELECT 1 FROM upload_pieces") and not await files.uploads.sizes(upload.id)
    assert await files.uploads.add_part(upload, b"x" * (3 * PIECE))
    assert list((await files.uploads.sizes(upload.id)).values()) == [3 * PIECE]
    await database.close()


async def test_deleting_lets_others_write(tmp_path: Path) -> None:
    """Nothing large is deleted in one statement: charges of requests wait for it."""
    database = await open_database(f"sqlite:///{tmp_path / 'x.db'}")
    files = FileStore(database, keep_s=1e6)
    await files.prepare()
    size, part = 3 * DELETED_AT_ONCE, b"x"
    most = 0
    transact = database.transact

    async def counted(statements: Sequence[Statement], **how: Any) -> list[int]:
        nonlocal most
        counts = await transact(statements, **how)
        deleted = [count for (sql, _), count in zip(statements, counts, strict=False) if "_pieces" in sql]
        most = max(most, *deleted, 0)
        return counts

    upload = await files.uploads.create("t", "a", "assistants", mime_type="text/plain", size=size)
    ids = [await files.uploads.add_part(upload, part) for _ in range(size)]
    writer = await files.begin_document("t", "a", "assistants")
    for _ in range(size):
        await writer.add(part)
    database.transact = counted  # type: ignore[method-assign]
    assert await files.uploads.complete(upload, writer.file.id, [id for id in ids if id], writer.finished())
    assert await files.used("t") == size
    await files.delete(writer.file.id)
    assert 1 < most <= DELETED_AT_ONCE and await files.used("t") == 0
    for table in ("upload_pieces", "upload_parts", "file_pieces", "files"):
        assert not await database.fetch(f"SELECT 1 FROM {table}"), table
    # Where a gateway died meanwhile, the rest is swept.
    await database.execute("INSERT INTO upload_pieces VALUES ('p', 0, ?, ?)", upload.id, b"x")
    await database.execute("INSERT INTO file_pieces VALUES ('f', 0, ?)", b"x")
    await database.execute("INSERT INTO files VALUES ('f', 't', 'a', 'assistants', 1, 0, 0, 0, '', '')")
    await files.sweep()
    for table in ("upload_pieces", "file_pieces", "files"):
        assert not await database.fetch(f"SELECT 1 FROM {table}"), table
    await database.close()


async def test_old_files_are_deleted_where_no_batches_run(serving: Serving, tmp_path: Path) -> None:
    options = settings(f"sqlite:///{tmp_path / 'x.db'}", batches=BatchesConfig(lines_at_once=0))
    async with serving(**options) as running:
        about = {"bytes": 4, "filename": "a", "mime_type": "text/plain", "purpose": "batch"}
        at = "/v1/uploads/" + (await running.client.post("/v1/uploads", json=about)).json()["id"]
        assert (await running.client.post(f"{at}/parts", files={"data": b"abc\n"})).status_code == 200
        assert running.parts.database is not None
        await running.parts.database.execute("UPDATE uploads SET expires_at = 1")
    async with serving(**options) as running:
        database = running.parts.database
        assert database is not None
        assert not await until(lambda: database.fetch("SELECT 1 FROM upload_pieces"), lambda rows: not rows)


async def test_uploads_that_begin_together_share_the_room(serving: Serving, store_url: str) -> None:
    limits = BatchesConfig(upload_limit=4096, tenant_limit=8192)
    about = {"bytes": 4096, "filename": "a", "mime_type": "text/plain", "purpose": "batch"}
    async with (
        serving(**settings(store_url, batches=limits)) as one,
        serving(**settings(store_url, batches=limits)) as other,
    ):
        replies = await asyncio.gather(*(
            running.client.post("/v1/uploads", json=about) for _ in range(8) for running in (one, other)
        ))  # fmt: skip
        made = [reply.status_code for reply in replies].count(200)
        assert made <= 2 and {reply.json()["error"]["code"] for reply in replies if reply.status_code == 400} == {
            "storage_limit"
        }
        # What was refused is not counted.
        for _ in range(2 - made):
            assert (await one.client.post("/v1/uploads", json=about)).status_code == 200
        assert (await other.client.post("/v1/uploads", json=about)).status_code == 400
        assert one.parts.database is not None
        assert await one.parts.database.fetch("SELECT COUNT(*) FROM uploads") == [(2,)]


async def test_what_is_wrong_is_refused(serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = BatchesConfig(file_limit=1024, upload_limit=4096, tenant_limit=6000)
    monkeypatch.setattr(upload_endpoints, "PART_LIMIT", 3000)
    monkeypatch.setattr(upload_endpoints, "MOST_OPEN", 3)
    async with (
        serving(**settings(f"sqlite:///{tmp_path / 'x.db'}", batches=limits)) as running,
        client_of(running) as c,
    ):

        async def refused(status: int, word: str, path: str, **body: Any) -> None:
            reply: httpx.Response = await running.client.post(f"/v1/uploads{path}", **body)
            assert reply.status_code == status and word in reply.json()["error"]["message"], reply.text

        whole = {"bytes": 10, "filename": "a", "mime_type": "text/plain", "purpose": "batch"}
        await refused(413, "4096", "", json={**whole, "bytes": 5000})
        await refused(400, "bytes", "", json={**whole, "bytes": 0})
        await refused(400, "`purpose`", "", json={**whole, "purpose": "fine-tune"})
        await refused(400, "seconds", "", json={**whole, "expires_after": {"anchor": "created_at", "seconds": 5}})
        await refused(400, "color", "", json={**whole, "color": "red"})
        await refused(404, "no upload", "/upload_1/parts", files={"data": b"x"})
        await refused(404, "no upload", "/upload_1/complete", json={"part_ids": ["part_1"]})
        await refused(404, "no upload", "/upload_1/cancel")
        # What is open counts as used.
        first = await begun(c, 4000)
        await refused(400, "Delete some", "", json={**whole, "bytes": 2001})
        await refused(413, "3000", f"/{first.id}/parts", files={"data": b"x" * 3001})
        await refused(400, "data", f"/{first.id}/parts", files={"data": b""})
        await refused(400, "Unknown", f"/{first.id}/parts", files={"more": b"x"})
        await refused(400, "md5", f"/{first.id}/complete", json={"part_ids": ["a"], "md5": "short"})
        assert (await c.uploads.cancel(first.id)).status == "cancelled"
        assert (await c.uploads.cancel(first.id)).status == "cancelled"
        await refused(400, "is cancelled", f"/{first.id}/parts", files={"data": b"x"})
        for content, word in ((b"a\0b", "NUL"), (b"\xff\xfe", "UTF-8"), (b"x" * 1025, "1,024 characters")):
            upload = await begun(c, len(content))
            part = await c.uploads.parts.create(upload.id, data=content)
            await refused(400, word, f"/{upload.id}/complete", json={"part_ids": [part.id]})
        assert not [file async for file in c.files.list()]
        assert running.parts.database is not None and not await running.parts.database.fetch("SELECT 1 FROM files")
        await refused(429, "open", "", json=whole)
    async with serving() as running:
        assert (await running.client.post("/v1/uploads", json=whole)).status_code == 503


async def test_tenants_do_not_see_each_other(serving: Serving, tmp_path: Path) -> None:
    async with serving(**settings(f"sqlite:///{tmp_path / 'x.db'}")) as running:
        await sign_in(running, "acme")
        running.admin = running.client.headers["authorization"]  # type: ignore[attr-defined]
        about = {"bytes": 4, "filename": "a", "mime_type": "text/plain", "purpose": "batch"}
        at = "/v1/uploads/" + (await running.client.post("/v1/uploads", json=about)).json()["id"]
        part = (await running.client.post(f"{at}/parts", files={"data": b"abc\n"})).json()["id"]
        await sign_in(running, "rival")
        for reply in (
            await running.client.post(f"{at}/parts", files={"data": b"x"}),
            await running.client.post(f"{at}/complete", json={"part_ids": [part]}),
            await running.client.post(f"{at}/cancel"),
        ):
            assert reply.status_code == 404
        # Nor does a part of another's upload make a file.
        own = "/v1/uploads/" + (await running.client.post("/v1/uploads", json=about)).json()["id"]
        stolen = await running.client.post(f"{own}/complete", json={"part_ids": [part]})
        assert stolen.status_code == 400 and "no part" in stolen.json()["error"]["message"]
        running.client.headers["authorization"] = running.admin  # type: ignore[attr-defined]
        done = await running.client.post(f"{at}/complete", json={"part_ids": [part]})
        assert done.json()["file"]["bytes"] == 4


async def test_a_document_may_be_any_bytes(serving: Serving, tmp_path: Path) -> None:
    content = bytes(range(256)) * 20
    async with serving(**settings(f"sqlite:///{tmp_path / 'x.db'}")) as running, client_of(running) as client:
        upload = await client.uploads.upload_file_chunked(
            file=content,
            filename="picture.bin",
            bytes=len(content),
            mime_type="application/octet-stream",
            purpose="user_data",
            part_size=1001,
            md5=hashlib.md5(content).hexdigest(),
        )
        assert upload.file is not None and upload.file.purpose == "user_data"
        assert (await client.files.content(upload.file.id)).content == content
