"""Bodies that arrive slowly, are large, or are compressed hold bounded memory and nobody else up."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.app.bodies import SHARE, Bodies
from penstock.gateway.app.encodings import Inflater, inflater
from penstock.gateway.app.exchange import DISCARD_LIMIT
from penstock.gateway.app.uploads import UploadSlots
from penstock.protocol.errors import InvalidRequest, RateLimitExceeded, ServiceUnavailable
from tests.gateway.api.test_identity import make_key
from tests.gateway.app.test_security import HEAD, raw
from tests.gateway.conftest import Running, Serving, eventually, until

CHAT = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}).encode()
LINES = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'


async def upload(gateway: Running, key: str, content: bytes = LINES) -> int:
    reply = await gateway.client.post(
        "/v1/files",
        data={"purpose": "batch"},
        files={"file": ("a.jsonl", content)},
        headers={"authorization": f"Bearer {key}"},
    )
    return reply.status_code


async def tenants(gateway: Running) -> list[str]:
    await gateway.client.post("/v1/admin/tenants", json={"id": "acme"})
    admin = await make_key(gateway, scopes=["admin", "inference"])
    headers = {"authorization": f"Bearer {admin}"}
    for name in ("slow", "other"):
        await gateway.client.post("/v1/admin/tenants", json={"id": name}, headers=headers)
    return [await make_key(gateway, admin, tenant=name) for name in ("slow", "other")]


async def test_uploads_that_do_not_arrive_hold_up_nobody_and_are_cut(serving: Serving, tmp_path: Path) -> None:
    async with serving(store_url=f"sqlite:///{tmp_path}/store.db", receive_s=600.0) as gateway:
        slow, other = await tenants(gateway)
        form = b"content-type: multipart/form-data; boundary=b\r\ncontent-length: 9000000\r\n\r\n--b\r\n"
        head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer " + slow.encode() + b"\r\n"
        idle = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(12)]
        for _, writer in idle:
            writer.write(head + form)
        await asyncio.sleep(0.1)
        assert await upload(gateway, other, LINES * 20_000) == 200, "spooled to disk, and read back"
        assert await upload(gateway, slow) == 200, "and the tenant itself goes on"
        bodies = gateway.parts.bodies
        for _, writer in idle:
            writer.close()
        await eventually(lambda: (bodies.in_memory, bodies.on_disk, dict(bodies.disk_of)) == (0, 0, {}))
    async with serving(store_url=f"sqlite:///{tmp_path}/cut.db", receive_s=0.3) as gateway:
        sent = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\n" + form
        # It stopped. On a busy machine, it may have done so before it had said anything.
        await until(lambda: raw(gateway, sent), lambda answer: answer.startswith(b"HTTP/1.1 408"))


@pytest.mark.parametrize("memory", [0, 2**20])
async def test_bodies_in_parts_arrive_whole_on_disk_and_in_memory(serving: Serving, memory: int) -> None:
    async with serving(body_memory=memory, body_limit=2**21) as gateway:
        text = " " * 600_000
        body = CHAT[:-1] + text.encode() + b"}"
        parts = [body[i : i + 100_000] for i in range(0, len(body), 100_000)]
        head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        answer = await raw(gateway, head, *parts, pause_s=0.01)
        assert answer.startswith(b"HTTP/1.1 200") and b"Hello" in answer
        bodies = gateway.parts.bodies
        await eventually(lambda: (bodies.in_memory, bodies.on_disk) == (0, 0))


async def test_memory_and_disk_of_arriving_bodies_are_bounded_and_given_back() -> None:
    bodies = Bodies(memory=1000, disk=SHARE * 600_000)
    one, two = bodies.arriving("a", 10**9), bodies.arriving("b", 10**9)
    await one.add(b"x" * 900)
    await two.add(b"y" * 900)  # no room: to disk
    assert bodies.in_memory == 900
    await two.add(b"z" * 300_000)
    assert (bodies.in_memory, bodies.on_disk, bodies.disk_of["b"]) == (900, 300_900, 300_900)
    assert await two.read() == b"y" * 900 + b"z" * 300_000
    await one.add(b"x" * 300_000)
    with pytest.raises(RateLimitExceeded):
        await one.add(b"x" * 300_000)
    others = [bodies.arriving(f"t{number}", 0) for number in range(SHARE)]
    with pytest.raises(ServiceUnavailable):
        for other in others:
            await other.add(b"x" * 600_000)
    for body in (one, two, *others):
        body.close()
    assert (bodies.in_memory, bodies.on_disk, dict(bodies.disk_of)) == (0, 0, {})


async def test_a_tenant_takes_only_its_share_of_the_slots() -> None:
    slots, order = UploadSlots(at_once=4, of_a_tenant=2), list[str]()
    done = asyncio.Event()

    async def use(tenant: str, until: asyncio.Event | None) -> None:
        async with slots.slot(tenant):
            order.append(tenant)
            if until is not None:
                await until.wait()

    busy = [asyncio.create_task(use("a", done)) for _ in range(9)]
    await asyncio.sleep(0.01)
    assert order == ["a", "a"]
    await asyncio.wait_for(use("b", None), 60)
    done.set()
    await asyncio.gather(*busy)
    assert order == ["a", "a", "b", *["a"] * 7] and not slots._tenants


async def test_compressed_bodies_are_decoded_within_the_limit(serving: Serving) -> None:
    async with serving(body_limit=100_000) as gateway:

        async def post(body: bytes, encoding: str) -> Any:
            headers = {"content-type": "application/json", "content-encoding": encoding}
            return await gateway.client.post("/v1/chat/completions", content=body, headers=headers)

        for encoding, body in (
            ("gzip", gzip.compress(CHAT)),
            ("GZIP", gzip.compress(CHAT[:9]) + gzip.compress(CHAT[9:])),
            ("deflate", zlib.compress(CHAT)),
            ("identity", CHAT),
        ):
            assert (await post(body, encoding)).status_code == 200, encoding
        bomb = await post(gzip.compress(b" " * 50_000_000), "gzip")
        assert bomb.status_code == 413 and "100000" in bomb.json()["error"]["message"]
        for encoding in ("br", "zstd", "gzip, gzip"):
            reply = await post(CHAT, encoding)
            assert reply.status_code == 415 and reply.headers["accept-encoding"] == "gzip, deflate"
            assert reply.json()["error"]["code"] == "unsupported_encoding"
        for broken in (gzip.compress(CHAT)[:-9], b"not gzip", gzip.compress(CHAT) + b"more", b""):
            assert (await post(broken, "gzip")).status_code == 400, broken


def test_what_an_encoding_holds_comes_out_bounded_however_it_is_cut() -> None:
    text = bytes(range(256)) * 100
    whole = gzip.compress(text) * 3
    for size in (1, 1000, len(whole)):
        decoder = Inflater("gzip")
        pieces = [decoder.feed(whole[i : i + size], 2**20) for i in range(0, len(whole), size)]
        decoder.finish()
        assert b"".join(pieces) == text * 3
    assert len(Inflater("gzip").feed(gzip.compress(b"a" * 10**6), 1000)) == 1000
    with pytest.raises(InvalidRequest):
        Inflater("gzip").feed(gzip.compress(b"") * 5000, 2**20)
    assert inflater(None) is inflater(b"identity") is None


async def test_who_asks_before_sending_too_much_is_not_told_to_go_on(serving: Serving) -> None:
    async with serving(body_limit=2048) as gateway:
        answer = await raw(gateway, HEAD + b"expect: 100-continue\r\ncontent-length: 5000\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413") and answer.count(b"HTTP/1.1") == 1
        asked = HEAD + b"expect: 100-continue\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(CHAT)
        answer = await raw(gateway, asked, CHAT, pause_s=0.05)
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")


async def test_a_body_that_is_announced_as_too_large_is_not_waited_for(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("penstock.gateway.app.exchange.DISCARD_S", 0.05)
    async with serving(body_limit=2048, receive_s=600.0, store_url=f"sqlite:///{tmp_path / 'x.db'}") as gateway:
        never_read, huge = 2048 + DISCARD_LIMIT + 1, 10**11
        for path, size in (("chat/completions", 5000), ("chat/completions", never_read), ("files", huge)):
            head = HEAD.replace(b"chat/completions", path.encode()) + b"content-length: %d\r\n\r\n{" % size
            answer = await asyncio.wait_for(raw(gateway, head), 60.0)
            assert answer.startswith(b"HTTP/1.1 413") and b"has %d bytes" % size in answer, answer
