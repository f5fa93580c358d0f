"""Texts of many requests share the encoder fairly: none waits without bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.encoder.queue import TextQueue
from penstock.engine.encoder.request import EncodeRequest


def request(name: str, *sizes: int, priority: int = 0) -> EncodeRequest:
    return EncodeRequest(name, [[1] * size for size in sizes], priority=priority)


def taken(queue: TextQueue, budget: int) -> list[tuple[str, int]]:
    return [(job.request.request_id, index) for job, index in queue.take(budget)]


def test_requests_take_turns_so_that_a_short_one_never_waits_for_a_long_one() -> None:
    queue = TextQueue(1000)
    queue.add(request("long", *[10] * 50), 0.0)
    assert taken(queue, 20) == [("long", 0), ("long", 1)]
    queue.add(request("short", 10), 0.0)
    assert taken(queue, 20) == [("long", 2), ("short", 0)]


def test_a_smaller_priority_goes_first() -> None:
    queue = TextQueue(1000)
    queue.add(request("bulk", *[10] * 5, priority=1), 0.0)
    queue.add(request("query", 10), 0.0)
    assert taken(queue, 20) == [("query", 0), ("bulk", 0)]


def test_a_text_larger_than_the_budget_runs_alone() -> None:
    queue = TextQueue(1000)
    queue.add(request("a", 100, 5), 0.0)
    assert taken(queue, 20) == [("a", 0)]
    assert taken(queue, 20) == [("a", 1)]


def test_more_texts_than_may_wait_are_refused_until_there_is_room() -> None:
    queue = TextQueue(3)
    assert queue.add(request("a", 1, 1), 0.0)
    assert not queue.add(request("b", 1, 1), 0.0)
    assert queue.add(request("c", 1), 0.0)
    queue.take(100)
    assert queue.add(request("b", 1, 1), 0.0)


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 2)), max_size=12),
    st.integers(1, 60),
    st.sets(st.integers(0, 11)),
)
def test_every_text_is_computed_once_within_the_budget(
    jobs: list[tuple[list[int], int]], budget: int, dropped: set[int]
) -> None:
    queue = TextQueue(10_000)
    for number, (sizes, priority) in enumerate(jobs):
        queue.add(request(str(number), *sizes, priority=priority), 0.0)
    for number in dropped:
        assert queue.drop(str(number)) == (number < len(jobs))
    seen: list[tuple[str, int]] = []
    while batch := queue.take(budget):
        size = sum(len(job.request.texts[index]) for job, index in batch)
        assert size <= budget or len(batch) == 1
        seen += [(job.request.request_id, index) for job, index in batch]
        for job, _ in batch:
            job.missing -= 1
            if not job.missing:
                queue.finish(job)
    expected = [(str(n), i) for n, (sizes, _) in enumerate(jobs) if n not in dropped for i in range(len(sizes))]
    assert sorted(seen) == sorted(expected)
    assert queue.waiting == 0
    assert len(queue) == 0
