"""Threads for long texts: no tenant keeps another one waiting."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from penstock.protocol.errors import RateLimitExceeded
from penstock.text import fair_threads
from penstock.text.fair_threads import FairThreads


class Work:
    """Runs until it is told to end."""

    def __init__(self) -> None:
        self.begun = self.running = 0
        self.end = threading.Event()

    def __call__(self) -> int:
        self.begun += 1
        self.running += 1
        self.end.wait(120)
        self.running -= 1
        return self.begun


async def until(condition: object) -> None:
    deadline = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def test_one_tenant_never_holds_all_threads() -> None:
    threads, held, other = FairThreads(3, 2), Work(), Work()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(10):
                group.create_task(threads.run("flood", 1, held))
            await until(lambda: held.begun == 2)
            other.end.set()
            assert await asyncio.wait_for(threads.run("other", 1, other), 20) == 1
            assert held.begun == 2, "the third thread was left to others"
            held.end.set()
        assert held.begun == 10
        assert threads._tenants == {} and threads._free == 3
    finally:
        threads.close()


async def test_free_threads_go_to_tenants_in_turn() -> None:
    threads, order = FairThreads(1, 1), []

    def note(name: str) -> None:
        order.append(name)

    try:
        first = Work()
        async with asyncio.TaskGroup() as group:
            group.create_task(threads.run("a", 1, first))
            await until(lambda: first.begun)
            for name in ("a", "a", "a", "b", "c"):
                group.create_task(threads.run(name, 1, note, name))
            await asyncio.sleep(0)
            first.end.set()
        assert order[:3] in (["a", "b", "c"], ["b", "c", "a"]) and sorted(order) == ["a", "a", "a", "b", "c"]
    finally:
        threads.close()


async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_threads, "WAITING_CHARACTERS", 100)
    threads, work = FairThreads(1, 1), Work()
    try:
        running = [asyncio.create_task(threads.run("a", 60, work)) for _ in range(2)]
        await until(lambda: work.begun)
        with pytest.raises(RateLimitExceeded, match="one after the other"):
            await threads.run("a", 60, work)
        running[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await running[1]
        again = asyncio.create_task(threads.run("a", 60, work))
        await asyncio.sleep(0)
        work.end.set()
        assert await running[0] and await again
        assert threads._tenants == {} and threads._free == 1
    finally:
        threads.close()


async def test_a_thread_is_held_until_its_work_ends() -> None:
    """A caller that leaves does not make room while its work goes on."""
    threads, work = FairThreads(1, 1), Work()
    try:
        task = asyncio.create_task(threads.run("a", 1, work))
        await until(lambda: work.running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert threads._free == 0
        work.end.set()
        await until(lambda: threads._free == 1)
        assert threads._tenants == {}
        with pytest.raises(ZeroDivisionError):
            await threads.run("a", 1, lambda: 1 // 0)
        await until(lambda: threads._free == 1)
    finally:
        threads.close()
