"""Files as input, through the official SDKs: their text reaches the model under their name, however it is asked."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from penstock.config.input_files import InputFilesConfig
from penstock.config.schema import TierConfig
from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.batches import files
from penstock.gateway.generation import input_files
from penstock.gateway.generation.input_files import FETCHES_OF_A_TENANT
from penstock.identity import IdentityStore
from penstock.knowledge.entities import UnreadableDocument
from penstock.knowledge.readers import process, read
from penstock.knowledge.readers.process import ReaderProcess
from penstock.knowledge.readers.worker import Result
from penstock.storage import open_database
from penstock.text import TextModel
from tests.gateway.api.test_background_responses import ended
from tests.gateway.api.test_messages_of_agents import long_window
from tests.gateway.batches.test_batches import client_of, jsonl, lines, over
from tests.gateway.conftest import Running, Serving, eventually
from tests.gateway.generation.test_file_urls import Web
from tests.knowledge.files import make_pdf

CSV = b"name,age\nAnn,41\n"
SHOWN = "File people.csv:\nname,age\nAnn,41\n\n\n"
Parts = Any


def b64(body: bytes, kind: str = "") -> str:
    data = base64.b64encode(body).decode()
    return f"data:{kind};base64,{data}" if kind else data


def settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"store_url": f"sqlite:///{tmp_path / 'files.db'}", "gateway_timeout_s": 0.4, **more}


def prompt(running: Running, text: TextModel) -> str:
    return text.decode(running.engine.seen[-1].prompt, skip_special=False)


def claude(running: Running, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{running.port}", api_key=key, max_retries=0)


@pytest.fixture
def pdf_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reads PDFs in this process, which is quicker than to start another; `test_readers.py` has the other."""

    async def text_of(self: Any, body: bytes, media_type: str) -> str:
        return read(body, media_type).text

    monkeypatch.setattr(input_files.ReaderProcess, "text", text_of)
    yield


