from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from penstock.backends.base import Backend
from penstock.config.routing import AdmissionConfig
from penstock.gateway.app.asgi import App
from penstock.gateway.process.gateway import Gateway
from penstock.gateway.process.main import Application, serve
from penstock.gateway.process.settings import GatewaySettings, ModelSettings
from penstock.routing.encoders import Encoders
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.routing.remotes import RemoteModel
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.ports import free_port
from tests.scripted import ScriptedEngine, make_text

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass
class Running:
    """A gateway listening on a real port, with the engine behind it."""

    client: httpx.AsyncClient
    engine: ScriptedEngine
    parts: Gateway
    stop: asyncio.Event
    port: int

    async def chat(self, **body: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": "tiny", "prompt": "hi", **body})

    async def metric(self, line: str) -> float:
        for row in (await self.client.get("/metrics")).text.splitlines():
            if row.startswith(line + " "):
                return float(row.rpartition(" ")[2])
        raise KeyError(line)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return make_text(tmp_path_factory.mktemp("tiny"))


Serving = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def serving(text: TextModel) -> Serving:
    @asynccontextmanager
    async def start(
        engine: ScriptedEngine | None = None,
        text: TextModel = text,
        encoders: Encoders | None = None,
        backend: Backend | None = None,
        wrap: Callable[[App], Application] = lambda app: app,
        more: Sequence[ServedModel] = (),
        others: Sequence[RemoteModel] = (),
        served: Mapping[str, Any] | None = None,
        control: Path | None = None,
        **settings: Any,
    ) -> AsyncIterator[Running]:
        """`served`: more about the model. `more`: further models. `others`: those that other servers
        run. `control`: the supervisor's socket."""
        engine = engine or ScriptedEngine(text)
        port = free_port()
        # On a busy machine requests wait longer than users would; that is no overload.
        patient = AdmissionConfig(wait_s=120.0, shed_from=1.0)
        options = {"drain_s": 0.2, "models": (ModelSettings("tiny", ""),), "admission": patient, **settings}
        gateway = GatewaySettings(port=port, **options)
        model = ServedModel(
            "tiny",
            text,
            backend or InProcessBackend(engine),
            aliases=("small",),
            input_price=1.0,
            output_price=2.0,
            **served or {},
        )
        stop = asyncio.Event()
        listening: asyncio.Future[Gateway] = asyncio.get_running_loop().create_future()
        registry = ModelRegistry([model, *more], others)
        task = asyncio.create_task(
            serve(gateway, registry, stop, listening.set_result, encoders, control=control, wrap=wrap)
        )
        await asyncio.wait((task, listening), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        try:
            hooks = {"response": [log_failures]}
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, event_hooks=hooks) as client:
                yield Running(client, engine, listening.result(), stop, port)
        finally:
            stop.set()
            await task

    return start


async def log_failures(reply: httpx.Response) -> None:
    """A test that expected an answer shows why it got none."""
    if reply.status_code >= 500:
        await reply.aread()
        log.warning("%s: %d %s", reply.request.url.path, reply.status_code, reply.text[:500])


def events(body: str) -> list[str]:
    """The data of each event of a stream."""
    return [line.removeprefix("data: ") for line in body.split("\n\n") if line.startswith("data: ")]


async def eventually(condition: Callable[[], bool], within: float = 60.0) -> None:
    """Waits until `condition` holds; fails when it does not in time."""
    deadline = asyncio.get_running_loop().time() + within
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "did not become true in time"
        await asyncio.sleep(0.005)


async def until(ask: Callable[[], Awaitable[T]], good: Callable[[T], bool], within: float = 60.0) -> T:
    """Asks until the answer is good; fails when it is not in time."""
    deadline = asyncio.get_running_loop().time() + within
    while not good(answer := await ask()):
        assert asyncio.get_running_loop().time() < deadline, answer
        await asyncio.sleep(0.02)
    return answer


@contextmanager
def garbage() -> Iterator[Counter[str]]:
    """Afterwards: what of ours, made inside, only a garbage collection could find, by name."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        for thing in gc.garbage:
            named = thing if hasattr(thing, "__qualname__") else type(thing)
            if (getattr(named, "__module__", None) or "").startswith("penstock."):
                found[named.__qualname__] += 1
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
