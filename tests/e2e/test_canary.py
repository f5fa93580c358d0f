"""R-RT-10, as a drill: a canary that breaks under load is rolled back by itself, by real processes that share a store.

`penstock serve` with two gateway workers; the control is a real engine, the canary a real HTTP server that begins to
answer with 500. Clients see errors in at most the canary's share of their requests, and with the fallback none.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from tests.e2e.test_failover import tiny_model
from tests.e2e.test_supervisor import Server
from tests.gateway.conftest import eventually, until

pytestmark = pytest.mark.slow

SHARE = 0.3


class Canary(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that can be broken."""

    broken: ClassVar[threading.Event] = threading.Event()
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_GET(self) -> None:
        self._reply(200, "application/json", b'{"object": "list", "data": [{"id": "canary", "object": "model"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.broken.is_set():
            self._reply(500, "application/json", b'{"error": {"message": "out of order", "type": "server_error"}}')
            return

        def event(**more: Any) -> bytes:
            head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "canary"}
            return b"data: " + json.dumps({**head, **more}).encode() + b"\n\n"

        said = {"index": 0, "delta": {"role": "assistant", "content": "From the canary."}, "finish_reason": None}
        usage = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
        events = event(choices=[said]) + event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        self._reply(200, "text/event-stream", events + event(choices=[], usage=usage) + b"data: [DONE]\n\n")

    def _reply(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def canary() -> Iterator[int]:
    Canary.broken.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Canary)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def experiment(folder: Path, port: int, *, fallback: bool) -> Iterator[Server]:
    config: dict[str, Any] = {"name": "assistant", "control": "tiny", "canary": {"v2": SHARE}, "sticky": "request"}
    config["fallback"] = fallback
    (folder / "model").mkdir()
    remote = {"name": "v2", "model": "canary", "urls": [f"http://127.0.0.1:{port}/v1"]}
    server = Server(
        *(str(tiny_model(folder / "model")), "--set", "models.0.name=tiny", "--set", "models.0.threads=1"),
        *("--set", "models.0.kv_memory=64MiB", "--set", "encoders=[]", "--set", "server.workers=2"),
        *("--set", f"store.url=sqlite:///{folder}/store.db", "--set", f"remotes=[{json.dumps(remote)}]"),
        *("--set", f"experiments=[{json.dumps(config)}]"),
        defaults=False,
    )
    try:
        server.wait_for("curl http")
        yield server
    finally:
        server.close()


async def load(url: str, stop: asyncio.Event, seen: list[tuple[int, str]]) -> None:
    body = {"model": "assistant", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    async with httpx.AsyncClient(timeout=180) as http:
        while not stop.is_set():
            reply = await http.post(f"{url}/v1/chat/completions", json=body)
            seen.append((reply.status_code, reply.headers.get("x-penstock-experiment", "")))


@pytest.mark.parametrize("fallback", [True, False])
async def test_a_canary_that_breaks_under_load_is_rolled_back(tmp_path: Path, fallback: bool) -> None:
    with canary() as port, experiment(tmp_path, port, fallback=fallback) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=180) as http:

            async def shown() -> dict[str, Any]:
                found: dict[str, Any] = (await http.get("/v1/admin/experiments/assistant")).json()
                return found

            stop, seen = asyncio.Event(), list[tuple[int, str]]()
            clients = [asyncio.create_task(load(server.url, stop, seen)) for _ in range(6)]
            try:
                await eventually(lambda: len(seen) >= 300)
                assert any(arm == "assistant; arm=v2" for _, arm in seen)
                assert {status for status, _ in seen} == {200} and (await shown())["status"] == "running"
                healthy = len(seen)
                Canary.broken.set()
                await until(shown, lambda found: found["status"] == "rolled back")
                await asyncio.sleep(3)  # until both gateways know
                after = len(seen)
                await asyncio.sleep(1)
            finally:
                stop.set()
                await asyncio.gather(*clients)
            during = Counter(status for status, _ in seen[healthy:after])
            if fallback:
                assert set(during) == {200}, during
            else:
                wrong = sum(count for status, count in during.items() if status != 200)
                assert wrong <= 1.5 * SHARE * sum(during.values()), during
                assert wrong > 0
            assert len(seen) > after and set(seen[after:]) == {(200, "assistant; arm=control")}
            found = await shown()
            (v2,) = [arm for arm in found["arms"] if arm["arm"] == "v2"]
            assert v2["share"] == 0 and "errors" in v2["rolled_back"] and found["events"][0]["who"] == "automatic"