async def test_chats_responses_and_token_counts_read_files(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(long_window(text), **settings(tmp_path)) as running, client_of(running) as client:
        file = await client.files.create(file=("people.csv", CSV), purpose="user_data")
        question = {"type": "text", "text": "How old is Ann?"}
        expected = f"<|user|>{SHOWN}How old is Ann?<|end|><|assistant|>"
        sent = {"filename": "people.csv", "file_data": b64(CSV, "text/csv")}
        for given in ({"file_id": file.id}, sent):
            message: Any = {"role": "user", "content": [{"type": "file", "file": given}, question]}
            chat = await client.chat.completions.create(model="tiny", messages=[message])
            assert prompt(running, text) == expected
            assert chat.usage is not None and chat.usage.prompt_tokens == len(running.engine.seen[-1].prompt)
            part: Any = {"type": "input_file", **given}
            item: Any = {"role": "user", "content": [part, {"type": "input_text", "text": "How old is Ann?"}]}
            response = await client.responses.create(model="tiny", input=[item])
            assert prompt(running, text) == expected
            assert response.usage is not None and response.usage.input_tokens == chat.usage.prompt_tokens
            counted = await client.responses.input_tokens.count(model="tiny", input=[item])
            assert counted.input_tokens == chat.usage.prompt_tokens
        tokens = await running.client.post("/tokenize", json={"model": "tiny", "messages": [message]})
        assert tokens.json()["count"] == chat.usage.prompt_tokens

        # Streamed; and what was sent is what is shown, and can be continued after the file is gone.
        item["content"][0] = {"type": "input_file", "file_id": file.id, "detail": "high"}
        async with client.responses.stream(model="tiny", input=[item]) as stream:
            streamed = await stream.get_final_response()
        assert prompt(running, text) == expected and streamed.output_text == "Done."
        (kept,) = (await client.responses.input_items.list(streamed.id)).data
        assert kept.content[0].file_id == file.id  # type: ignore[union-attr]
        compact = await client.responses.compact(model="tiny", input=[item])
        assert SHOWN in compact.output[0].content[0].text  # type: ignore[union-attr]
        talk = await client.conversations.create(items=[item])
        work = await client.responses.create(model="tiny", input=[item], background=True)
        assert (await ended(running, work.id))["status"] == "completed"
        assert prompt(running, text) == expected
        await client.files.delete(file.id)
        await client.responses.create(model="tiny", input="Sure?", previous_response_id=streamed.id)
        assert prompt(running, text) == f"<|user|>{SHOWN}How old is Ann?<|end|><|assistant|>Done.<|end|>" + (
            "<|user|>Sure?<|end|><|assistant|>"
        )
        await client.responses.create(model="tiny", input="Sure?", conversation=talk.id)
        assert SHOWN in prompt(running, text)
        # What a tool returned.
        call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
        result: Any = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file", **sent}]}
        await client.responses.create(model="tiny", input=[call, result])  # type: ignore[list-item]
        assert SHOWN in prompt(running, text)


async def test_documents_of_messages(serving: Serving, text: TextModel, tmp_path: Path, pdf_here: None) -> None:
    async with serving(long_window(text), **settings(tmp_path)) as running, client_of(running) as client:
        file = await client.files.create(file=("people.csv", CSV), purpose="user_data")
        messages, read_as = claude(running).messages, "people.csv\nname,age\nAnn,41\n\n\nHow old is Ann?"
        pdf = b64(make_pdf(["Ann is 41."]))
        for source, expected in (
            ({"type": "file", "file_id": file.id}, read_as),
            ({"type": "base64", "media_type": "text/plain", "data": b64(CSV)}, read_as.removeprefix("people.csv\n")),
            ({"type": "base64", "media_type": "application/pdf", "data": pdf}, "<|user|>Ann is 41."),
            ({"type": "text", "media_type": "text/plain", "data": "Ann is 41."}, "<|user|>Ann is 41.\n\nHow"),
            ({"type": "content", "content": "Ann is 41."}, "<|user|>Ann is 41.\n\nHow"),
        ):
            block: Any = {"type": "document", "source": source}
            turn: Any = {"role": "user", "content": [block, {"type": "text", "text": "How old is Ann?"}]}
            await messages.create(model="tiny", max_tokens=50, messages=[turn])
            assert expected in prompt(running, text), source
            counted = await messages.count_tokens(model="tiny", messages=[turn])
            assert counted.input_tokens == len(running.engine.seen[-1].prompt)
        titled = {"type": "document", "source": {"type": "file", "file_id": file.id}, "title": "People"}
        await messages.create(model="tiny", max_tokens=50, messages=[{"role": "user", "content": [titled]}])  # type: ignore[list-item]
        assert "<|user|>People\nname,age" in prompt(running, text)
        # A tool's document that cannot be read becomes a note, a user's is refused.
        image = {"type": "base64", "media_type": "application/pdf", "data": b64(b"\x89PNG\0")}
        use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "document", "source": image}]}
        history: Any = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        await messages.create(model="tiny", max_tokens=50, messages=[{"role": "user", "content": "hi"}, *history])
        assert "[a document that is not text" in prompt(running, text)
        for source, error in (
            (image, "not text. Models here read text in UTF-8"),
            ({"type": "url", "url": "https://example.org/x.pdf"}, "not fetched from URLs"),
            ({"type": "base64", "media_type": "text/plain", "data": "?"}, "not base64"),
        ):
            turn = {"role": "user", "content": [{"type": "document", "source": source}]}
            with pytest.raises(anthropic.BadRequestError, match=error):
                await messages.create(model="tiny", max_tokens=50, messages=[turn])


