"""The fair queue, in memory and in Redis: capacity is never exceeded, no entry is granted twice or starves, shares
follow weights, and both grant the same entry next."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.config.routing import OrderName
from penstock.routing.admission.fair_queue import FairQueue
from penstock.routing.admission.queue import BATCH, PREMIUM, STANDARD, Capacity, QueueEntry
from tests.routing.admission.fair_queues import AnyFairQueue, ScriptFairQueue, make_line

KINDS = ("memory", "redis")
ORDERS = ("fair", "priority", "fcfs", "sjf")
in_redis = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
kinds = pytest.mark.parametrize("kind", KINDS)
orders = pytest.mark.parametrize("order", ORDERS)

entries = st.builds(
    QueueEntry,
    id=st.just(""),
    tenant=st.sampled_from("abcd"),
    rank=st.integers(0, 2),
    weight=st.sampled_from((1.0, 2.0, 4.0)),
    cost=st.integers(1, 5000).map(float),
    kv_tokens=st.integers(0, 60),
    slots=st.integers(1, 3),
)
steps = st.lists(
    st.tuples(
        st.sampled_from(("enter", "enter", "enter", "release", "leave", "tick")),
        entries,
        st.integers(0, 1000),
        st.sampled_from((0.0, 0.5, 7.0, 40.0)),
    ),
    min_size=5,
    max_size=40,
)
rooms = st.builds(Capacity, slots=st.none() | st.integers(1, 6), kv_tokens=st.none() | st.integers(20, 200))


class Followed:
    """Drives a line by a script and keeps its own account of who has what."""

    def __init__(self, queue: AnyFairQueue, capacity: Capacity, most: int) -> None:
        self.queue, self.capacity, self.most = queue, capacity, most
        self.now = 0.0
        self.waiting: dict[str, QueueEntry] = {}
        self.granted: dict[str, QueueEntry] = {}
        self.told: list[tuple[list[str], list[str]]] = []
        self._serial = 0

    def run(self, step: tuple[str, QueueEntry, int, float]) -> None:
        kind, entry, pick, pause = step
        self.now += pause
        if kind == "enter":
            self._serial += 1
            entry = replace(entry, id=f"{self._serial:04}", arrived=self.now)
            self.waiting[entry.id] = entry
            changes = self.queue.enter(entry, self.capacity, self.most, self.now)
        elif kind == "release" and self.granted:
            id = sorted(self.granted)[pick % len(self.granted)]
            changes = self.queue.release(id, float(pick), self.capacity, self.now)
            del self.granted[id]
        elif kind == "leave" and self.waiting:
            id = sorted(self.waiting)[pick % len(self.waiting)]
            del self.waiting[id]
            changes = self.queue.leave(id, self.capacity, self.now)
        else:
            changes = self.queue.tick(self.capacity, self.now)
        for id in changes.granted:
            self.granted[id] = self.waiting.pop(id)  # fails when it was granted before, or had left
        for id in changes.dropped:
            del self.waiting[id]
        self.told.append((changes.granted, changes.dropped))

    def check(self) -> None:
        state = self.queue.state("a", STANDARD, self.now)
        held = list(self.granted.values())
        assert state.in_flight == sum(entry.slots for entry in held)
        assert state.kv_tokens == sum(entry.kv_tokens for entry in held)
        assert state.queued == tuple(sum(e.rank == r for e in self.waiting.values()) for r in range(3))
        if len(held) > 1:
            assert self.capacity.slots is None or state.in_flight <= self.capacity.slots
            assert self.capacity.kv_tokens is None or state.kv_tokens <= self.capacity.kv_tokens
        assert len(self.waiting) <= self.most
        assert held or not self.waiting, "somebody waits though nothing runs"


@kinds
@orders
@in_redis
@given(steps=steps, capacity=rooms, most=st.integers(0, 8))
def test_room_is_never_exceeded_nobody_is_lost_or_granted_twice(
    client: Any, kind: str, order: OrderName, steps: list[Any], capacity: Capacity, most: int
) -> None:
    followed = Followed(make_line(kind, client, order), capacity, most)
    for step in steps:
        followed.run(step)
        followed.check()
    while followed.granted:  # everybody gets through in the end
        followed.run(("release", steps[0][1], 1, 0.1))
        followed.check()
    assert not followed.waiting
    state = followed.queue.state("a", STANDARD, followed.now)
    assert (state.in_flight, state.kv_tokens, state.depth, sum(state.work)) == (0, 0, 0, 0)


@orders
@in_redis
@given(steps=steps, capacity=rooms, most=st.integers(0, 8))
def test_the_order_in_redis_is_the_order_in_memory(
    client: Any, order: OrderName, steps: list[Any], capacity: Capacity, most: int
) -> None:
    client.flushdb()
    here, there = Followed(FairQueue(order), capacity, most), Followed(ScriptFairQueue(client, order), capacity, most)
    for step in steps:
        here.run(step)
        there.run(step)
        assert here.told[-1] == there.told[-1]
        for tenant, rank in (("a", PREMIUM), ("b", STANDARD), ("c", BATCH)):
            ours, theirs = here.queue.state(tenant, rank, here.now), there.queue.state(tenant, rank, there.now)
            assert replace(ours, rates=None) == replace(theirs, rates=None)
            assert ours.rates == (None if theirs.rates is None else pytest.approx(theirs.rates))


def backlog(
    queue: AnyFairQueue, tenants: dict[str, float], count: int, rank: int = STANDARD, arrived: float = 0.0
) -> None:
    for index in range(count):
        for tenant, weight in tenants.items():
            queue.enter(
                QueueEntry(f"{tenant}{index:03}", tenant, rank, weight, 100.0, arrived=arrived), ONE, 10_000, 0.0
            )


def serve(queue: AnyFairQueue, running: list[str], times: int, now: float = 1.0, used: float = 100.0) -> list[str]:
    """Release what runs and note who is next, again and again."""
    served: list[str] = []
    for _ in range(times):
        running[:] = queue.release(running[0], used, ONE, now).granted
        served += running
    return served


ONE = Capacity(slots=1)


@kinds
def test_tenants_are_served_by_weight(client: Any, kind: str) -> None:
    queue = make_line(kind, client)
    backlog(queue, {"light": 1.0, "heavy": 3.0}, 60)
    served = serve(queue, ["light000"], 80)
    assert served.count("light000") == 0
    assert 58 <= sum(id.startswith("heavy") for id in served) <= 62


@kinds
@in_redis
@given(costs=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900)), min_size=20, max_size=40))
def test_backlogged_tenants_never_drift_apart(client: Any, kind: str, costs: list[tuple[int, int]]) -> None:
    queue = make_line(kind, client)
    cost: dict[str, float] = {}
    for index, pair in enumerate(costs):
        for tenant, amount in zip("ab", pair, strict=True):
            entry = QueueEntry(f"{tenant}{index:03}", tenant, cost=float(amount))
            cost[entry.id] = entry.cost
            queue.enter(entry, ONE, 10_000, 0.0)
    running, served = ["a000"], {"a": cost["a000"], "b": 0.0}
    for _ in range(len(costs)):
        running = queue.release(running[0], cost[running[0]], ONE, 1.0).granted
        served[running[0][0]] += cost[running[0]]
        if max(served.values()) < sum(min(pair) for pair in costs):
            assert abs(served["a"] - served["b"]) <= 2 * 900


@kinds
def test_a_tenant_that_returns_is_lifted_not_favoured(client: Any, kind: str) -> None:
    queue = make_line(kind, client)
    backlog(queue, {"busy": 1.0}, 60)
    serve(queue, running := ["busy000"], 40)
    for index in range(20):
        queue.enter(QueueEntry(f"idle{index:03}", "idle", cost=100.0, arrived=1.0), ONE, 10_000, 1.0)
    served = serve(queue, running, 20)
    assert 9 <= sum(id.startswith("idle") for id in served) <= 11, "from now on it gets its half, not its past"


@kinds
def test_what_was_served_without_a_queue_counts_and_a_newcomer_is_lifted_to_it(client: Any, kind: str) -> None:
    queue = make_line(kind, client)
    for index in range(50):  # nobody waits: all of this is granted at once
        id = f"old{index:03}"
        assert queue.enter(QueueEntry(id, "old", cost=100.0), ONE, 10, float(index)).granted == [id]
        queue.release(id, 100.0, ONE, float(index))
    queue.enter(QueueEntry("first", "old", cost=100.0, arrived=60.0), ONE, 100, 60.0)
    for index in range(10):
        for tenant in ("old", "new"):
            queue.enter(QueueEntry(f"{tenant}{index:03}", tenant, cost=100.0, arrived=60.0), ONE, 100, 60.0)
    served = serve(queue, ["first"], 10, now=61.0)
    assert 4 <= sum(id.startswith("new") for id in served) <= 6


@kinds
def test_a_request_that_took_more_than_expected_is_paid_for(client: Any, kind: str) -> None:
    queue = make_line(kind, client)
    backlog(queue, {"a": 1.0, "b": 1.0}, 30)
    running = ["a000"]
    counts = {"a": 0, "b": 0}
    for _ in range(40):
        used = 300.0 if running[0].startswith("a") else 100.0
        running = queue.release(running[0], used, ONE, 1.0).granted
        counts[running[0][0]] += 1
    assert counts["b"] >= 2.5 * counts["a"]


@kinds
def test_premium_goes_first_and_batch_is_not_forgotten(client: Any, kind: str) -> None:
    queue = make_line(kind, client, ageing_s=30.0)
    for rank, tenant in ((BATCH, "z"), (STANDARD, "m"), (PREMIUM, "a")):
        backlog(queue, {tenant: 1.0}, 25, rank, arrived=-float(rank))
    running = ["z000"]
    early = serve(queue, running, 20, now=1.0)
    assert all(id.startswith("a") for id in early)
    late = serve(queue, running, 20, now=60.0)
    assert sum(id.startswith("z") for id in late) == 2, "one grant in ten is for whoever waited longest"


@kinds
@pytest.mark.parametrize(
    ("order", "expected"),
    [("fcfs", ["1", "2", "3"]), ("sjf", ["3", "1", "2"]), ("priority", ["2", "1", "3"]), ("fair", ["2", "3", "1"])],
)
def test_orders(client: Any, kind: str, order: OrderName, expected: list[str]) -> None:
    queue = make_line(kind, client, order)
    queue.enter(QueueEntry("0", "t", STANDARD, cost=500.0), ONE, 10, 0.0)
    queue.enter(QueueEntry("1", "t", STANDARD, cost=50.0, arrived=1.0), ONE, 10, 1.0)
    queue.enter(QueueEntry("2", "p", PREMIUM, cost=90.0, arrived=2.0), ONE, 10, 2.0)
    queue.enter(QueueEntry("3", "s", STANDARD, cost=10.0, arrived=3.0), ONE, 10, 3.0)
    assert serve(queue, ["0"], 3, now=4.0, used=500.0) == expected


@kinds
def test_a_flood_pushes_out_itself(client: Any, kind: str) -> None:
    queue = make_line(kind, client)
    for index in range(10):
        queue.enter(QueueEntry(f"flood{index}", "flood", cost=100.0, arrived=0.1 * index), ONE, 5, 1.0)
    state = queue.state("flood", STANDARD, 1.0)
    assert state.depth == 5
    assert queue.enter(QueueEntry("calm", "calm", cost=100.0, arrived=2.0), ONE, 5, 2.0).dropped == ["flood5"]
    assert queue.enter(QueueEntry("vip", "vip", PREMIUM, cost=900.0, arrived=3.0), ONE, 5, 3.0).dropped == ["flood4"]
    assert queue.enter(QueueEntry("low", "low", BATCH, cost=1.0, arrived=4.0), ONE, 5, 4.0).dropped == ["low"]


@kinds
def test_the_drain_rate_is_what_leaves_the_queue(client: Any, kind: str) -> None:
    queue = make_line(kind, client)
    backlog(queue, {"a": 1.0}, 100)
    running, now = ["a000"], 0.0
    for _ in range(40):  # a request of cost 100 every quarter of a second
        now += 0.25
        running = queue.release(running[0], 100.0, ONE, now).granted
    rates = queue.state("a", STANDARD, now).rates
    assert rates is not None
    assert rates[PREMIUM] == rates[STANDARD] == pytest.approx(400.0, rel=0.1)
    assert rates[BATCH] < 0.1 * rates[STANDARD], "nothing was left for batch"


def test_what_a_dead_gateway_had_is_given_up(client: Any) -> None:
    client.flushdb()
    dies, lives = ScriptFairQueue(client, gateway="dies"), ScriptFairQueue(client, gateway="lives")
    assert dies.enter(QueueEntry("1", "a"), ONE, 10, 0.0).granted == ["1"]
    dies.enter(QueueEntry("2", "a"), ONE, 10, 0.0)
    lives.enter(QueueEntry("3", "a", arrived=1.0), ONE, 10, 1.0)
    assert lives.tick(ONE, 4.0).granted == []
    assert lives.tick(ONE, 7.0).granted == ["3"], "the dead one's run and its place in line are gone"
    assert lives.state("a", STANDARD, 7.0).depth == 0
