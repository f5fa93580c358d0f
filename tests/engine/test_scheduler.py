"""The scheduler under random traffic: everything finishes, nothing leaks, limits hold, order is fair."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.kv.pool import BlockPool
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduler import Batch, Scheduler
from penstock.engine.sequence import Sequence


def make_scheduler(blocks: int = 24, running: int = 5, budget: int = 40, window: int = 256) -> Scheduler:
    allocator = BlockAllocator(BlockPool(blocks + 1), 16)
    window = min(window, blocks * 16)
    return Scheduler(allocator, max_running=running, token_budget=budget, max_model_len=window)


def request(name: str, prompt: list[int], output: int, priority: int = 0, timeout: float | None = None) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=output), priority=priority, timeout_s=timeout)


def check_batch(scheduler: Scheduler, batch: Batch) -> None:
    chunks = batch.chunks
    assert 0 < batch.num_tokens <= scheduler.token_budget
    assert batch.num_tokens == sum(chunk.length for chunk in chunks)
    assert len({chunk.seq.row for chunk in chunks}) == len(chunks) <= scheduler.max_running
    assert [chunk.length == 1 for chunk in chunks] == [True] * batch.num_decodes + [False] * (
        len(chunks) - batch.num_decodes
    )
    for chunk in chunks:
        assert len(chunk.seq.blocks) == scheduler.allocator.blocks_for(chunk.start + chunk.length)


def emit(scheduler: Scheduler, batch: Batch, rng: random.Random) -> list[str]:
    """Stand in for the runner: a random token for each sampling chunk; ids of the sequences that finish."""
    finished: list[str] = []
    for chunk in batch.chunks:
        seq = chunk.seq
        if not chunk.samples or seq.finished:
            continue
        seq.pending -= 1
        seq.tokens.append(rng.randrange(3))
        if seq.row >= 0:
            scheduler.allocator.publish(seq)
        if len(seq.tokens) - seq.prompt_len >= seq.params.max_tokens or len(seq.tokens) >= scheduler.max_model_len:
            seq.finish_reason = "length"
            scheduler.finish(seq)
            finished.append(seq.id)
    return finished


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), overlap=st.booleans())
def test_random_traffic_leaves_nothing_behind(seed: int, overlap: bool) -> None:
    rng = random.Random(seed)
    scheduler = make_scheduler(blocks=rng.randint(4, 30), running=rng.randint(1, 8), budget=rng.choice([7, 40, 200]))
    longest = scheduler.max_model_len - 1
    live: dict[str, Sequence] = {}
    finished: set[str] = set()
    in_flight: list[Batch] = []
    submitted = 0
    for turn in range(4000):
        if submitted < 25 and rng.random() < 0.3:
            # Few distinct tokens, so that prefixes repeat.
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, min(longest, 90)))]
            name = f"s{submitted}"
            priority = rng.choice([-1, 0, 1])
            live[name] = scheduler.add(request(name, prompt, rng.randint(1, 60), priority), float(turn))
            submitted += 1
        if live and rng.random() < 0.03:
            name = rng.choice(sorted(live))
            seq = live.pop(name)
            seq.finish_reason = "abort"
            scheduler.finish(seq)
        batch = scheduler.schedule(float(turn))
        if batch is not None:
            check_batch(scheduler, batch)
            in_flight.append(batch)
        if in_flight and (not overlap or len(in_flight) > 1 or batch is None):
            for name in emit(scheduler, in_flight.pop(0), rng):
                live.pop(name)
                finished.add(name)
        scheduler.allocator.pool.check()
        if submitted == 25 and not live and not in_flight:
            break
    assert not live, f"starved: {sorted(live)}"
    assert not scheduler.has_work and scheduler.waiting == 0 and not scheduler.running
    assert scheduler.allocator.pool.used == 0


def run_to_end(scheduler: Scheduler, now: float = 0.0) -> list[str]:
    rng, order = random.Random(0), []
    while scheduler.has_work:
        batch = scheduler.schedule(now)
        assert batch is not None
        check_batch(scheduler, batch)
        order += emit(scheduler, batch, rng)
    return order


def test_decodes_come_before_prompts_and_prompts_are_chunked() -> None:
    scheduler = make_scheduler(budget=20)
    rng = random.Random(0)
    scheduler.add(request("short", [1] * 4, 30), 0.0)
    first = scheduler.schedule(0.0)
    assert first is not None
    emit(scheduler, first, rng)
    scheduler.add(request("long", [2] * 100, 3), 1.0)
    batch = scheduler.schedule(1.0)
    assert batch is not None
    assert [(chunk.seq.id, chunk.length, chunk.samples) for chunk in batch.chunks] == [
        ("short", 1, True),
        ("long", 19, False),
    ]


def test_urgent_overtakes_but_ages_away() -> None:
    scheduler = make_scheduler(running=1)
    scheduler.add(request("normal", [1], 1), 10.0)
    scheduler.add(request("urgent", [1], 1, priority=-1), 11.0)
    scheduler.add(request("late urgent", [1], 1, priority=-1), 100.0)
    assert run_to_end(scheduler) == ["urgent", "normal", "late urgent"]


def test_the_latest_is_preempted_and_still_finishes() -> None:
    scheduler = make_scheduler(blocks=6, running=4, budget=64)
    for index in range(3):
        scheduler.add(request(f"s{index}", [index] * 20, 40), float(index))
    order = run_to_end(scheduler)
    assert scheduler.preemptions > 0
    assert order[0] == "s0" and set(order) == {"s0", "s1", "s2"}


def test_requests_of_one_step_share_the_prefix_computed_in_it() -> None:
    scheduler = make_scheduler(budget=200)
    scheduler.add(request("a", [5] * 70, 2), 0.0)
    scheduler.add(request("b", [5] * 70, 2), 0.0)
    batch = scheduler.schedule(0.0)
    assert batch is not None
    first, second = sorted(batch.chunks, key=lambda chunk: chunk.seq.id)
    assert (first.start, first.length) == (0, 70)
    assert (second.start, second.length) == (64, 6)
    assert first.seq.blocks[:4] == second.seq.blocks[:4] and first.seq.blocks[4] != second.seq.blocks[4]


def test_a_salt_keeps_prefixes_apart() -> None:
    scheduler = make_scheduler(budget=200)
    params = SamplingParams(max_tokens=1)
    for tenant in ("x", "y"):
        scheduler.add(Request(tenant, [5] * 40, params, cache_salt=tenant), 0.0)
    batch = scheduler.schedule(0.0)
    assert batch is not None and [chunk.start for chunk in batch.chunks] == [0, 0]


def test_deadlines_are_reported_once() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(request("slow", [1], 5, timeout=2.0), 10.0)
    assert scheduler.expired(11.9) == []
    assert scheduler.expired(12.0) == [seq]
    assert scheduler.expired(13.0) == []


def test_waste_is_under_four_percent() -> None:
    """Blocks of 16 tokens are filled one after the other: only each sequence's last one has empty places."""
    rng = random.Random(3)
    scheduler = make_scheduler(blocks=4000, running=64, budget=512, window=4096)
    for index in range(200):
        prompt = [rng.randrange(9) for _ in range(rng.randint(100, 1024))]
        scheduler.add(request(f"s{index}", prompt, rng.randint(100, 400)), 0.0)
    wasted = held = 0
    while scheduler.has_work:
        batch = scheduler.schedule(0.0)
        assert batch is not None
        for seq in scheduler.running:
            held += len(seq.blocks) * 16
            wasted += len(seq.blocks) * 16 - seq.computed
        emit(scheduler, batch, rng)
    assert wasted / held < 0.04


def test_ended_sequences_do_not_stay_until_a_far_deadline() -> None:
    """Requests come and go for minutes while every one of them has an hour; some are cancelled before they start."""
    scheduler = make_scheduler()
    for index in range(500):
        seq = scheduler.add(request(f"r{index}", [1, 2, 3], 5, priority=index % 3, timeout=3600.0), float(index))
        if index % 2:
            assert scheduler.schedule(float(index)) is not None
        seq.finish_reason = "abort"
        scheduler.finish(seq)
    assert len(scheduler._deadlines) <= scheduler.SLACK and len(scheduler._waiting) <= scheduler.SLACK
    late = scheduler.add(request("late", [1], 5, timeout=1.0), 600.0)
    assert scheduler.expired(602.0) == [late]
    late.finish_reason = "timeout"
    scheduler.finish(late)
    scheduler.check_idle()