async def test_batches_read_files(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    async with serving(long_window(text), **settings(tmp_path)) as running, client_of(running) as client:
        file = await client.files.create(file=("people.csv", CSV), purpose="user_data")
        asked = [
            {"custom_id": id, "method": "POST", "url": "/v1/chat/completions", "body": {"model": "tiny", "messages": [
                {"role": "user", "content": [{"type": "file", "file": {"file_id": named}}]}]}}
            for id, named in (("a", file.id), ("b", "file-none"))
        ]  # fmt: skip
        input = await client.files.create(file=("in.jsonl", jsonl(*asked)), purpose="batch")
        made = await client.batches.create(
            input_file_id=input.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        batch = await over(client, made.id)
        assert prompt(running, text) == f"<|user|>{SHOWN}<|end|><|assistant|>"
        errors = lines((await client.files.content(batch.error_file_id)).text)
        assert errors["b"]["response"]["status_code"] == 404


async def test_files_of_others_do_not_exist(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    url = settings(tmp_path)["store_url"]
    database = await open_database(url)
    identities = IdentityStore(database)
    await identities.prepare()
    keys = []
    for tenant in ("acme", "beta"):
        await identities.create_tenant(tenant)
        keys.append((await identities.create_key(tenant))[1].text)
    users = [(await identities.create_key("acme", user=user))[1].text for user in ("ann", "ben")]
    async with serving(long_window(text), **settings(tmp_path)) as running, client_of(running, users[0]) as ann:
        file = await ann.files.create(file=("secret.txt", b"The code is 7."), purpose="user_data")
        for key in (keys[1], users[1]):
            async with client_of(running, key) as other:
                said = []
                for id in (file.id, "file-" + "0" * 32):
                    part: Any = {"type": "file", "file": {"file_id": id}}
                    with pytest.raises(openai.NotFoundError) as refused:
                        await other.chat.completions.create(
                            model="tiny", messages=[{"role": "user", "content": [part]}]
                        )
                    said.append(refused.value.response.text.replace(id, "ID"))
                    item: Any = {"role": "user", "content": [{"type": "input_file", "file_id": id}]}
                    with pytest.raises(openai.NotFoundError):
                        await other.responses.create(model="tiny", input=[item])
                    block: Any = {"type": "document", "source": {"type": "file", "file_id": id}}
                    with pytest.raises(anthropic.NotFoundError):
                        await claude(running, key).messages.create(
                            model="tiny", max_tokens=5, messages=[{"role": "user", "content": [block]}]
                        )
                assert said[0] == said[1]
        assert running.engine.seen == []
    await database.close()


async def test_what_cannot_be_read_is_refused_clearly(
    serving: Serving, text: TextModel, tmp_path: Path, pdf_here: None
) -> None:
    async with serving(long_window(text), **settings(tmp_path, body_limit=200_000)) as running:

        async def refused(status: int, role: str = "user", count: int = 1, **file: Any) -> str:
            part = {"type": "file", "file": file}
            reply = await running.chat(messages=[{"role": role, "content": [part] * count}])
            assert reply.status_code == status, reply.text
            return str(reply.json()["error"]["message"])

        assert "not text. Models here read" in await refused(400, file_data=b64(b"PK\3\4\0"), filename="a.docx")
        assert "PDF cannot be read" in await refused(400, file_data=b64(b"%PDF-1.7 nonsense"))
        assert "either `file_id`, `file_data` or `file_url`" in await refused(400, filename="a.txt")
        assert "either `file_id`, `file_data` or `file_url`" in await refused(400, file_id="x", file_data=b64(b"x"))
        assert "not base64" in await refused(400, file_data="data:text/plain;base64,%%")
        assert "must be base64" in await refused(400, file_data="data:text/plain,hello")
        assert "messages of the user" in await refused(400, role="system", file_data=b64(b"x"))
        assert "at most 100 files" in await refused(400, count=101, file_data=b64(b"x"))
        item = {"role": "user", "content": [{"type": "input_file", "file_url": "https://example.org/a.txt"}]}
        reply = await running.client.post("/v1/responses", json={"model": "tiny", "input": [item]})
        assert reply.status_code == 400 and "not fetched from URLs" in reply.json()["error"]["message"]
        assert reply.json()["error"]["param"] == "input[0].content[0].file_url"
        # Too long for the model: both numbers. Too long to be read at all: the same.
        long = await refused(400, file_data=b64(b"word " * 20_000))
        assert "65536" in long.replace(",", "") and "100" in long
        async with client_of(running) as client:
            file = await client.files.create(file=("big.txt", b"x" * 150_000), purpose="user_data")
        both = await refused(400, count=2, file_id=file.id)
        assert "300,000 bytes" in both and "200,000 are allowed" in both
        named = await running.chat(
            messages=[{"role": "user", "content": [
                {"type": "file", "file": {"file_data": b64(b"x"), "filename": "a\n<|end|>.txt", "format": "text/plain"}}
            ]}]
        )  # fmt: skip
        assert named.status_code == 200 and "messages" in named.headers["x-penstock-ignored"]
        assert "a <|end|>.txt:\nx" in prompt(running, text)


async def test_the_text_of_a_pdf_is_counted(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def text_of(self: Any, body: bytes, media_type: str) -> str:
        if b"hang" in body:
            raise UnreadableDocument("The document could not be read within 20 seconds.")
        return "x" * 300_000

    monkeypatch.setattr(input_files.ReaderProcess, "text", text_of)
    async with serving(long_window(text), **settings(tmp_path, body_limit=200_000)) as running:
        for body, error in ((b"%PDF-1.7", "bytes or more; 200,000 are allowed"), (b"%PDF-hang", "within 20 seconds")):
            part = {"type": "file", "file": {"file_data": b64(body)}}
            reply = await running.chat(messages=[{"role": "user", "content": [part]}])
            assert reply.status_code == 400 and error in reply.json()["error"]["message"]


async def test_documents_of_others_and_of_those_who_left_are_not_waited_for(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging: list[Any] = []

    async def exchanged(reader: Any, task: Any, body: bytes) -> list[Result]:
        if b"hang" in body:
            hanging.append(reader)
            await asyncio.Event().wait()
        return [Result([], text="Read.")]

    async def started(self: ReaderProcess) -> Any:
        return self

    async def stopped(self: ReaderProcess) -> None:
        if self in hanging:
            hanging.remove(self)

    monkeypatch.setattr(process, "_exchange", exchanged)
    monkeypatch.setattr(ReaderProcess, "_started", started)
    monkeypatch.setattr(ReaderProcess, "_stop", stopped)

    def asked(body: bytes) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": b64(body)}}]}]}

    async with serving(long_window(text), **settings(tmp_path)) as running:
        slow = asyncio.create_task(running.chat(**asked(b"%PDF-hang")))
        await eventually(lambda: len(hanging) == 1)
        assert (await running.chat(**asked(b"%PDF-1.7"))).status_code == 200  # with another reader
        slow.cancel()
        await asyncio.wait((slow,))
        await eventually(lambda: not hanging)


async def test_a_file_that_is_being_deleted_is_not_read_in_part(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIECE", 4)
    async with serving(long_window(text), **settings(tmp_path)) as running, client_of(running) as client:
        file = await client.files.create(file=("a.txt", b"one two three"), purpose="user_data")
        message = {"role": "user", "content": [{"type": "file", "file": {"file_id": file.id}}]}
        assert (await running.chat(messages=[message])).status_code == 200
        database = running.parts.database
        assert database is not None
        assert await database.execute("DELETE FROM file_pieces WHERE number = 2")
        reply = await running.chat(messages=[message])
        assert reply.status_code == 404 and file.id in reply.json()["error"]["message"]


async def test_the_text_of_a_file_is_the_size_of_its_request(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits and smaller models are chosen by it before anything is tokenized."""
    sizes: list[int] = []
    real = Quotas.text_work

    def noted(self: Quotas, exchange: Any, model: str, characters: int, **about: Any) -> Any:
        sizes.append(characters)
        return real(self, exchange, model, characters, **about)

    async def text_of(self: Any, body: bytes, media_type: str) -> str:
        return "\u00e4" * 5000

    monkeypatch.setattr(Quotas, "text_work", noted)
    monkeypatch.setattr(ReaderProcess, "text", text_of)
    async with serving(long_window(text), **settings(tmp_path)) as running:
        part = {"type": "file", "file": {"file_data": b64(b"%PDF-1.7")}}
        messages = [{"role": "user", "content": [part]}]
        reply = await running.client.post("/tokenize", json={"model": "tiny", "messages": messages})
        assert reply.status_code == 200 and sizes[-1] >= 10_000


def counting(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Reads PDFs in this process, and keeps what was read."""
    read_bodies: list[bytes] = []

    async def text_of(self: Any, body: bytes, media_type: str) -> str:
        read_bodies.append(body)
        if b"broken" in body:
            raise UnreadableDocument("It is broken.")
        return "Ann is 41."

    monkeypatch.setattr(input_files.ReaderProcess, "text", text_of)
    return read_bodies


def with_pdf(body: bytes) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "file", "file": {"file_data": b64(body)}}]}]


async def test_nothing_is_read_for_callers_over_their_limits(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counting(monkeypatch)
    tier = TierConfig(name="standard", requests_per_minute=2, tokens_per_minute=60)
    url = settings(tmp_path)["store_url"]
    database = await open_database(url)
    identities = IdentityStore(database)
    await identities.prepare()
    await identities.create_tenant("acme", tier="standard")
    key = (await identities.create_key("acme"))[1].text
    await database.close()
    more = settings(tmp_path, tiers=(tier,), default_tier="standard")
    async with serving(long_window(text), **more) as running:
        keyed = {"authorization": f"Bearer {key}"}

        async def asked(body: bytes, **more: Any) -> Any:
            about = {"model": "tiny", "messages": with_pdf(body), **more}
            return await running.client.post("/v1/chat/completions", json=about, headers=keyed)

        unknown = await asked(b"%PDF-1", model="nobody")
        assert unknown.status_code == 404 and seen == []
        # The tokens of a file are counted once it is read: here with the answer they are too many.
        long = await asked(b"%PDF-2", max_tokens=55)
        assert long.status_code == 400 and "it can never run" in long.json()["error"]["message"] and len(seen) == 1
        broken = await asked(b"%PDF-broken")
        assert broken.status_code == 400 and broken.headers.get("x-penstock-reason") != "rate_limit"
        assert (await asked(b"%PDF-3", max_tokens=2)).status_code == 200 and len(seen) == 3
        over = await asked(b"%PDF-4", max_tokens=2)
        assert over.status_code == 429 and over.headers["x-ratelimit-remaining-requests"] == "0" and len(seen) == 3
        item = {"role": "user", "content": [{"type": "input_file", "file_data": b64(b"%PDF-4")}]}
        block = {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": b64(b"%PDF-4")},
        }
        for path, body in (
            ("/v1/responses", {"input": [item]}),
            ("/v1/responses/compact", {"input": [item]}),
            ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}),
        ):
            reply = await running.client.post(path, json={"model": "tiny", **body}, headers=keyed)
            assert reply.status_code == 429, path
        assert len(seen) == 3
        # What is free has the same limits again; storing a file counts as one of them.
        for _ in range(2):
            made = await running.client.post("/v1/conversations", json={"items": [item]}, headers=keyed)
            assert made.status_code == 200, made.text
        counted = await running.client.post("/tokenize", json={"messages": with_pdf(b"%PDF-5")}, headers=keyed)
        assert counted.status_code == 429 and len(seen) == 4


async def test_a_pdf_is_read_once_by_whoever_sent_it(
    serving: Serving, text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counting(monkeypatch)
    async with serving(long_window(text), **settings(tmp_path)) as running:
        replies = await asyncio.gather(*(running.chat(messages=with_pdf(b"%PDF-1")) for _ in range(8)))
        assert [reply.status_code for reply in replies] == [200] * 8 and len(seen) == 1
        for _ in range(2):
            reply = await running.chat(messages=with_pdf(b"%PDF-broken"))
            assert reply.status_code == 400 and "It is broken." in reply.json()["error"]["message"]
        assert len(seen) == 2
        metrics = (await running.client.get("/metrics")).text
        assert 'penstock_input_file_lookups_total{outcome="hit"} 8' in metrics
        assert 'penstock_input_file_lookups_total{outcome="miss"} 2' in metrics
    async with serving(long_window(text), **settings(tmp_path, input_files=InputFilesConfig(cache=0))) as running:
        for _ in range(2):
            assert (await running.chat(messages=with_pdf(b"%PDF-1"))).status_code == 200
        assert len(seen) == 4


async def test_files_of_urls(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    web = Web()
    async with serving(long_window(text), **settings(tmp_path, input_files=web.config)) as running:
        url = f"{web.url}/people.csv"
        part: Any = {"type": "file", "file": {"file_url": url}}
        chat = await running.chat(messages=[{"role": "user", "content": [part]}])
        assert chat.status_code == 200 and prompt(running, text) == f"<|user|>{SHOWN}<|end|><|assistant|>"
        async with client_of(running) as client:
            item: Any = {"role": "user", "content": [{"type": "input_file", "file_url": url, "filename": "p.csv"}]}
            await client.responses.create(model="tiny", input=[item])
            assert "File p.csv:\nname,age" in prompt(running, text)
            item["content"][0]["file_url"] = f"{web.url}/none"
            with pytest.raises(openai.BadRequestError, match="status 404") as refused:
                await client.responses.create(model="tiny", input=[item])
            assert refused.value.code == "file_not_fetched" and refused.value.param == "input[0].content[0].file_url"
        block: Any = {"type": "document", "source": {"type": "url", "url": url}}
        turn: Any = {"role": "user", "content": [block]}
        await claude(running).messages.create(model="tiny", max_tokens=9, messages=[turn])
        assert "<|user|>people.csv\nname,age" in prompt(running, text)
        block["source"]["url"] = "https://example.org/x.pdf"
        with pytest.raises(anthropic.BadRequestError, match=r"not fetched from example\.org"):
            await claude(running).messages.create(model="tiny", max_tokens=9, messages=[turn])
        # A tool's becomes a note.
        use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
        history: Any = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        first: Any = {"role": "user", "content": "hi"}
        await claude(running).messages.create(model="tiny", max_tokens=50, messages=[first, *history])
        assert "[a document that is not text" in prompt(running, text)
    web.close()


async def test_slow_servers_hold_up_no_file_that_is_here(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    web = Web()
    patient = dataclasses.replace(web.config, url_timeout_s=120.0)
    part: Any = {"type": "file", "file": {"file_url": f"{web.url}/silent"}}
    async with serving(long_window(text), **settings(tmp_path, input_files=patient)) as running:
        slow = [
            asyncio.create_task(running.chat(messages=[{"role": "user", "content": [part]}]))
            for _ in range(FETCHES_OF_A_TENANT)
        ]
        await eventually(lambda: len(web.asked) == FETCHES_OF_A_TENANT)
        part = {"type": "file", "file": {"file_data": b64(CSV)}}
        assert (await running.chat(messages=[{"role": "user", "content": [part]}])).status_code == 200
        assert not any(task.done() for task in slow)
        web.close()
        assert {reply.status_code for reply in await asyncio.gather(*slow)} == {400}
