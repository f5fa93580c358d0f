"""Requests that may not wait long for their first token: refused in time, unless an engine has begun with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.backends.mailbox import Mailbox
from penstock.backends.native import NativeBackend
from penstock.engine.request import Request, SamplingParams
from penstock.protocol.errors import EngineLost, EngineUnavailable, Overloaded
from penstock.routing import dispatch
from penstock.routing.dispatch import Resilience
from penstock.routing.replicas import ReplicaSet
from tests.engine_host.client import Running, serving
from tests.engine_host.scripted import ScriptedEngine
from tests.gateway.conftest import eventually
from tests.ports import free_port

LIMIT_S = 0.3


class Engine(ScriptedEngine):
    """It says that it begins with whatever comes, or not; its steps produce nothing while it is paused."""

    def __init__(self, *, begins: bool) -> None:
        super().__init__(instance=str(id(self)))
        self.on_begun: Callable[[list[str]], None] = lambda request_ids: None
        self.begins = begins
        self.paused = True
        self.patience_s: list[float | None] = []

    def submit(self, request: Request) -> None:
        super().submit(request)
        self.patience_s.append(request.patience_s)
        if self.begins:
            self.on_begun([request.request_id])


@dataclass
class World:
    replicas: ReplicaSet
    engines: list[Engine]
    servers: list[Running]

    def crash(self, index: int) -> None:
        """No last words: the connection just closes."""
        running = self.servers[index]
        running.server._peers.tell_all = lambda *args: None  # type: ignore[method-assign]
        running.server.stop()
        running.join()
        running.server._listener.close()

    def submit(self, id: str, mailbox: Mailbox, index: int = 0, **more: Any) -> None:
        self.replicas.submit(Request(id, [1], SamplingParams(max_tokens=3), **more), mailbox, index)

    async def tokens(self, id: str = "r", **more: Any) -> list[int]:
        more = {"patience_s": LIMIT_S, **more}
        request = Request(id, [1], SamplingParams(max_tokens=3), **more)
        return [token async for delta in self.replicas.generate(request) for token in delta.tokens]

    @property
    def idle(self) -> bool:
        held = any(engine.running for engine in self.engines) or any(member.legs for member in self.replicas.members)
        return not held and not self.replicas.in_flight


@asynccontextmanager
async def world(*begins: bool, **resilience: Any) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        engines = [Engine(begins=each) for each in begins]
        servers = [stack.enter_context(serving(engine, f"tcp://127.0.0.1:{free_port()}")) for engine in engines]
        backends = [NativeBackend(running.endpoint, name=str(index)) for index, running in enumerate(servers)]
        options: dict[str, Any] = {"stall_s": 1e6, "retry_share": 1.0, **resilience}
        replicas = ReplicaSet("scripted", backends, resilience=Resilience(**options))
        await replicas.start()
        stack.push_async_callback(replicas.close)
        await eventually(lambda: all(backend.ready for backend in backends))
        yield World(replicas, engines, servers)


async def test_what_no_engine_has_begun_in_time_is_refused_and_leaves_nothing() -> None:
    async with world(False) as it:
        began = time.monotonic()
        with pytest.raises(Overloaded, match="longer than this one may wait") as refused:
            await it.tokens()
        assert LIMIT_S <= time.monotonic() - began < 5.0
        assert refused.value.reason == "queue_timeout" and refused.value.retry_after
        await eventually(lambda: it.idle)
        assert it.engines[0].aborted == ["r"]


async def test_what_has_begun_is_finished_however_late() -> None:
    async with world(True) as it:
        asked = asyncio.create_task(it.tokens())
        await asyncio.sleep(2 * LIMIT_S)
        assert not asked.done()
        it.engines[0].paused = False
        assert await asked == [1, 2, 3]
        await eventually(lambda: it.idle)


async def test_requests_without_a_limit_and_resumed_ones_wait() -> None:
    async with world(False) as it:
        asked = [
            asyncio.create_task(it.tokens("a", patience_s=None)),
            asyncio.create_task(it.tokens("b", produced=[1])),
        ]
        await asyncio.sleep(2 * LIMIT_S)
        it.engines[0].paused = False
        assert await asyncio.gather(*asked) == [[1, 2, 3], [2, 3]]


async def test_what_can_begin_at_once_runs_also_when_nothing_of_its_time_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "NOTICE_S", 5.0)  # however busy this machine is
    async with world(True) as it:
        it.engines[0].paused = False
        assert await it.tokens(patience_s=0.0) == [1, 2, 3]


async def test_a_choice_that_has_not_begun_does_not_stop_the_answers_of_others() -> None:
    async with world(False) as it:
        mailbox = Mailbox()
        for index in range(2):
            it.submit(f"r{index}", mailbox, index, patience_s=LIMIT_S if index == 0 else None)
        await eventually(lambda: len(it.engines[0].running) == 2)
        first = it.engines[0].running.pop("r0")
        it.engines[0].paused = False
        await eventually(lambda: mailbox.produced.get(1) == 3)
        await asyncio.sleep(2 * LIMIT_S)
        it.engines[0].running["r0"] = first
        await eventually(lambda: mailbox.produced.get(0) == 3)
        assert mailbox.error is None


async def test_time_counts_from_the_arrival_also_when_an_engine_dies() -> None:
    async with world(True, True) as it:
        asked = asyncio.create_task(it.tokens())
        await eventually(lambda: any(engine.running for engine in it.engines))
        on = next(index for index, engine in enumerate(it.engines) if engine.running)
        other = it.engines[1 - on]
        other.begins = False
        await asyncio.sleep(2 * LIMIT_S)
        assert not asked.done()
        it.crash(on)
        with pytest.raises(Overloaded) as refused:
            await asked
        assert refused.value.reason == "queue_timeout"
        assert other.patience_s == [0.0], "nothing of its time was left"
        await eventually(lambda: other.aborted == ["r"])


async def test_while_it_is_computed_anywhere_it_is_not_refused() -> None:
    """Hedged: one replica computes it, the other has not begun; until the first is gone."""
    async with world(True, True, hedge_s=0.05) as it:
        asked = asyncio.create_task(it.tokens())
        await eventually(lambda: any(engine.running for engine in it.engines))
        computing = next(index for index, engine in enumerate(it.engines) if engine.running)
        it.engines[1 - computing].begins = False
        await eventually(lambda: all(engine.running for engine in it.engines))
        await asyncio.sleep(2 * LIMIT_S)
        assert not asked.done()
        left = it.engines[1 - computing].patience_s
        assert left[0] is not None and left[0] < LIMIT_S, "it has waited already"
        it.crash(computing)
        with pytest.raises(Overloaded):
            await asked


async def test_a_parked_request_is_given_up_as_before() -> None:
    async with world(False) as it:
        it.crash(0)
        await eventually(lambda: not it.replicas.ready)
        with pytest.raises(EngineUnavailable, match="this request waits no longer") as refused:
            await it.tokens()
        assert refused.value.reason == "queue_timeout" and not isinstance(refused.value, EngineLost)


async def test_a_resumed_request_stays_parked() -> None:
    """Its client has had the first token: nothing of the limit is left to keep."""
    async with world(False) as it:
        it.crash(0)
        await eventually(lambda: not it.replicas.ready)
        asked = asyncio.create_task(it.tokens(produced=[1]))
        await asyncio.sleep(2 * LIMIT_S)
        assert not asked.done()
        asked.cancel()
