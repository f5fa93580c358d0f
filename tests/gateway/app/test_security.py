"""R-API-3: what a stranger can send, how slowly, from where, and what of it is written down."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from penstock.config.schema import TierConfig
from penstock.telemetry import logging as telemetry_logging
from penstock.text import TextModel
from tests.gateway.api.test_identity import make_key
from tests.gateway.conftest import Running, Serving
from tests.ports import free_port
from tests.scripted import ScriptedEngine

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
ORIGIN = "https://app.example.com"


async def raw(gateway: Running, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """What the server says to these bytes until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)

    async def send() -> None:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause_s)

    sending = asyncio.create_task(send())
    try:
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionResetError:
        return b""
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


async def test_headers_beyond_the_limit_are_431_and_a_body_beyond_it_413(serving: Serving) -> None:
    async with serving(header_limit=16384, body_limit=2048) as gateway:
        assert (await raw(gateway, HEAD + b"x-big: " + b"a" * 20_000 + b"\r\n\r\n")).startswith(b"HTTP/1.1 431")
        many = b"".join(b"x-%d: 1\r\n" % number for number in range(3000))
        assert (await raw(gateway, HEAD + many + b"\r\n")).startswith(b"HTTP/1.1 431")
        below = await gateway.client.get("/v1/models", headers={"x-big": "a" * 10_000})
        assert below.status_code == 200
        large = await gateway.chat(messages=[{"role": "user", "content": "x" * 3000}])
        assert large.status_code == 413 and large.json()["error"]["code"] == "payload_too_large"


