"""Time-slice groups over real sockets: engines sleep and wake, requests wait for them (R-ENG-14)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.backends.native import NativeBackend
from penstock.engine.request import Request, SamplingParams
from penstock.protocol.errors import EngineUnavailable, ModelAsleep
from penstock.routing.registry import ServedModel
from penstock.routing.time_slice_groups import TimeSlices
from tests.engine_host.client import serving
from tests.engine_host.scripted import ScriptedEngine
from tests.gateway.conftest import eventually

SLICE_S = 0.3


@dataclass
class CountingSleeper:
    """Keeps the scripted engine, counts who is awake, and fails when told to."""

    awake: set[str]
    name: str
    broken: bool = False
    log: list[str] = field(default_factory=list)

    def sleep(self, engine: Any) -> Any:
        assert not engine.has_work, "put to sleep under a request"
        self.awake.discard(self.name)
        self.log.append("sleep")
        return engine

    def collect(self) -> None:
        self.log.append("collect")

    def wake(self, sleeping: Any) -> Any:
        if self.broken:
            raise MemoryError("no room on the device")
        self.awake.add(self.name)
        assert len(self.awake) == 1, "two models in one memory"
        self.log.append("wake")
        return sleeping


@dataclass
class World:
    models: dict[str, ServedModel]
    sleepers: dict[str, CountingSleeper]
    engines: dict[str, ScriptedEngine]
    slices: TimeSlices

    async def ask(self, name: str, tokens: int = 3, within_s: float = 60.0) -> list[int]:
        """What a request through the gateway does: wait for the turn, run, give it back."""
        release = await self.slices.acquire(self.models[name], within_s)
        assert release is not None
        try:
            request = Request(f"{name}-{time.monotonic_ns()}", [100], SamplingParams(max_tokens=tokens))
            return [token async for delta in self.models[name].backend.generate(request) for token in delta.tokens]
        finally:
            release()


@asynccontextmanager
async def world(*names: str, state: str = "sleeping", group: str = "g") -> AsyncIterator[World]:
    awake: set[str] = set()
    async with AsyncExitStack() as stack:
        models, sleepers, engines = {}, {}, {}
        for name in names:
            sleepers[name] = CountingSleeper(awake, name)
            engines[name] = ScriptedEngine(instance=name)
            running = stack.enter_context(serving(engines[name], sleeper=sleepers[name], state=state))
            backend = NativeBackend(running.endpoint)
            await backend.start()
            stack.push_async_callback(backend.close)
            await backend.wait_ready(60)
            text: Any = None
            models[name] = ServedModel(name, text, backend, time_slice=group)
        slices = TimeSlices(models.values(), SLICE_S)
        slices.start()
        stack.push_async_callback(slices.close)
        yield World(models, sleepers, engines, slices)


async def test_requests_wake_their_model_and_never_two_are_awake() -> None:
    async with world("a", "b", "c") as w:
        assert {model.backend.state for model in w.models.values()} == {"sleeping"}
        answers = await asyncio.gather(*(w.ask(name) for name in "abcabcab"))
        assert answers == [[100, 101, 102]] * 8
        # Each was woken once for all who waited: no swapping for single requests.
        assert [sleeper.log.count("wake") for sleeper in w.sleepers.values()] == [1, 1, 1]


async def test_a_model_keeps_its_memory_while_a_request_runs() -> None:
    async with world("a", "b") as w:
        w.engines["a"].pause_at = 10
        long = asyncio.create_task(w.ask("a", tokens=60))
        await eventually(lambda: w.models["a"].backend.in_flight == 1)
        other = asyncio.create_task(w.ask("b"))
        await asyncio.sleep(2 * SLICE_S)  # well beyond its slice
        assert not other.done() and not long.done()
        w.engines["a"].pause_at = None
        assert await other == [100, 101, 102]
        assert long.done() and len(await long) == 60


async def test_whoever_waits_too_long_is_told_when_to_come_back() -> None:
    async with world("a", "b") as w:
        w.engines["a"].paused = True
        long = asyncio.create_task(w.ask("a", tokens=60))
        await eventually(lambda: w.models["a"].backend.in_flight == 1)
        with pytest.raises(ModelAsleep, match="could not be woken within") as raised:
            await w.ask("b", within_s=0.2)
        assert raised.value.status == 503 and "retry-after" in {key.lower() for key in raised.value.headers()}
        w.engines["a"].paused = False
        await long
        assert await w.ask("a") and await w.ask("b"), "giving up leaves nothing behind"


async def test_a_cancelled_waiter_holds_nothing() -> None:
    async with world("a", "b") as w:
        w.engines["a"].paused = True
        long = asyncio.create_task(w.ask("a"))
        await eventually(lambda: w.models["a"].backend.in_flight == 1)
        waiting = asyncio.create_task(w.slices.acquire(w.models["b"], 60.0))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        w.engines["a"].paused = False
        await long
        assert await w.ask("a") and await w.ask("b") and await w.ask("a")


async def test_a_model_that_cannot_wake_fails_its_own_requests_only() -> None:
    async with world("a", "b") as w:
        w.sleepers["b"].broken = True
        answer, problem = await asyncio.gather(w.ask("a"), w.ask("b"), return_exceptions=True)
        assert answer == [100, 101, 102]
        assert isinstance(problem, EngineUnavailable) and "no room on the device" in problem.message
        assert await w.ask("a") == [100, 101, 102]
        w.sleepers["b"].broken = False
        assert await w.ask("b") == [100, 101, 102]


async def test_by_hand_a_model_finishes_what_it_runs_sleeps_and_wakes() -> None:
    async with world("a", state="awake", group="") as w:
        w.engines["a"].paused = True
        backend = w.models["a"].backend
        request = Request("r", [100], SamplingParams(max_tokens=30))

        async def run() -> list[int]:
            return [token async for delta in backend.generate(request) for token in delta.tokens]

        running = asyncio.create_task(run())
        await eventually(lambda: backend.in_flight == 1)
        sleeping = asyncio.create_task(backend.sleep())
        await eventually(lambda: backend.state != "awake")
        w.engines["a"].paused = False
        await sleeping
        assert running.done() and len(await running) == 30
        assert backend.state == "sleeping"
        with pytest.raises(ModelAsleep, match="/v1/admin/models/a/wake"):
            await w.slices.acquire(w.models["a"], 1.0)
        with pytest.raises(ModelAsleep):
            [delta async for delta in backend.generate(Request("s", [1], SamplingParams(max_tokens=1)))]
        await backend.sleep()  # again: nothing happens
        w.sleepers["a"].awake.clear()
        await backend.wake()
        await backend.wake()
        assert backend.state == "awake" and w.sleepers["a"].log == ["sleep", "collect", "wake"]
        assert await w.slices.acquire(w.models["a"], 1.0) is None
