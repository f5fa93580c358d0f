"""The drain: nothing new, time for what runs, an error for the rest."""

from __future__ import annotations

import asyncio

import pytest

from penstock.gateway.app.background import BackgroundTasks
from penstock.gateway.app.drain import Drain
from penstock.protocol.errors import Draining, EngineLost


class Work:
    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self.error: Exception | None = None
        drain.enter()
        drain.track(self)

    def fail(self, error: Exception) -> None:
        self.error = error
        self.end()

    def end(self) -> None:
        self._drain.untrack(self)
        self._drain.leave()


async def test_a_drain_waits_for_running_requests_and_refuses_new_ones() -> None:
    begun: list[bool] = []
    drain = Drain()
    drain.on_begin(lambda: begun.append(True))
    work = Work(drain)
    draining = asyncio.create_task(drain.run(30))
    await asyncio.sleep(0)
    assert drain.active and begun == [True] and not draining.done()
    with pytest.raises(Draining):
        drain.enter()
    work.end()
    await draining
    assert work.error is None


async def test_before_a_drain_the_gateway_is_not_ready_but_still_takes_requests() -> None:
    drain = Drain()
    draining = asyncio.create_task(drain.run(30, delay_s=0.05))
    await asyncio.sleep(0)
    assert drain.leaving and not drain.active
    work = Work(drain)
    await asyncio.sleep(0.06)
    assert drain.active
    work.end()
    await draining
    assert work.error is None


async def test_what_does_not_finish_in_time_is_aborted() -> None:
    drain = Drain()
    work = Work(drain)
    await drain.run(0.01)
    assert isinstance(work.error, EngineLost) and not drain.requests


async def test_background_tasks_are_waited_for_at_the_end() -> None:
    tasks = BackgroundTasks()
    done: list[int] = []

    async def work() -> None:
        await asyncio.sleep(0.01)
        done.append(1)

    tasks.start(work())
    assert len(tasks) == 1
    await tasks.close()
    assert done == [1] and not len(tasks)
