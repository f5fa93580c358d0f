"""/v1/files as Anthropic's SDK calls it, over the same files as OpenAI's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest

from penstock.identity import IdentityStore
from penstock.storage import open_database
from penstock.text import TextModel
from tests.gateway.api.test_messages_of_agents import long_window
from tests.gateway.batches.test_batches import client_of
from tests.gateway.conftest import Running, Serving

NOTE = b"Ann is 41."


def claude(running: Running, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{running.port}", api_key=key, max_retries=0)


def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'files.db'}"


@pytest.mark.parametrize("beta", [True, False])
async def test_the_life_of_a_file(serving: Serving, text: TextModel, tmp_path: Path, beta: bool) -> None:
    async with serving(long_window(text), store_url=store(tmp_path)) as running, client_of(running) as other:
        client = claude(running)
        files: Any = client.beta.files if beta else client.files
        made = await files.upload(file=("notes/ann", NOTE, "text/markdown; charset=utf-8"), expires_in_seconds=7200)
        assert (made.type, made.filename, made.mime_type, made.size_bytes) == ("file", "ann", "text/markdown", 10)
        assert made.downloadable and made.expires_at is not None
        assert (made.expires_at - made.created_at).total_seconds() == 7200
        again = await files.retrieve_metadata(made.id)
        assert again == made
        assert await (await files.download(made.id)).read() == NOTE
        block: Any = {"type": "document", "source": {"type": "file", "file_id": made.id}}
        await client.messages.create(model="tiny", max_tokens=9, messages=[{"role": "user", "content": [block]}])
        assert "ann\nAnn is 41." in text.decode(running.engine.seen[-1].prompt)
        # The same files, whoever sent them, newest first, in pages.
        (csv,) = [await other.files.create(file=("people.csv", b"a,b"), purpose="user_data")]
        unnamed = await files.upload(file=("", b"{}"))
        assert (unnamed.filename, unnamed.mime_type) == ("file", "application/octet-stream")
        listed = [file async for file in files.list(limit=1)]
        assert [file.id for file in listed] == [unnamed.id, csv.id, made.id]
        assert listed[1].mime_type == "text/csv"
        old = await running.client.get(
            f"/v1/files?limit=1&after_id={unnamed.id}", headers={"anthropic-version": "2023-06-01"}
        )
        assert (old.json()["last_id"], old.json()["has_more"]) == (csv.id, True)
        assert [file.id async for file in files.list(ids=[made.id, "file-none", made.id])] == [made.id]
        assert [file.purpose async for file in other.files.list(order="asc")] == ["user_data"] * 3
        parts = await other.uploads.create(bytes=2, filename="in-parts", mime_type="Text/HTML", purpose="user_data")
        part = await other.uploads.parts.create(parts.id, data=b"ab")
        whole = (await other.uploads.complete(parts.id, part_ids=[part.id])).file
        assert whole is not None and (await files.retrieve_metadata(whole.id)).mime_type == "text/html"
        gone = await files.delete(made.id)
        assert (gone.id, gone.type) == (made.id, "file_deleted")
        with pytest.raises(anthropic.NotFoundError, match="There is no file"):
            await files.retrieve_metadata(made.id)
        for wrong in (
            files.upload(file=("a", b"")),
            files.upload(file=("a", b"x"), expires_in_seconds=60),
            files.upload(file=("a", b"x"), extra_body={"purpose": "batch"}),
            files.list(page="nonsense"),
            files.list(limit=0),
            files.list(ids=["a"], limit=3),
        ):
            with pytest.raises(anthropic.BadRequestError) as refused:
                await wrong
            assert refused.value.body["type"] == "error"  # type: ignore[index]


async def test_ids_that_no_file_has(serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NUL in an id is no file's, and nothing that PostgreSQL could be asked for."""
    asked: list[Any] = []
    async with serving(store_url=store(tmp_path)) as running:
        database = running.parts.database
        assert database is not None
        fetch = database.fetch

        async def noted(sql: str, *values: Any) -> Any:
            asked.extend(values)
            return await fetch(sql, *values)

        monkeypatch.setattr(database, "fetch", noted)
        paths = ["/v1/files/a%00", "/v1/files/a%00/content", "/v1/files?after=a%00"]
        for path, headers in [*((path, {}) for path in paths), (paths[0], {"anthropic-version": "2023-06-01"})]:
            assert (await running.client.get(path, headers=headers)).status_code == 404
        assert (await running.client.delete("/v1/files/a%00")).status_code == 404
        assert (await running.client.post("/v1/uploads/a%00/cancel")).status_code == 404
        assert (await running.client.get("/v1/files?purpose=a%00")).status_code == 400
        assert not any(isinstance(value, str) and "\0" in value for value in asked)


async def test_files_of_other_tenants_do_not_exist(serving: Serving, tmp_path: Path) -> None:
    database = await open_database(store(tmp_path))
    identities = IdentityStore(database)
    await identities.prepare()
    keys = []
    for tenant in ("acme", "beta"):
        await identities.create_tenant(tenant)
        keys.append((await identities.create_key(tenant))[1].text)
    await database.close()
    async with serving(store_url=store(tmp_path)) as running:
        acme, beta = (claude(running, key).beta.files for key in keys)
        made = await acme.upload(file=("secret.txt", NOTE))
        assert [file.id async for file in beta.list()] == []
        assert [file.id async for file in beta.list(ids=[made.id])] == []
        for forbidden in (beta.retrieve_metadata, beta.download, beta.delete):
            with pytest.raises(anthropic.NotFoundError):
                await forbidden(made.id)
        with pytest.raises(anthropic.NotFoundError):
            await beta.list(page=f"page_{made.id}")
        assert [file.id async for file in acme.list()] == [made.id]
