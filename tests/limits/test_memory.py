"""Limits in memory, to the second and to the unit: when a step leaves its window, what a settlement leaves."""

from __future__ import annotations

import pytest

from penstock.limits import Amounts, Limit
from penstock.limits.memory import MemoryLimits

START = 1_000_000.0
TOKENS = Limit("t", "tokens", 100, 60.0)
RUNNING = Limit("r", "concurrent", 2, 60.0)


class Clock:
    now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryLimits:
    return MemoryLimits(clock)


async def take(store: MemoryLimits, id: str, tokens: int, limit: Limit = TOKENS) -> float | None:
    """Seconds to wait, or None when it was granted."""
    decision = await store.reserve(id, [limit], Amounts(tokens=tokens))
    return None if decision.refusal is None else decision.refusal.retry_s


async def used(store: MemoryLimits, limit: Limit = TOKENS) -> tuple[int, float]:
    """What counts now and how long; a request that can never run shows it and takes nothing."""
    state = (await store.reserve("look", [limit], Amounts(tokens=10**9, concurrent=10**9))).states[0]
    return state.used, state.reset_s


async def test_an_amount_counts_until_its_step_has_left_the_window_entirely(store: MemoryLimits, clock: Clock) -> None:
    clock.now = START + 0.5
    assert await take(store, "a", 100) is None
    assert await take(store, "b", 1) == 60.5, "its step ends at one second, and a minute later it is out"
    clock.now = START + 60.999
    wait = await take(store, "b", 1)
    assert wait is not None and 0 < wait < 0.01
    clock.now = START + 61
    assert await take(store, "b", 1) is None


async def test_the_wait_ends_with_the_step_that_frees_enough(store: MemoryLimits, clock: Clock) -> None:
    for later, tokens in ((0, 40), (2, 30), (5, 30)):
        clock.now = START + later
        assert await take(store, f"{later}", tokens) is None
    clock.now = START + 10
    assert await take(store, "x", 1) == 51.0
    assert await take(store, "x", 40) == 51.0
    assert await take(store, "x", 41) == 53.0
    assert await take(store, "x", 71) == 56.0
    assert await take(store, "x", 100) == 56.0, "as large as the limit: possible, once all has left"
    assert (await used(store)) == (100, 56.0)
    clock.now = START + 70
    decision = await store.reserve("never", [TOKENS], Amounts(tokens=101))
    assert decision.refusal is not None and decision.refusal.retry_s is None
    assert decision.states[0].used == 0 and decision.states[0].reset_s == 0.0


async def test_what_a_settlement_leaves_is_exact(store: MemoryLimits, clock: Clock) -> None:
    reserved = Amounts(tokens=30)
    for name in ("a", "b", "c"):
        assert await take(store, name, 30) is None
    await store.settle("a", [TOKENS], reserved, Amounts(tokens=4))
    assert await used(store) == (64, 61.0)
    await store.settle("b", [TOKENS], reserved, Amounts(tokens=0))
    await store.settle("b", [TOKENS], reserved, Amounts(tokens=0))
    assert await used(store) == (34, 61.0)
    await store.settle("c", [TOKENS], reserved, Amounts(tokens=1))
    assert await used(store) == (5, 61.0)


async def test_nothing_left_is_nothing_to_wait_for(store: MemoryLimits, clock: Clock) -> None:
    """Of steps that were given back entirely, nothing remains: neither an amount nor a time."""
    assert await take(store, "a", 60) is None
    clock.now = START + 20
    assert await take(store, "b", 10) is None
    await store.settle("b", [TOKENS], Amounts(tokens=10), Amounts(tokens=0))
    assert await used(store) == (60, 41.0)
    assert (await take(store, "x", 70)) == 41.0


async def test_a_settlement_that_comes_after_its_window_changes_nothing(store: MemoryLimits, clock: Clock) -> None:
    assert await take(store, "a", 60) is None
    clock.now = START + 100
    assert await take(store, "b", 50) is None
    await store.settle("a", [TOKENS, RUNNING], Amounts(tokens=60), Amounts(tokens=10))
    assert (await used(store))[0] == 50


async def test_concurrency_is_given_back_whatever_was_used(store: MemoryLimits) -> None:
    for name in ("a", "b"):
        assert (await store.reserve(name, [RUNNING], Amounts())).refusal is None
    assert (await store.reserve("c", [RUNNING], Amounts())).refusal is not None
    await store.settle("a", [RUNNING], Amounts(), Amounts(concurrent=1))
    assert (await used(store, RUNNING))[0] == 1


async def test_windows_are_swept_when_nothing_in_them_counts(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr("penstock.limits.memory._SWEEP", 4)
    store = MemoryLimits(clock)

    async def fill(*names: str) -> None:
        for name in names:
            await take(store, name, 1, Limit(name, "tokens", 9, 60.0))

    await fill("a", "b", "c", "d")
    clock.now = START + 61.5
    await fill("e")
    assert len(store._windows) == 5, "the first sweep finds nothing to remove, the next comes at twice as many"
    clock.now = START + 62
    await fill("f", "g", "h", "i", "j")
    assert len(store._windows) == 10
    await fill("k")
    assert sorted(store._windows) == ["e", "f", "g", "h", "i", "j", "k"]
    clock.now = START + 123.5
    await fill(*"lmnopqr")
    assert len(store._windows) == 14
    await fill("s")
    assert sorted(store._windows) == sorted("fghijklmnopqrs"), "e is out, the others are not yet"


async def test_a_step_is_a_sixtieth_of_its_window(store: MemoryLimits, clock: Clock) -> None:
    slow = Limit("slow", "tokens", 100, 120.0)
    assert await used(store, slow) == (0, 0.0)
    clock.now = START + 1
    assert await take(store, "a", 100, slow) is None
    assert await take(store, "b", 1, slow) == 121.0
    clock.now = START + 121.5
    assert await take(store, "b", 1, slow) == 0.5
    clock.now = START + 122
    assert await take(store, "b", 1, slow) is None


async def test_limits_that_a_reservation_does_not_hold_are_left_alone(store: MemoryLimits) -> None:
    """Those whose window is gone, or that were configured in the meantime, come before one that it does hold."""
    assert await take(store, "a", 60) is None
    await store.settle("a", [RUNNING, TOKENS], Amounts(tokens=60), Amounts(tokens=10))
    assert (await used(store))[0] == 10 and (await used(store, RUNNING))[0] == 0
