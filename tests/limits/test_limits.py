"""All limit stores: limits are never exceeded and hardly under-used; nothing is lost or counted twice."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.gateway.workers.client import CoordinatedLimits, CoordinatorClient
from penstock.gateway.workers.coordinator import WorkerCoordinator
from penstock.limits import Amounts, Limit, LimitStore
from penstock.limits.memory import MemoryLimits
from penstock.limits.redis import RedisLimits
from penstock.protocol.errors import Overloaded
from penstock.storage import redis
from tests.services import PATIENCE_S


class Clock:
    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@asynccontextmanager
async def with_coordinator(
    path: Path, workers: int, clock: Clock | None = None
) -> AsyncIterator[list[CoordinatorClient]]:
    """Workers of one coordinator, each with a connection of its own."""
    async with WorkerCoordinator(path, MemoryLimits(clock) if clock is not None else None):
        clients = [
            CoordinatorClient(path, number, readings=list, changed=lambda: None, traces=lambda query: [])
            for number in range(workers)
        ]
        for client in clients:
            await client.start()
        yield clients
        for client in clients:
            await client.close()


async def test_a_change_is_known_to_every_worker_when_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.workers.coordinator.ANSWER_S", 120.0)
    noted: list[int] = []
    async with WorkerCoordinator(tmp_path / "coordinator"):
        clients = [
            CoordinatorClient(
                tmp_path / "coordinator",
                number,
                readings=list,
                changed=partial(noted.append, number),
                traces=lambda query: [],
            )
            for number in range(4)
        ]
        for client in clients:
            await client.start()
        await clients[3].close()  # one that left is not waited for
        await asyncio.wait_for(clients[1].tell_changed(), 60)
        assert sorted(noted) == [0, 2]
        for client in clients[:3]:
            await client.close()
        await clients[0].tell_changed()  # nobody is there any more: nothing to wait for


@pytest.fixture(params=["memory", "coordinator", "redis"])
async def store(request: pytest.FixtureRequest, clock: Clock, tmp_path: Path) -> AsyncIterator[LimitStore]:
    if request.param == "memory":
        yield MemoryLimits(clock)
        return
    if request.param == "coordinator":
        async with with_coordinator(tmp_path / "coordinator", 1, clock) as (client,):
            yield CoordinatedLimits(client)
        return
    server = request.getfixturevalue("valkey")
    opened = RedisLimits(f"redis://127.0.0.1:{server.port}", clock=clock, fallback="closed")
    yield opened
    await opened.close()


REQUESTS = Limit("tenant:acme:requests", "requests", 10, 60.0)
TOKENS = Limit("tenant:acme:tokens", "tokens", 1000, 60.0)
RUNNING = Limit("tenant:acme:running", "concurrent", 3, 3600.0)
BUDGET = Limit("tenant:acme:day", "budget", 5_000_000_000, 86400.0)


async def test_what_fits_is_granted_and_the_rest_is_told_when(store: LimitStore, clock: Clock) -> None:
    for index in range(10):
        decision = await store.reserve(f"r{index}", [REQUESTS], Amounts())
        assert decision.refusal is None and decision.states[0].remaining == 9 - index
        clock.now += 1.0
    refused = await store.reserve("r10", [REQUESTS], Amounts())
    assert refused.refusal is not None and refused.refusal.limit == REQUESTS
    assert refused.refusal.retry_s is not None and 50.0 <= refused.refusal.retry_s <= 52.0
    clock.now += refused.refusal.retry_s
    assert (await store.reserve("r11", [REQUESTS], Amounts())).refusal is None
    assert (await store.reserve("r12", [REQUESTS], Amounts())).refusal is not None


async def test_all_limits_or_none(store: LimitStore) -> None:
    assert (await store.reserve("a", [REQUESTS, TOKENS], Amounts(tokens=900))).refusal is None
    refused = await store.reserve("b", [REQUESTS, TOKENS], Amounts(tokens=200))
    assert refused.refusal is not None and refused.refusal.limit == TOKENS
    assert [state.used for state in refused.states] == [1, 900]
    assert (await store.reserve("c", [REQUESTS, TOKENS], Amounts(tokens=100))).refusal is None


async def test_a_request_larger_than_the_limit_is_never_possible(store: LimitStore) -> None:
    refused = await store.reserve("a", [TOKENS], Amounts(tokens=1001))
    assert refused.refusal is not None and refused.refusal.retry_s is None


async def test_what_was_not_used_is_given_back_once(store: LimitStore) -> None:
    limits = [TOKENS, RUNNING, BUDGET]
    reserved = Amounts(tokens=800, budget=4_000_000_000)
    used = Amounts(tokens=300, budget=1_000_000_000)
    assert (await store.reserve("a", limits, reserved)).refusal is None
    assert (await store.reserve("b", limits, reserved)).refusal is not None
    await store.settle("a", limits, reserved, used)
    await store.settle("a", limits, reserved, used)
    await store.settle("never", limits, reserved, used)
    decision = await store.reserve("c", limits, Amounts(tokens=700, budget=4_000_000_000))
    assert decision.refusal is None
    assert [state.used for state in decision.states] == [1000, 1, 5_000_000_000]


async def test_using_more_than_was_reserved_counts(store: LimitStore) -> None:
    await store.reserve("a", [TOKENS], Amounts(tokens=100))
    await store.settle("a", [TOKENS], Amounts(tokens=100), Amounts(tokens=950))
    assert (await store.reserve("b", [TOKENS], Amounts(tokens=51))).refusal is not None


async def test_concurrency_comes_back_with_the_end_of_a_request(store: LimitStore) -> None:
    for index in range(3):
        assert (await store.reserve(f"r{index}", [RUNNING], Amounts())).refusal is None
    assert (await store.reserve("r3", [RUNNING], Amounts())).refusal is not None
    await store.settle("r1", [RUNNING], Amounts(), Amounts())
    assert (await store.reserve("r4", [RUNNING], Amounts())).refusal is None


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(seed=st.integers(0, 2**32))
async def test_no_window_ever_holds_more_than_the_limit(store: LimitStore, clock: Clock, seed: int) -> None:
    """Random arrivals and settlements; the sum over every sliding minute is counted independently."""
    rng = random.Random(seed)
    limit = Limit(f"s{seed}:{rng.random()}", "tokens", 100, 60.0)
    taken: list[tuple[float, int]] = []
    for index in range(60):
        clock.now += rng.choice([0.0, 0.3, 1.0, 7.0])
        amount = rng.randrange(1, 60)
        name = f"{seed}-{rng.random()}-{index}"
        refused = (await store.reserve(name, [limit], Amounts(tokens=amount))).refusal
        recent = sum(size for at, size in taken if at > clock.now - 60.0)
        if refused is None:
            used = rng.choice([amount, amount // 2, 0])
            if rng.random() < 0.5:
                await store.settle(name, [limit], Amounts(tokens=amount), Amounts(tokens=used))
                amount = used
            taken.append((clock.now, amount))
            assert recent + amount <= 100
        else:
            # Steps are a second long, so at most what lies a second beyond the window is still held against us.
            held = sum(size for at, size in taken if at > clock.now - 62.0)
            assert held + amount > 100


def _gateway(port: int, number: int, results: Any) -> None:
    redis.TIMEOUT_S = PATIENCE_S

    async def run() -> int:
        store = RedisLimits(f"redis://127.0.0.1:{port}", fallback="closed")
        limit = Limit("shared", "requests", 100, 60.0)
        decisions = await asyncio.gather(
            *(store.reserve(f"g{number}-{index}", [limit], Amounts()) for index in range(67))
        )
        await store.close()
        return sum(decision.refusal is None for decision in decisions)

    results.put(asyncio.run(run()))


def test_three_gateways_share_one_limit_exactly(valkey: Any) -> None:
    """200 requests at once over 3 processes: exactly as many are let through as the limit says."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    gateways = [context.Process(target=_gateway, args=(valkey.port, number, results)) for number in range(3)]
    for gateway in gateways:
        gateway.start()
    granted = sum(results.get(timeout=180) for _ in gateways)
    for gateway in gateways:
        gateway.join()
    assert granted == 100


