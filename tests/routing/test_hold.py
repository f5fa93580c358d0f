"""Scale to zero: requests are held while the first replica starts (R-OPS-4)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from penstock.backends.base import Backend
from penstock.engine.request import EngineInfo, EngineLoad
from penstock.protocol.errors import EngineUnavailable
from penstock.routing.hold import HoldLimits, HoldQueue
from penstock.routing.registry import ServedModel
from penstock.routing.replicas import ReplicaSet
from penstock.text import TextModel
from tests.virtual_time import run_in_virtual_time

INFO = EngineInfo("m", "i", 2048, 100, 16, 100, 8, "cpu", "float32")


class Engine:
    """An engine that is ready when the test says so."""

    def __init__(self, name: str = "0") -> None:
        self.name = name
        self.ready = False
        self.state = "awake"
        self.in_flight = 0
        self.load = EngineLoad()
        self.adapters = None

    @property
    def info(self) -> EngineInfo | None:
        return INFO if self.ready else None

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def wait_ready(self, within: float, *, at_most: float = math.inf) -> EngineInfo:
        if not self.ready:
            raise EngineUnavailable("not up")
        return INFO


def sleeping(limits: HoldLimits = HoldLimits(60.0, 3)) -> ReplicaSet:  # noqa: B008
    return ReplicaSet("m", [], hold=limits, clock=lambda: asyncio.get_running_loop().time())


def hold(found: ReplicaSet) -> HoldQueue:
    assert found.hold is not None
    return found.hold


def in_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    run_in_virtual_time(main)


def test_a_request_is_held_until_the_first_replica_is_ready() -> None:
    async def main() -> None:
        found, wanted = sleeping(), 0
        model = ServedModel("m", cast(TextModel, None), found)
        assert model.state == "asleep" and model.on_demand

        def count() -> None:
            nonlocal wanted
            wanted += 1

        hold(found).on_wanted = count
        waiting = asyncio.create_task(found.wait_ready(10.0))
        await asyncio.sleep(1.0)
        assert (wanted, hold(found).waiting, found.arrived) == (1, 1, 1)
        engine = Engine()
        await found.join(cast(Backend, engine))
        assert model.state == "starting"
        await asyncio.sleep(25.0)
        assert not waiting.done(), "longer than the 10 s for an engine that should be up"
        engine.ready = True
        assert await waiting == INFO and hold(found).waiting == 0
        assert model.state == "awake"
        assert await found.wait_ready(10.0) == INFO and wanted == 1
        found.retire("0")
        await asyncio.sleep(1.0)
        assert model.state == "asleep"
        assert found.info == INFO, "what is known of the engine is still known"
        await found.close()

    in_virtual_time(main())


def test_the_queue_is_bounded_and_says_when_to_try_again() -> None:
    async def main() -> None:
        found = sleeping()
        hold(found).cold_start_s = 20.0
        held = [asyncio.create_task(found.wait_ready(10.0)) for _ in range(3)]
        await asyncio.sleep(5.0)
        with pytest.raises(EngineUnavailable, match="3 requests already wait") as refused:
            await found.wait_ready(10.0)
        assert refused.value.reason == "queue_full" and refused.value.retry_after in (15, 16)
        begin = asyncio.get_running_loop().time()
        results = await asyncio.gather(*held, return_exceptions=True)
        assert asyncio.get_running_loop().time() - begin == pytest.approx(55.0, abs=0.2)
        assert all(isinstance(result, EngineUnavailable) for result in results)
        assert {cast(EngineUnavailable, result).reason for result in results} == {"queue_timeout"}

    in_virtual_time(main())


def test_a_client_that_allows_less_is_held_for_less() -> None:
    async def main() -> None:
        found = sleeping()
        begin = asyncio.get_running_loop().time()
        with pytest.raises(EngineUnavailable, match="not ready after 2 s"):
            await found.wait_ready(10.0, at_most=2.0)
        assert asyncio.get_running_loop().time() - begin == pytest.approx(2.0, abs=0.2)
        hold(found).cold_start_s = 20.0
        with pytest.raises(EngineUnavailable, match=r"longer than this request may wait \(2 s\)"):
            await found.wait_ready(10.0, at_most=2.0)
        assert asyncio.get_running_loop().time() - begin == pytest.approx(2.0, abs=0.2)

    in_virtual_time(main())


def test_a_request_that_cannot_be_answered_in_time_is_refused_at_once_and_wakes_the_model() -> None:
    async def main() -> None:
        found, wanted = sleeping(HoldLimits(30.0, 10)), []
        hold(found).cold_start_s = 90.0
        hold(found).on_wanted = lambda: wanted.append(1)
        with pytest.raises(EngineUnavailable, match="about 90 s") as refused:
            await found.wait_ready(10.0)
        assert refused.value.retry_after == 90.0 and wanted
        await asyncio.sleep(70.0)
        waiting = asyncio.create_task(found.wait_ready(10.0))
        await asyncio.sleep(1.0)
        assert hold(found).waiting == 1, "20 s are left, which is soon enough"
        engine = Engine()
        engine.ready = True
        await found.join(cast(Backend, engine))
        assert await waiting == INFO
        await found.close()

    in_virtual_time(main())


def test_a_request_with_a_fallback_does_not_wait_but_wakes_the_model() -> None:
    async def main() -> None:
        found, wanted = sleeping(), []
        hold(found).on_wanted = lambda: wanted.append(1)
        with pytest.raises(EngineUnavailable):
            await found.wait_ready(0.0)
        assert wanted and found.arrived == 1

    in_virtual_time(main())


def test_a_model_that_is_not_scaled_to_zero_holds_nothing() -> None:
    async def main() -> None:
        found = ReplicaSet("m", [])
        with pytest.raises(EngineUnavailable, match="no replica"):
            await found.wait_ready(10.0)
        assert not found.asleep and not ServedModel("m", cast(TextModel, None), found).on_demand

    in_virtual_time(main())
