"""Both orders, in memory and in Redis: nothing beyond the room, nobody twice, nobody for ever, shares by weight, and
the same entry next in both."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.config.routing import OrderName
from penstock.routing.admission.fair_queue import Line
from penstock.routing.admission.queue import BATCH, PREMIUM, STANDARD, Entry, Room
from tests.routing.admission.fair_queues import AnyLine, ScriptLine, make_line

KINDS = ("memory", "redis")
ORDERS = ("fair", "priority", "fcfs", "sjf")
in_redis = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
kinds = pytest.mark.parametrize("kind", KINDS)
orders = pytest.mark.parametrize("order", ORDERS)

entries = st.builds(
    Entry,
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
rooms = st.builds(Room, slots=st.none() | st.integers(1, 6), kv_tokens=st.none() | st.integers(20, 200))


class Followed:
    """Drives a line by a script and keeps its own account of who has what."""

    def __init__(self, line: AnyLine, room: Room, most: int) -> None:
        self.line, self.room, self.most = line, room, most
        self.now = 0.0
        self.waiting: dict[str, Entry] = {}
        self.granted: dict[str, Entry] = {}
        self.told: list[tuple[list[str], list[str]]] = []
        self._serial = 0

    def run(self, step: tuple[str, Entry, int, float]) -> None:
        kind, entry, pick, pause = step
        self.now += pause
        if kind == "enter":
            self._serial += 1
            entry = replace(entry, id=f"{self._serial:04}", arrived=self.now)
            self.waiting[entry.id] = entry
            changes = self.line.enter(entry, self.room, self.most, self.now)
        elif kind == "release" and self.granted:
            id = sorted(self.granted)[pick % len(self.granted)]
            changes = self.line.release(id, float(pick), self.room, self.now)
            del self.granted[id]
        elif kind == "leave" and self.waiting:
            id = sorted(self.waiting)[pick % len(self.waiting)]
            del self.waiting[id]
            changes = self.line.leave(id, self.room, self.now)
        else:
            changes = self.line.tick(self.room, self.now)
        for id in changes.granted:
            self.granted[id] = self.waiting.pop(id)  # fails when it was granted before, or had left
        for id in changes.dropped:
            del self.waiting[id]
        self.told.append((changes.granted, changes.dropped))

    def check(self) -> None:
        standing = self.line.standing("a", STANDARD, self.now)
        held = list(self.granted.values())
        assert standing.in_flight == sum(entry.slots for entry in held)
        assert standing.kv_tokens == sum(entry.kv_tokens for entry in held)
        assert standing.queued == tuple(sum(e.rank == r for e in self.waiting.values()) for r in range(3))
        if len(held) > 1:
            assert self.room.slots is None or standing.in_flight <= self.room.slots
            assert self.room.kv_tokens is None or standing.kv_tokens <= self.room.kv_tokens
        assert len(self.waiting) <= self.most
        assert held or not self.waiting, "somebody waits though nothing runs"


@kinds
@orders
@in_redis
@given(steps=steps, room=rooms, most=st.integers(0, 8))
def test_room_is_never_exceeded_nobody_is_lost_or_granted_twice(
    client: Any, kind: str, order: OrderName, steps: list[Any], room: Room, most: int
) -> None:
    followed = Followed(make_line(kind, client, order), room, most)
    for step in steps:
        followed.run(step)
        followed.check()
    while followed.granted:  # everybody gets through in the end
        followed.run(("release", steps[0][1], 1, 0.1))
        followed.check()
    assert not followed.waiting
    standing = followed.line.standing("a", STANDARD, followed.now)
    assert (standing.in_flight, standing.kv_tokens, standing.depth, sum(standing.work)) == (0, 0, 0, 0)


@orders
@in_redis
@given(steps=steps, room=rooms, most=st.integers(0, 8))
def test_the_order_in_redis_is_the_order_in_memory(
    client: Any, order: OrderName, steps: list[Any], room: Room, most: int
) -> None:
    client.flushdb()
    here, there = Followed(Line(order), room, most), Followed(ScriptLine(client, order), room, most)
    for step in steps:
        here.run(step)
        there.run(step)
        assert here.told[-1] == there.told[-1]
        for tenant, rank in (("a", PREMIUM), ("b", STANDARD), ("c", BATCH)):
            ours, theirs = here.line.standing(tenant, rank, here.now), there.line.standing(tenant, rank, there.now)
            assert replace(ours, rates=None) == replace(theirs, rates=None)
            assert ours.rates == (None if theirs.rates is None else pytest.approx(theirs.rates))


def backlog(line: AnyLine, tenants: dict[str, float], count: int, rank: int = STANDARD, arrived: float = 0.0) -> None:
    for index in range(count):
        for tenant, weight in tenants.items():
            line.enter(Entry(f"{tenant}{index:03}", tenant, rank, weight, 100.0, arrived=arrived), ONE, 10_000, 0.0)


def serve(line: AnyLine, running: list[str], times: int, now: float = 1.0, used: float = 100.0) -> list[str]:
    """Release what runs and note who is next, again and again."""
    served: list[str] = []
    for _ in range(times):
        running[:] = line.release(running[0], used, ONE, now).granted
        served += running
    return served


ONE = Room(slots=1)


@kinds
def test_tenants_are_served_by_weight(client: Any, kind: str) -> None:
    line = make_line(kind, client)
    backlog(line, {"light": 1.0, "heavy": 3.0}, 60)
    served = serve(line, ["light000"], 80)
    assert served.count("light000") == 0
    assert 58 <= sum(id.startswith("heavy") for id in served) <= 62


@kinds
@in_redis
@given(costs=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900)), min_size=20, max_size=40))
def test_backlogged_tenants_never_drift_apart(client: Any, kind: str, costs: list[tuple[int, int]]) -> None:
    line = make_line(kind, client)
    cost: dict[str, float] = {}
    for index, pair in enumerate(costs):
        for tenant, amount in zip("ab", pair, strict=True):
            entry = Entry(f"{tenant}{index:03}", tenant, cost=float(amount))
            cost[entry.id] = entry.cost
            line.enter(entry, ONE, 10_000, 0.0)
    running, served = ["a000"], {"a": cost["a000"], "b": 0.0}
    for _ in range(len(costs)):
        running = line.release(running[0], cost[running[0]], ONE, 1.0).granted
        served[running[0][0]] += cost[running[0]]
        if max(served.values()) < sum(min(pair) for pair in costs):
            assert abs(served["a"] - served["b"]) <= 2 * 900


@kinds
def test_a_tenant_that_returns_is_lifted_not_favoured(client: Any, kind: str) -> None:
    line = make_line(kind, client)
    backlog(line, {"busy": 1.0}, 60)
    serve(line, running := ["busy000"], 40)
    for index in range(20):
        line.enter(Entry(f"idle{index:03}", "idle", cost=100.0, arrived=1.0), ONE, 10_000, 1.0)
    served = serve(line, running, 20)
    assert 9 <= sum(id.startswith("idle") for id in served) <= 11, "from now on it gets its half, not its past"


@kinds
def test_what_was_served_without_a_queue_counts_and_a_newcomer_is_lifted_to_it(client: Any, kind: str) -> None:
    line = make_line(kind, client)
    for index in range(50):  # nobody waits: all of this is granted at once
        id = f"old{index:03}"
        assert line.enter(Entry(id, "old", cost=100.0), ONE, 10, float(index)).granted == [id]
        line.release(id, 100.0, ONE, float(index))
    line.enter(Entry("first", "old", cost=100.0, arrived=60.0), ONE, 100, 60.0)
    for index in range(10):
        for tenant in ("old", "new"):
            line.enter(Entry(f"{tenant}{index:03}", tenant, cost=100.0, arrived=60.0), ONE, 100, 60.0)
    served = serve(line, ["first"], 10, now=61.0)
    assert 4 <= sum(id.startswith("new") for id in served) <= 6


@kinds
def test_a_request_that_took_more_than_expected_is_paid_for(client: Any, kind: str) -> None:
    line = make_line(kind, client)
    backlog(line, {"a": 1.0, "b": 1.0}, 30)
    running = ["a000"]
    counts = {"a": 0, "b": 0}
    for _ in range(40):
        used = 300.0 if running[0].startswith("a") else 100.0
        running = line.release(running[0], used, ONE, 1.0).granted
        counts[running[0][0]] += 1
    assert counts["b"] >= 2.5 * counts["a"]


@kinds
def test_premium_goes_first_and_batch_is_not_forgotten(client: Any, kind: str) -> None:
    line = make_line(kind, client, ageing_s=30.0)
    for rank, tenant in ((BATCH, "z"), (STANDARD, "m"), (PREMIUM, "a")):
        backlog(line, {tenant: 1.0}, 25, rank, arrived=-float(rank))
    running = ["z000"]
    early = serve(line, running, 20, now=1.0)
    assert all(id.startswith("a") for id in early)
    late = serve(line, running, 20, now=60.0)
    assert sum(id.startswith("z") for id in late) == 2, "one grant in ten is for whoever waited longest"


@kinds
@pytest.mark.parametrize(
    ("order", "expected"),
    [("fcfs", ["1", "2", "3"]), ("sjf", ["3", "1", "2"]), ("priority", ["2", "1", "3"]), ("fair", ["2", "3", "1"])],
)
def test_orders(client: Any, kind: str, order: OrderName, expected: list[str]) -> None:
    line = make_line(kind, client, order)
    line.enter(Entry("0", "t", STANDARD, cost=500.0), ONE, 10, 0.0)
    line.enter(Entry("1", "t", STANDARD, cost=50.0, arrived=1.0), ONE, 10, 1.0)
    line.enter(Entry("2", "p", PREMIUM, cost=90.0, arrived=2.0), ONE, 10, 2.0)
    line.enter(Entry("3", "s", STANDARD, cost=10.0, arrived=3.0), ONE, 10, 3.0)
    assert serve(line, ["0"], 3, now=4.0, used=500.0) == expected


@kinds
def test_a_flood_pushes_out_itself(client: Any, kind: str) -> None:
    line = make_line(kind, client)
    for index in range(10):
        line.enter(Entry(f"flood{index}", "flood", cost=100.0, arrived=0.1 * index), ONE, 5, 1.0)
    standing = line.standing("flood", STANDARD, 1.0)
    assert standing.depth == 5
    assert line.enter(Entry("calm", "calm", cost=100.0, arrived=2.0), ONE, 5, 2.0).dropped == ["flood5"]
    assert line.enter(Entry("vip", "vip", PREMIUM, cost=900.0, arrived=3.0), ONE, 5, 3.0).dropped == ["flood4"]
    assert line.enter(Entry("low", "low", BATCH, cost=1.0, arrived=4.0), ONE, 5, 4.0).dropped == ["low"]


@kinds
def test_the_drain_rate_is_what_leaves_the_queue(client: Any, kind: str) -> None:
    line = make_line(kind, client)
    backlog(line, {"a": 1.0}, 100)
    running, now = ["a000"], 0.0
    for _ in range(40):  # a request of cost 100 every quarter of a second
        now += 0.25
        running = line.release(running[0], 100.0, ONE, now).granted
    rates = line.standing("a", STANDARD, now).rates
    assert rates is not None
    assert rates[PREMIUM] == rates[STANDARD] == pytest.approx(400.0, rel=0.1)
    assert rates[BATCH] < 0.1 * rates[STANDARD], "nothing was left for batch"


def test_what_a_dead_gateway_had_is_given_up(client: Any) -> None:
    client.flushdb()
    dies, lives = ScriptLine(client, gateway="dies"), ScriptLine(client, gateway="lives")
    assert dies.enter(Entry("1", "a"), ONE, 10, 0.0).granted == ["1"]
    dies.enter(Entry("2", "a"), ONE, 10, 0.0)
    lives.enter(Entry("3", "a", arrived=1.0), ONE, 10, 1.0)
    assert lives.tick(ONE, 4.0).granted == []
    assert lives.tick(ONE, 7.0).granted == ["3"], "the dead one's run and its place in line are gone"
    assert lives.standing("a", STANDARD, 7.0).depth == 0
