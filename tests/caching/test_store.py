"""Both answer stores: tenants are isolated, answers expire, size is bounded, eviction works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.caching.redis import RedisStore
from penstock.caching.store import NOTES, AnswerStore, CacheKey, MemoryStore
from penstock.protocol.errors import Overloaded

A, B = CacheKey("acme", "m", "1"), CacheKey("acme", "n", "1")
OTHER = CacheKey("other", "m", "1")


@pytest.fixture(params=["memory", "redis"])
def opened(request: pytest.FixtureRequest) -> Callable[..., Any]:
    server = request.getfixturevalue("valkey") if request.param == "redis" else None

    @asynccontextmanager
    async def open_(ttl_s: float = 60, questions: int = 8) -> AsyncIterator[AnswerStore]:
        store: AnswerStore
        if server is None:
            store = MemoryStore(2**20, ttl_s, questions)
        else:
            store = RedisStore(f"redis://127.0.0.1:{server.port}", ttl_s, questions)
        yield store
        await store.close()

    return open_


async def test_an_answer_is_found_under_its_own_key_only(opened: Callable[..., Any]) -> None:
    async with opened() as store:
        await store.put(A, b"answer")
        assert await store.get(A) == b"answer"
        for key in (B, OTHER, CacheKey("acme", "m", "2"), CacheKey("acm", "em", "1"), CacheKey("a*", "m", "1")):
            assert await store.get(key) is None
        await store.put(A, b"newer")
        assert await store.get(A) == b"newer"
        await store.drop(A)
        assert await store.get(A) is None


async def test_an_answer_does_not_outlive_its_time(opened: Callable[..., Any]) -> None:
    async with opened(ttl_s=0.15) as store:
        await store.put(A, b"answer")
        await store.note(A, b"question")
        await asyncio.sleep(0.25)
        assert await store.get(A) is None
        assert (await store.questions(A, "", 0))[1] == []


async def test_evicting_touches_the_tenant_and_model_named_and_nobody_else(opened: Callable[..., Any]) -> None:
    async with opened() as store:
        for key in (A, B, OTHER):
            await store.put(key, b"answer")
            await store.note(key, b"question")
        await store.put(CacheKey("acme", NOTES, "1"), b"not an answer")
        assert (await store.size("acme")).answers == 2
        assert await store.evict("acme", "m") == 1
        assert (await store.questions(A, "", 0))[1] == []
        assert (await store.questions(B, "", 0))[1] == [b"question"]
        assert await store.get(B) and await store.get(OTHER)
        assert await store.evict("acme") == 1
        assert await store.get(CacheKey("acme", NOTES, "1")) is None
        assert await store.get(OTHER)
        assert await store.evict() == 1
        assert (await store.size()).answers == 0


async def test_a_reader_of_questions_gets_what_is_new_and_everything_after_a_change(
    opened: Callable[..., Any],
) -> None:
    async with opened() as store:
        for number in range(3):
            await store.note(A, str(number).encode())
        epoch, first = await store.questions(A, "", 0)
        assert first == [b"0", b"1", b"2"]
        await store.note(A, b"3")
        assert await store.questions(A, epoch, 3) == (epoch, [b"3"])
        for number in range(4, 9):
            await store.note(A, str(number).encode())
        changed, rest = await store.questions(A, epoch, 4)
        assert changed != epoch
        assert rest == [b"3", b"4", b"5", b"6", b"7", b"8"]


def test_a_redis_that_is_away_is_a_miss_and_eviction_says_so(valkey: Any) -> None:
    async def work() -> None:
        store = RedisStore(f"redis://127.0.0.1:{valkey.port}", 60, 8)
        await store.put(A, b"answer")
        valkey.stop()
        assert await store.get(A) is None
        await store.put(A, b"answer")
        assert await store.questions(A, "", 0) == ("", [])
        with pytest.raises(Overloaded, match="cannot be reached"):
            await store.evict("acme")
        await store.close()

    asyncio.run(work())


@given(
    st.lists(st.tuples(st.sampled_from("pgnde"), st.integers(0, 5), st.integers(0, 400), st.floats(0, 5)), max_size=60)
)
def test_memory_stays_within_its_limit_whatever_happens(steps: list[tuple[str, int, int, float]]) -> None:
    now = 0.0
    store = MemoryStore(1000, 10.0, 4, lambda: now)

    async def work() -> None:
        nonlocal now
        for what, number, size, pause in steps:
            now += pause
            key = CacheKey(f"t{number % 2}", "m", str(number))
            match what:
                case "p":
                    await store.put(key, b"x" * size)
                case "g":
                    await store.get(key)
                case "n":
                    await store.note(key, b"q" * size)
                case "d":
                    await store.drop(key)
                case "e":
                    await store.evict(f"t{number % 2}")
            assert store.bytes <= 1000
            answers = sum(len(found.value) for found in store._answers.values())
            questions = sum(len(entry) for found in store._partitions.values() for entry in found.questions)
            assert store.bytes == answers + questions
        await store.evict()
        assert store.bytes == 0

    asyncio.run(work())
