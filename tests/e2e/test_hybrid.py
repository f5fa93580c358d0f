"""The server of examples/hybrid.yaml: a small model here, a scripted large one elsewhere, and each for the other."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_supervisor import Server
from tests.engine_host.client import eventually
from tests.wire_server import WireServer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hybrid.yaml"
CHAT = "/v1/chat/completions"
EASY = "Thanks, that is all!"
HARD = "Prove by induction that the sum of the first n odd numbers is n squared, and explain each step."


class Elsewhere:
    """The large model's server, in a thread of its own; it can be stopped and started again."""

    def __init__(self) -> None:
        self.wire = WireServer(text="Sunny in Rome [1].")
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self._listening: asyncio.Server | None = None
        self.start()

    def start(self) -> None:
        async def listen() -> asyncio.Server:
            return await asyncio.start_server(self.wire.accept, "127.0.0.1", self.wire.port)

        self._listening = asyncio.run_coroutine_threadsafe(listen(), self.loop).result(10)
        self.wire.port = self._listening.sockets[0].getsockname()[1]

    def stop(self) -> None:
        async def close() -> None:
            assert self._listening is not None
            self._listening.close()
            await self.wire.close()

        asyncio.run_coroutine_threadsafe(close(), self.loop).result(10)


@contextmanager
def elsewhere() -> Iterator[Elsewhere]:
    there = Elsewhere()
    try:
        yield there
    finally:
        there.stop()
        there.loop.call_soon_threadsafe(there.loop.stop)
        there.thread.join(10)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_hybrid_example(default_model: Path, tmp_path: Path) -> None:
    with elsewhere() as large:
        settings = {
            "models.0.source": str(default_model),
            "models.0.threads": "1",
            "models.0.kv_memory": "64MiB",
            "remotes.0.urls": f'["{large.wire.url}"]',
            "remotes.0.tokenizer": str(default_model),
            "remotes.0.check_s": "1",
            "store.url": f"sqlite:///{tmp_path / 'state.db'}",
            "server.engine_wait_s": "60",
            "cache.exact": "asked",
        }
        flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        server = Server("-c", str(EXAMPLE), *flags, defaults=False)

        def ask(
            path: str = "/v1/chat/completions", text: str = EASY, model: str = "auto", **body: Any
        ) -> httpx.Response:
            prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
            if path == "/v1/completions":
                prompt = {"prompt": text}
            asked = {"model": model, "max_tokens": 24, **prompt, **body}
            return httpx.post(server.url + path, json=asked, timeout=300)

        def who(reply: httpx.Response) -> tuple[int, str, str]:
            route = reply.headers.get("x-penstock-route", "").partition(";")[0]
            return reply.status_code, reply.headers.get("x-penstock-model", reply.text[:300]), route

        try:
            server.wait_for("curl http")
            # Each request finds its model, whatever kind it is.
            assert who(ask()) == (200, "small", "auto")
            assert who(ask(text=HARD)) == (200, "large", "auto")
            assert ask(text=HARD).json()["choices"][0]["message"]["content"] == "Sunny in Rome [1]."
            for path, body in (
                ("/v1/completions", {"logprobs": 2, "n": 2}),
                ("/v1/chat/completions", {"logprobs": True, "stream": True}),
                ("/v1/chat/completions", {"conversation": "c1"}),
                ("/v1/messages", {}),
            ):
                assert who(ask(path, text=HARD, **body))[:2] == (200, "large"), path

            # Sources, for whichever model answers.
            client = httpx.Client(base_url=server.url, timeout=300)
            named = {"name": "weather"}
            # The encoder is started by the first request for it.
            assert eventually(lambda: client.post("/v1/collections", json=named).status_code in (200, 409), 240)
            made = client.get("/v1/collections").json()["data"][0]["id"]
            client.post(f"/v1/collections/{made}/documents", json={"name": "rome", "text": "It is sunny in Rome."})
            ready = eventually(lambda: client.get(f"/v1/collections/{made}").json()["documents"]["ready"] == 1, 240)
            assert ready, client.get(f"/v1/collections/{made}").json()
            answered = ask(text=f"{HARD} And is it sunny in Rome?", rag={"collection": "weather"})
            assert who(answered)[:2] == (200, "large"), answered.text
            assert answered.json()["rag"]["sources"][0]["document"] == "rome"
            assert answered.json()["choices"][0]["message"]["annotations"]

            # The same question again comes from the cache.
            cached = {"x-penstock-cache": "exact"}
            body = {"model": "large", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
            found = [client.post("/v1/chat/completions", json=body, headers=cached).headers for _ in range(2)]
            assert [headers["x-penstock-cache"] for headers in found] == ["miss", "exact"]

            # Tokens are counted without asking anybody.
            before = len(large.wire.asked)
            counted = client.post("/v1/tokenize", json={"model": "large", "prompt": "Hello, world!"}).json()
            assert counted["count"] == len(counted["tokens"]) > 1 and len(large.wire.asked) == before

            # The engine dies: what the API can answer it answers at once, for the rest requests wait.
            (engine,) = [pid for name, pid in server.children().items() if name == "engine"]
            os.kill(engine, signal.SIGKILL)
            began = time.monotonic()
            reply = ask(model="small")
            assert who(reply)[:2] in ((200, "large"), (200, "small")) and time.monotonic() - began < 30
            waited = ask(model="small", prompt_logprobs=1)
            assert who(waited)[:2] == (200, "small"), waited.text

            # The API is away: the small model answers in its place, and goes back when it is there again.
            large.stop()
            assert eventually(lambda: who(ask(text=HARD)) == (200, "small", "fallback"), 60), who(ask(text=HARD))
            large.start()
            assert eventually(lambda: who(ask(text=HARD))[:2] == (200, "large"), 90)

            # Every model at its own price.
            rows = {row["model"]: row for row in client.get("/v1/usage?by=model").json()["data"]}
            for name, (inward, outward) in {"small": (0.02, 0.04), "large": (0.5, 1.5)}.items():
                row = rows[name]
                most = row["prompt_tokens"] * inward + row["completion_tokens"] * outward
                assert 0 < float(row["cost"]) <= most / 1e6 + 1e-9
        finally:
            server.close()