async def test_a_gateway_too_busy_to_listen_does_not_take_redis_for_dead(
    valkey: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers lie unread for longer than they may take, and most calls have waited for a connection as long."""
    loop, ahead = asyncio.get_running_loop(), 0.0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + ahead)
    store = RedisLimits(f"redis://127.0.0.1:{valkey.port}", fallback="closed", prefix="busy:")
    limit = Limit("shared", "requests", 100, 60.0)
    for times in (1, 2):
        calls = [asyncio.create_task(store.reserve(f"{times}-{index}", [limit], Amounts())) for index in range(150)]
        while not any(call.done() for call in calls):  # noqa: ASYNC110 - the others are on their way then
            await asyncio.sleep(0)
        time.sleep(0.05)  # noqa: ASYNC251 - that is the point
        ahead += 2 * PATIENCE_S  # as if that had taken minutes
        granted = sum(decision.refusal is None for decision in await asyncio.gather(*calls))
        assert granted == (100 if times == 1 else 0), "what was sent twice is counted once"
    assert store.up
    await store.close()


@pytest.mark.slow
async def test_while_redis_does_not_answer_one_call_tries_it_and_the_others_go_on(
    valkey: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.storage.redis.TIMEOUT_S", 1.0)
    monkeypatch.setattr("penstock.limits.redis.RETRY_S", 0.2)
    store = RedisLimits(f"redis://127.0.0.1:{valkey.port}", prefix="frozen:")
    limit = Limit("t", "requests", 1000, 60.0)
    await store.reserve("first", [limit], Amounts())
    server = valkey.client().info("server")["process_id"]
    os.kill(server, signal.SIGSTOP)
    try:
        await store.reserve("notices", [limit], Amounts())
        assert not store.up
        await asyncio.sleep(0.25)
        ended: list[asyncio.Task[Any]] = []
        tasks = [asyncio.create_task(store.reserve(f"r{index}", [limit], Amounts())) for index in range(50)]
        for task in tasks:
            task.add_done_callback(ended.append)
        await asyncio.gather(*tasks)
        assert ended[-1] is tasks[0], "only one waits for it"
    finally:
        os.kill(server, signal.SIGCONT)
    async with asyncio.timeout(60):
        while not store.up:
            await asyncio.sleep(0.25)
            await store.reserve("last", [limit], Amounts())
    await store.close()


async def test_workers_of_a_coordinator_share_one_limit_exactly_and_a_dead_one_holds_nobody_up(tmp_path: Path) -> None:
    async with with_coordinator(tmp_path / "coordinator", 3) as clients:
        stores = [CoordinatedLimits(client) for client in clients]
        limit = Limit("shared", "requests", 100, 60.0)
        decisions = await asyncio.gather(
            *(stores[index % 3].reserve(f"r{index}", [limit], Amounts()) for index in range(200))
        )
        assert sum(decision.refusal is None for decision in decisions) == 100
        both = [RUNNING, TOKENS]
        for index in range(3):
            assert (await stores[0].reserve(f"c{index}", both, Amounts(tokens=100))).refusal is None
        assert (await stores[1].reserve("d", both, Amounts(tokens=1))).refusal is not None
        cancelled = asyncio.create_task(stores[1].reserve("e", [limit], Amounts()))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await clients[0].close()  # as its death would end the connection
        decision = await stores[1].reserve("f", both, Amounts(tokens=1))
        while decision.refusal is not None:
            await asyncio.sleep(0.01)
            decision = await stores[1].reserve("f", both, Amounts(tokens=1))
        assert [state.used for state in decision.states] == [1, 301], "what it may have used still counts"
        with pytest.raises(Overloaded):
            await stores[0].reserve("g", both, Amounts())


@pytest.mark.parametrize("fallback", ["open", "closed"])
async def test_when_redis_goes_away_and_comes_back(valkey: Any, fallback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.limits.redis.RETRY_S", 0.05)
    store = RedisLimits(f"redis://127.0.0.1:{valkey.port}", fallback=fallback)
    limit = Limit("t", "requests", 2, 60.0)
    assert (await store.reserve("a", [limit], Amounts())).refusal is None
    valkey.stop()
    if fallback == "closed":
        with pytest.raises(Overloaded):
            await store.reserve("b", [limit], Amounts())
    else:
        outcomes = [(await store.reserve(f"b{i}", [limit], Amounts())).refusal is None for i in range(3)]
        assert outcomes == [True, True, False], "counted here meanwhile, bounded by the same limit"
    assert not store.up
    valkey.start()
    await asyncio.sleep(0.1)
    assert (await store.reserve("c", [limit], Amounts())).refusal is None and store.up
    await store.close()


async def test_subjects_that_have_passed_are_forgotten(clock: Clock) -> None:
    store = MemoryLimits(clock)
    for index in range(10_000):
        clock.now += 0.1
        limit = Limit(f"s{index}", "requests", 1, 60.0)
        await store.reserve(f"r{index}", [limit], Amounts())
        await store.settle(f"r{index}", [limit], Amounts(), Amounts())
    assert len(store._windows) <= 4097 and not store._reservations
