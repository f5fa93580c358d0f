"""Admission queues as gateways use them: grants reach waiting entries, several gateways share one order, and waiting
requests survive the loss of Redis."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.config.routing import AdmissionConfig
from penstock.routing.admission import redis as redis_queue
from penstock.routing.admission.memory import MemoryQueue
from penstock.routing.admission.queue import PREMIUM, AdmissionQueue, Capacity, Outcome, QueueEntry
from penstock.routing.admission.redis import RedisQueue

_models = itertools.count()
RULES = AdmissionConfig()
ONE, TWO = Capacity(slots=1), Capacity(slots=2)


async def eventually(condition: Callable[[], bool], within: float = 60.0) -> None:
    deadline = asyncio.get_running_loop().time() + within
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "did not become true in time"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def gateways(url: str, count: int, capacity: Capacity) -> AsyncIterator[list[RedisQueue]]:
    model = f"m{next(_models)}"
    queues = [RedisQueue(url, model, RULES, lambda: capacity) for _ in range(count)]
    for queue in queues:
        await queue.start()
    try:
        yield queues
    finally:
        for queue in queues:
            await queue.close()


@pytest.fixture(params=["memory", "redis"])
async def queue(request: pytest.FixtureRequest) -> AsyncIterator[AdmissionQueue]:
    if request.param == "memory":
        memory = MemoryQueue(RULES, lambda: ONE)
        yield memory
        await memory.close()
        return
    port = request.getfixturevalue("client").connection_pool.connection_kwargs["port"]
    async with gateways(f"redis://127.0.0.1:{port}", 1, ONE) as queues:
        yield queues[0]


def told(waiter: asyncio.Future[Outcome]) -> Outcome | None:
    return waiter.result() if waiter.done() else None


async def test_a_release_grants_the_next(queue: AdmissionQueue) -> None:
    first = await queue.enter(QueueEntry("1", "a"), ONE)
    second, third = await queue.enter(QueueEntry("2", "a"), ONE), await queue.enter(QueueEntry("3", "b", PREMIUM), ONE)
    assert (told(first), told(second), told(third)) == ("granted", None, None)
    assert queue.state("a", 1).queued == (1, 1, 0)
    queue.release("1", 1.0)
    assert await asyncio.wait_for(third, 60) == "granted"
    assert told(second) is None
    queue.leave("3")  # granted, but not wanted any more
    assert await asyncio.wait_for(second, 60) == "granted"
    queue.release("2", 1.0)
    queue.release("2", 1.0)
    queue.leave("unknown")
    await eventually(lambda: queue.state("a", 1).in_flight == 0)


async def test_who_leaves_is_not_granted(queue: AdmissionQueue) -> None:
    await queue.enter(QueueEntry("1", "a"), ONE)
    waiter = await queue.enter(QueueEntry("2", "a"), ONE)
    queue.leave("2")
    queue.release("1", 1.0)
    await eventually(lambda: queue.state("a", 1).in_flight == 0 and queue.state("a", 1).depth == 0)
    assert told(waiter) is None


async def test_gateways_share_one_order_and_one_room(client: Any) -> None:
    url = f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}"
    async with gateways(url, 2, TWO) as (one, other):
        running = [await one.enter(QueueEntry("1", "a"), TWO), await other.enter(QueueEntry("2", "a"), TWO)]
        assert [told(waiter) for waiter in running] == ["granted", "granted"]
        late = await other.enter(QueueEntry("3", "a"), TWO)
        urgent = await one.enter(QueueEntry("4", "a", PREMIUM), TWO)
        assert told(late) is told(urgent) is None
        other.release("2", 1.0)  # a release here grants an entry there
        assert await asyncio.wait_for(urgent, 60) == "granted"
        assert told(late) is None
        one.release("1", 1.0)
        assert await asyncio.wait_for(late, 60) == "granted"


async def test_redis_may_go_and_come_back(valkey: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_queue, "RETRY_S", 0.05)
    url = f"redis://127.0.0.1:{valkey.port}"
    valkey._desired_port = valkey.port  # the same one again when it is restarted
    async with gateways(url, 2, TWO) as (one, other):
        await one.enter(QueueEntry("1", "a"), TWO)
        await other.enter(QueueEntry("2", "a"), TWO)
        waiting = await one.enter(QueueEntry("3", "a"), TWO)
        valkey.stop()
        # Each gateway by itself now: one has one running, so there is room for what waited.
        assert await asyncio.wait_for(waiting, 60) == "granted"
        assert not one.shared
        held = await one.enter(QueueEntry("4", "a"), TWO)
        assert told(held) is None
        other.release("2", 1.0)
        assert told(await other.enter(QueueEntry("5", "a"), TWO)) == "granted"

        valkey.start()
        await eventually(lambda: one.shared and other.shared)
        await eventually(lambda: one.state("a", 1).in_flight == 3)  # 1, 3 and 5: what runs, runs
        assert told(held) is None and one.state("a", 1).depth == 1
        one.release("1", 1.0)
        one.release("3", 1.0)
        assert await asyncio.wait_for(held, 60) == "granted"
        one.release("4", 1.0)
        other.release("5", 1.0)
        await eventually(lambda: one.state("a", 1).in_flight == 0)


async def test_redis_that_lost_its_memory_is_told_again(client: Any) -> None:
    url = f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}"
    async with gateways(url, 1, ONE) as (queue,):
        await queue.enter(QueueEntry("1", "a"), ONE)
        waiting = await queue.enter(QueueEntry("2", "a"), ONE)
        client.flushall()
        await eventually(lambda: bool(client.keys("penstock:admission:*:e")))
        await eventually(lambda: queue.state("a", 1).in_flight == 1 and queue.state("a", 1).depth == 1)
        queue.release("1", 1.0)
        assert await asyncio.wait_for(waiting, 60) == "granted"


async def test_an_entry_that_is_cancelled_on_its_way_holds_nothing(client: Any) -> None:
    url = f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}"
    async with gateways(url, 1, ONE) as (queue,):
        for number in range(5):
            entering = asyncio.create_task(queue.enter(QueueEntry(f"{number}", "a"), ONE))
            await asyncio.sleep(0)
            entering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await entering
        await eventually(lambda: not queue._mine and not client.exists(f"{queue._prefix}e"))
        assert told(await queue.enter(QueueEntry("next", "a"), ONE)) == "granted"
