"""The engine client over real ZeroMQ, against the real engine server with a scripted engine behind it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from penstock.backends.mailbox import Mailbox
from penstock.backends.native import NativeBackend
from penstock.engine.request import Request, SamplingParams, StepOutput
from penstock.engine_host.server import EngineServer
from penstock.protocol.errors import EngineLost, EngineUnavailable, Overloaded
from penstock.protocol.messages import Goodbye, Step, ToEngine
from penstock.protocol.transport import CurveClient, CurveServer, Listener, generate_keypair, public_key
from penstock.text import TextModel
from tests.gateway.conftest import eventually
from tests.scripted import ScriptedEngine, make_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return make_text(tmp_path_factory.mktemp("tiny"))


class RunningEngine:
    """An engine server on a thread."""

    def __init__(self, engine: ScriptedEngine, endpoint: str, curve: CurveServer | None = None) -> None:
        self.engine = engine
        self.listener = Listener(endpoint, curve=curve)
        self.server = EngineServer(engine, self.listener, heartbeat_s=0.05)
        self._paused = threading.Event()
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def close(self, *, silently: bool = False) -> None:
        if silently:  # like a crash: no last words, the connection just closes
            self.server._peers.tell_all = lambda *args: None  # type: ignore[method-assign]
        self.server.stop()
        self._thread.join()
        self.listener.close()


Start = Callable[..., RunningEngine]


@pytest.fixture
def start(tmp_path: Path, text: TextModel) -> Iterator[Start]:
    running: list[RunningEngine] = []

    def start(engine: ScriptedEngine | None = None, **options: object) -> RunningEngine:
        running.append(RunningEngine(engine or ScriptedEngine(text), f"ipc://{tmp_path}/e", **options))  # type: ignore[arg-type]
        return running[-1]

    yield start
    for engine in running:
        if engine._thread.is_alive():
            engine.close()


def request(id: str, max_tokens: int = 100) -> Request:
    return Request(id, [1, 2, 3], SamplingParams(max_tokens=max_tokens, stop_token_ids=(256,)))


async def test_generates_and_reports_load(start: Start, tmp_path: Path, text: TextModel) -> None:
    engine = start().engine
    backend = NativeBackend(f"ipc://{tmp_path}/e")
    await backend.start()
    info = await backend.wait_ready(60)
    assert info.instance == engine.info.instance
    tokens = [token async for delta in backend.generate(request("a")) for token in delta.tokens]
    assert text.decode(tokens) == "Hello, world!"
    assert backend.in_flight == 0
    assert backend.load.generation_tokens == 14
    assert backend.idle_s < 300
    await backend.close()


async def test_closing_the_iterator_aborts(start: Start, tmp_path: Path, text: TextModel) -> None:
    engine = start(ScriptedEngine(text, "word " * 1000, step_s=0.002)).engine
    backend = NativeBackend(f"ipc://{tmp_path}/e")
    await backend.start()
    await backend.wait_ready(60)
    stream = backend.generate(request("a", 10_000))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await eventually(lambda: engine.aborted == ["a"])
    await backend.close()


@pytest.mark.parametrize("silently", [False, True])
async def test_a_lost_engine_fails_its_requests_and_new_ones_wait_for_the_next(
    start: Start, tmp_path: Path, text: TextModel, silently: bool
) -> None:
    first = start(ScriptedEngine(text, "word " * 1000, step_s=0.002))
    backend = NativeBackend(f"ipc://{tmp_path}/e")
    await backend.start()
    await backend.wait_ready(60)
    stream = backend.generate(request("a", 10_000))
    await anext(stream)
    await asyncio.to_thread(first.close, silently=silently)
    with pytest.raises(EngineLost) as lost:
        async for _ in stream:
            pass
    assert lost.value.status == 503
    assert lost.value.retry_after is not None
    assert not backend.ready and backend.in_flight == 0
    assert backend.token_gap._seen_at is None, "the time until it is back is no gap between tokens"
    with pytest.raises(EngineUnavailable):
        backend.submit(request("b"), Mailbox())
    waiting = asyncio.create_task(backend.wait_ready(60))
    await asyncio.sleep(0.05)
    second = start()
    info = await waiting
    assert info.instance == second.engine.info.instance
    assert [delta async for delta in backend.generate(request("c"))][-1].finish_reason == "stop"
    assert [request.request_id for request in second.engine.seen] == ["c"]
    await backend.close()


async def test_no_engine_in_time_is_a_503_and_the_waiting_are_bounded(tmp_path: Path) -> None:
    backend = NativeBackend(f"ipc://{tmp_path}/nobody", max_waiters=2)
    await backend.start()
    results = await asyncio.gather(*(backend.wait_ready(0.2) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(result, EngineUnavailable) for result in results)
    assert sorted(result.reason for result in results) == ["queue_full", "queue_timeout", "queue_timeout"]  # type: ignore[union-attr]
    await backend.close()


async def test_a_frozen_engine_loses_its_requests_and_is_found_again_when_it_thaws(
    start: Start, tmp_path: Path, text: TextModel
) -> None:
    gate = threading.Event()
    gate.set()

    class Freezing(ScriptedEngine):
        def step(self):  # type: ignore[no-untyped-def]
            gate.wait()
            return super().step()

    engine = start(Freezing(text, "word " * 1000, step_s=0.002)).engine
    backend = NativeBackend(f"ipc://{tmp_path}/e")
    await backend.start()
    await backend.wait_ready(60)
    stream = backend.generate(request("a", 10_000))
    await anext(stream)
    gate.clear()
    patience, backend._silence_s = backend._silence_s, 1.0  # only now: a busy machine makes engines silent, too
    with pytest.raises(EngineLost):
        async for _ in stream:
            pass
    backend._silence_s = patience
    counted = backend.load.generation_tokens
    assert counted > 0 and backend.load.running == 0
    gate.set()
    await backend.wait_ready(60)
    assert backend.load.generation_tokens >= counted, "it is the same engine: its counters go on"
    await eventually(lambda: engine.load_snapshot().running == 0)
    assert [delta async for delta in backend.generate(request("b", 3))][-1].finish_reason == "length"
    await backend.close()


async def test_an_engine_that_thaws_is_greeted_once(
    start: Start, tmp_path: Path, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(ScriptedEngine(text))
    backend, sent = NativeBackend(f"ipc://{tmp_path}/e"), []
    await backend.start()
    await backend.wait_ready(60)
    original = backend._try_send

    def seen(message: ToEngine) -> bool:
        sent.append(type(message))
        return original(message)

    monkeypatch.setattr(backend, "_try_send", seen)
    for _ in range(2):
        backend._lost("a test says so")
        for _ in range(3):  # what it had sent before
            backend._on_message(Step(StepOutput([], backend.load)))
        await backend.wait_ready(60)
        assert [delta async for delta in backend.generate(request("b", 3))][-1].finish_reason == "length"
    assert sent.count(Goodbye) == 2
    await backend.close()


@pytest.mark.parametrize("lost", ["hello", "ready"])
async def test_a_greeting_that_is_lost_with_its_connection_is_repeated(
    start: Start, tmp_path: Path, lost: Literal["hello", "ready"]
) -> None:
    start()
    connections: list[Relay] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(Relay(lost.encode() if not connections else None))
        await connections[-1].run((reader, writer), await asyncio.open_unix_connection(tmp_path / "e"))

    async with await asyncio.start_unix_server(relay, tmp_path / "relay"):
        backend = NativeBackend(f"ipc://{tmp_path}/relay")
        await backend.start()
        await backend.wait_ready(60)
        assert connections[0].broken and len(connections) > 1
        assert [delta async for delta in backend.generate(request("a", 3))][-1].finish_reason == "length"
        await backend.close()


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """Passes on what two sides say, until one of them says `fatal`: that is lost, and the connection breaks."""

    def __init__(self, fatal: bytes | None) -> None:
        self._fatal = fatal
        self.broken = False

    async def run(self, one: Stream, other: Stream) -> None:
        both = [asyncio.create_task(self._pass_on(*pair)) for pair in ((one[0], other[1]), (other[0], one[1]))]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for side in (one, other):
            side[1].close()
        await asyncio.gather(*both, return_exceptions=True)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        said = b""
        while data := await source.read(65536):
            said += data
            if self._fatal is not None and self._fatal in said:
                self.broken = True
                return
            target.write(data)
            await target.drain()


async def test_two_gateways_share_one_engine(start: Start, tmp_path: Path, text: TextModel) -> None:
    engine = start(ScriptedEngine(text, step_s=0.002)).engine
    backends = [NativeBackend(f"ipc://{tmp_path}/e") for _ in range(2)]
    for backend in backends:
        await backend.start()
        await backend.wait_ready(60)

    async def run(backend: NativeBackend, id: str) -> str:
        return text.decode([token async for delta in backend.generate(request(id)) for token in delta.tokens])

    answers = await asyncio.gather(*(run(backends[i % 2], f"r{i}") for i in range(8)))
    assert answers == ["Hello, world!"] * 8
    stream = backends[0].generate(request("left-behind", 10_000))
    await anext(stream)
    await backends[0].close()
    await eventually(lambda: engine.load_snapshot().running == 0)
    assert await run(backends[1], "last") == "Hello, world!"
    await backends[1].close()


async def test_requests_in_flight_are_bounded(start: Start, tmp_path: Path, text: TextModel) -> None:
    engine = ScriptedEngine(text)
    engine.hold = True
    start(engine)
    backend = NativeBackend(f"ipc://{tmp_path}/e", max_in_flight=2)
    await backend.start()
    await backend.wait_ready(60)
    mailbox = Mailbox()
    backend.submit(request("a"), mailbox)
    backend.submit(request("b"), mailbox)
    with pytest.raises(Overloaded):
        backend.submit(request("c"), mailbox)
    backend.abort("a")
    backend.submit(request("c"), mailbox)
    await backend.close()


async def test_encrypted(start: Start, text: TextModel, tmp_path: Path) -> None:
    server_public, server_secret = generate_keypair()
    client_public, client_secret = generate_keypair()
    start(curve=CurveServer(server_secret, [client_public]))
    backend = NativeBackend(f"ipc://{tmp_path}/e", curve=CurveClient(server_public, client_secret))
    await backend.start()
    await backend.wait_ready(60)
    assert [delta async for delta in backend.generate(request("a"))][-1].finish_reason == "stop"
    await backend.close()
    _, stranger = generate_keypair()
    assert public_key(stranger) != client_public
    outsider = NativeBackend(f"ipc://{tmp_path}/e", curve=CurveClient(server_public, stranger))
    await outsider.start()
    with pytest.raises(EngineUnavailable):
        await outsider.wait_ready(0.3)
    await outsider.close()