async def test_who_sends_slowly_is_let_go_and_holds_up_nobody(serving: Serving) -> None:
    body = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'
    length = b"content-length: %d\r\n\r\n" % len(body)
    async with serving(receive_s=2.0) as gateway:
        silent, headers, slow_body, busy = await asyncio.gather(
            raw(gateway),
            raw(gateway, *([b"POST /v1/chat/completions HTTP/1.1\r\n"] + [b"x-a: b\r\n"] * 1200), pause_s=0.1),
            raw(gateway, HEAD + length, *(body[i : i + 1] for i in range(len(body))), pause_s=0.1),
            gateway.chat(),
        )
        assert b" 200 " not in silent + headers
        assert slow_body.startswith(b"HTTP/1.1 408") and b"connection: close" in slow_body
        assert json.loads(slow_body.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"
        assert busy.status_code == 200
    async with serving(receive_s=60.0) as gateway:  # slow, but within the time
        parts = [body[i : i + 20] for i in range(0, len(body), 20)]
        fine = await raw(gateway, HEAD + b"connection: close\r\n" + length, *parts, pause_s=0.05)
        assert fine.startswith(b"HTTP/1.1 200")


async def test_browsers_of_other_origins_are_not_let_in_by_default(serving: Serving) -> None:
    async with serving() as gateway:
        reply = await gateway.client.get("/v1/models", headers={"origin": ORIGIN})
        assert not [name for name in reply.headers if name.startswith("access-control")]
        asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
        assert (await gateway.client.options("/v1/chat/completions", headers=asked)).status_code == 405


async def test_configured_origins_may_use_the_api_from_a_browser(serving: Serving) -> None:
    async with serving(cors_origins=(ORIGIN,)) as gateway:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        flight = await gateway.client.options("/v1/chat/completions", headers={"origin": ORIGIN, **asked})
        assert flight.status_code == 204
        assert flight.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in flight.headers["access-control-allow-methods"]
        assert flight.headers["access-control-allow-headers"] == "authorization"
        gateway.client.headers["origin"] = ORIGIN
        for reply in (await gateway.chat(), await gateway.chat(stream=True), await gateway.chat(n=0)):
            assert reply.headers["access-control-allow-origin"] == ORIGIN
            assert "x-request-id" in reply.headers["access-control-expose-headers"]
            assert "access-control-allow-credentials" not in reply.headers
        gateway.client.headers["origin"] = "https://evil.example"
        reply = await gateway.client.options("/v1/chat/completions", headers=asked)
        assert reply.status_code == 405 and "access-control-allow-origin" not in reply.headers
        assert "access-control-allow-origin" not in (await gateway.chat()).headers
        assert (await gateway.chat()).headers["vary"] == "origin", "a cache must keep origins apart"


async def test_administration_can_have_a_port_of_its_own(serving: Serving, tmp_path: Path) -> None:
    port = free_port()
    async with (
        serving(admin_port=port, store_url=f"sqlite:///{tmp_path}/store.db") as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as admin,
    ):
        assert (await admin.get("/v1/admin/keys")).status_code == 200
        assert (await gateway.client.get("/v1/admin/keys")).status_code == 404
        assert (await admin.get("/v1/models")).status_code == 404
        assert (await gateway.client.get("/v1/models")).status_code == 200
        for client in (admin, gateway.client):
            assert (await client.get("/health/live")).status_code == 200
            assert (await client.get("/metrics")).status_code == 200
        documents = [(await client.get("/openapi.json")).json()["paths"] for client in (admin, gateway.client)]
        assert "/v1/admin/keys" in documents[0] and "/v1/admin/keys" not in documents[1]
        assert "/v1/models" not in documents[0] and "/v1/models" in documents[1]


SECRET = "pelican-crossing-42"


@contextmanager
def written() -> Iterator[io.StringIO]:
    """Everything the process logs, at the most talkative level."""
    stream, root = io.StringIO(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    telemetry_logging.configure("json", "debug", stream)
    root.setLevel(logging.DEBUG)
    try:
        yield stream
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


async def test_no_text_of_a_request_or_an_answer_is_logged(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    user = {"role": "user", "content": f"about {SECRET}"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [user]}),
        ("/v1/chat/completions", {"messages": [user], "stream": True}),
        ("/v1/chat/completions", {"messages": [user], "max_tokens": 10**6}),
        ("/v1/chat/completions", {"messages": [{"role": SECRET, "content": SECRET}]}),
        ("/v1/chat/completions", {"messages": [user], SECRET: 1}),
        ("/v1/chat/completions", {"messages": [user], "temperature": SECRET}),
        ("/v1/chat/completions", {"messages": [user], "response_format": {"type": "regex", "regex": f"({SECRET}"}}),
        ("/v1/completions", {"prompt": SECRET}),
        ("/v1/completions", {"prompt": [SECRET, SECRET], "echo": True}),
        ("/v1/responses", {"input": SECRET}),
        ("/v1/responses", {"input": SECRET, "instructions": SECRET, "stream": True}),
        ("/v1/messages", {"messages": [user], "max_tokens": 8, "system": SECRET}),
        ("/v1/tokenize", {"prompt": SECRET}),
    ]
    with written() as log:
        async with serving(
            ScriptedEngine(text, f"The {SECRET} is here."), store_url=f"sqlite:///{tmp_path}/store.db"
        ) as gateway:
            answers = ""
            for path, body in bodies:
                answers += (await gateway.client.post(path, json={"model": "tiny", **body})).text
            broken, json_type = f'{{"model": "{SECRET}'.encode(), {"content-type": "application/json"}
            await gateway.client.post("/v1/chat/completions", content=broken, headers=json_type)
    assert SECRET in answers, "the answers are about it"
    assert log.getvalue().count('"request"') >= len(bodies) - 1, "requests are logged"
    ours = [line for line in log.getvalue().splitlines() if '"logger":"http' not in line]  # not the client's own log
    assert not any(SECRET in line for line in ours)


async def test_models_say_what_the_callers_tier_may_use_of_them(serving: Serving, tmp_path: Path) -> None:
    tiers = (
        TierConfig(name="small", requests_per_minute=60, tokens_per_minute=4000, context_tokens=100, daily_budget=1.5),
        TierConfig(name="large", priority=0),
    )
    options = {"store_url": f"sqlite:///{tmp_path}/store.db", "tiers": tiers, "default_tier": "small"}
    async with serving(key_fresh_s=0.05, **options) as gateway:
        assert (await gateway.client.get("/v1/models")).json()["data"][0]["limits"] is None, "nobody is limited"
        await gateway.client.post("/v1/admin/tenants", json={"id": "acme"})
        await gateway.client.post("/v1/admin/tenants", json={"id": "big", "tier": "large"})
        admin = await make_key(gateway, scopes=["admin"])
        keys = [await make_key(gateway, admin), await make_key(gateway, admin, tenant="big")]
        small, large = [
            (await gateway.client.get("/v1/models", headers={"x-api-key": key})).json()["data"][0] for key in keys
        ]
        promised = {
            "tier": "small",
            "priority": 1,
            "requests_per_minute": 60,
            "tokens_per_minute": 4000,
            "concurrent_requests": None,
            "context_tokens": 100,
            "daily_budget": 1.5,
            "monthly_budget": None,
        }
        assert promised.items() <= small["limits"].items()
        assert small["context_window"] == large["context_window"] == 512
        assert (small["max_output_tokens"], large["max_output_tokens"]) == (100, 512)
        assert large["limits"]["tier"] == "large" and large["limits"]["context_tokens"] is None
        one = (await gateway.client.get("/v1/models/tiny", headers={"x-api-key": keys[0]})).json()
        assert one["limits"] == small["limits"]


def test_the_limit_on_open_files_is_raised_and_connections_stay_below_it() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    script = """
import logging, resource
logging.basicConfig()
from penstock.gateway.process.limits import connections
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))
print(connections(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""

    def run(limit: int) -> tuple[list[int], str]:
        done = subprocess.run(
            [sys.executable, "-c", script.format(hard=limit)], capture_output=True, text=True, check=True
        )
        return [int(word) for word in done.stdout.split()], done.stderr

    if hard == resource.RLIM_INFINITY or hard > 12_000:
        (room, files), said = run(12_000)
        assert (room, files) == (12_000 - 256, 12_000) and not said
    (room, files), said = run(1000)
    assert (room, files) == (744, 1000)
    assert "LimitNOFILE" in said and "744 connections" in said
