"""The scheduler under random traffic: everything finishes, nothing leaks, limits hold, order is fair."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.batch import Batch, Chunk
from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.kv.pool import BlockPool
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduler import Scheduler
from penstock.engine.sequence import Sequence


def make_scheduler(
    blocks: int = 24, running: int = 5, budget: int = 40, window: int = 256, batches: int = 1
) -> Scheduler:
    allocator = BlockAllocator(BlockPool(blocks + 1), 16)
    window = min(window, blocks * 16)
    return Scheduler(allocator, max_running=running, token_budget=budget, max_model_len=window, batches=batches)


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
    scheduler.landed(batch)
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


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), depth=st.integers(0, 3), in_turns=st.booleans())
def test_random_traffic_leaves_nothing_behind(seed: int, depth: int, in_turns: bool) -> None:
    rng = random.Random(seed)
    blocks, running, budget = rng.randint(4, 30), rng.randint(1, 8), rng.choice([7, 40, 200])
    batches = depth + 1 if in_turns else 1
    depth = depth if in_turns else depth % 2  # one step ahead (overlap), or as many as a pipeline has stages
    scheduler = make_scheduler(blocks=blocks, running=running, budget=budget, batches=batches)
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
            if batches > 1:
                flying = [chunk.seq for each in in_flight for chunk in each.chunks if chunk.samples]
                assert len(flying) == len(set(flying)), "it samples again before its last token is known"
        if in_flight and (len(in_flight) > depth or batch is None):
            for name in emit(scheduler, in_flight.pop(0), rng):
                live.pop(name)
                finished.add(name)
        scheduler.allocator.pool.check()
        if submitted == 25 and not live and not in_flight:
            break
    assert not live, f"starved: {sorted(live)}"
    assert not scheduler.has_work and scheduler.waiting == 0 and not scheduler.running
    scheduler.check_idle()


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


def sizes(batch: Batch | None) -> tuple[int, int]:
    """Sequences that decode, and prompt tokens."""
    return (0, 0) if batch is None else (batch.num_decodes, batch.num_tokens - batch.num_decodes)


def test_steps_in_flight_share_what_there_is_evenly() -> None:
    scheduler = make_scheduler(blocks=999, running=16, budget=512, window=4096, batches=3)
    rng = random.Random(0)
    for name in range(7):
        scheduler.add(request(f"s{name}", [name] * 9, 99), 0.0)
    together = scheduler.schedule(0.0)
    assert together is not None and sizes(together) == (0, 63), "so few prompt tokens are not worth several steps"
    assert scheduler.schedule(0.0) is None, "all of them wait for their token"
    emit(scheduler, together, rng)
    in_flight = [scheduler.schedule(1.0) for _ in range(3)]
    assert [sizes(batch) for batch in in_flight] == [(3, 0), (2, 0), (2, 0)]
    assert scheduler.schedule(1.0) is None
    scheduler.add(request("long", [9] * 1500, 3), 2.0)
    for turn in range(6):
        oldest = in_flight.pop(0)
        assert oldest is not None
        emit(scheduler, oldest, rng)
        in_flight.append(scheduler.schedule(3.0))
        decodes, prompt = sizes(in_flight[-1])
        assert decodes in (2, 3) and (prompt == 500 if turn < 3 else prompt == 0)


def test_a_row_stays_taken_while_a_step_in_flight_samples_for_it() -> None:
    scheduler = make_scheduler(running=1, batches=2)
    first = scheduler.add(request("first", [1, 2], 9), 0.0)
    batch = scheduler.schedule(0.0)
    assert batch is not None
    first.finish_reason = "abort"
    scheduler.finish(first)
    scheduler.add(request("second", [1, 2], 9), 0.0)
    assert scheduler.schedule(0.0) is None
    scheduler.landed(batch)
    assert scheduler.schedule(0.0) is not None


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


def test_sequences_that_are_cancelled_while_they_wait_do_not_stay_behind_those_that_wait_on() -> None:
    scheduler = make_scheduler()
    kept = [scheduler.add(request(f"k{index}", [1, 2, 3], 5), float(index)) for index in range(3)]
    for index in range(200):
        seq = scheduler.add(request(f"r{index}", [1, 2, 3], 5), 10.0 + index)
        seq.finish_reason = "abort"
        scheduler.finish(seq)
        assert len(scheduler._waiting) <= 2 * len(kept) + scheduler.SLACK + 1
    batch = scheduler.schedule(300.0)
    assert batch is not None and [chunk.seq for chunk in batch.chunks] == kept


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


def step(scheduler: Scheduler, drafts: dict[Sequence, list[int]] | None = None, now: float = 0.0) -> Batch:
    batch = scheduler.schedule(now, drafts)
    assert batch is not None
    return batch


def decoding(scheduler: Scheduler, name: str, prompt: int, output: int = 40) -> Sequence:
    """A sequence whose prompt has been computed and whose first token is known."""
    seq = scheduler.add(request(name, [prompt] * prompt, output), 0.0)
    emit(scheduler, step(scheduler), random.Random(0))
    assert scheduler.decoding()[-1] is seq and seq.length == prompt + 1
    return seq


def test_draft_tokens_end_one_before_the_last_that_is_allowed() -> None:
    scheduler = make_scheduler(blocks=20)
    seq = decoding(scheduler, "a", 13, output=6)
    assert [scheduler.reserve(seq, drafts) for drafts in (0, 3, 4, 5, 99)] == [0, 3, 4, 4, 4]
    short = make_scheduler(blocks=20, window=16)
    assert short.reserve(decoding(short, "a", 13), 99) == 1, "the context window ends it as well"


def test_draft_tokens_leave_every_running_sequence_a_block() -> None:
    for blocks, fitting in ((3, 10), (2, 2)):
        scheduler = make_scheduler(blocks=blocks)
        seq = decoding(scheduler, "a", 13)
        assert scheduler.reserve(seq, 10) == fitting, "one sequence, one block left over, or what its last one holds"
        assert len(seq.blocks) == (2 if fitting == 10 else 1)
    scheduler = make_scheduler(blocks=5)
    first, second = decoding(scheduler, "a", 13), decoding(scheduler, "b", 15)
    assert scheduler.reserve(second, 10) == 10 and scheduler.allocator.pool.free == 2
    assert scheduler.reserve(first, 10) == 1
    full = make_scheduler(blocks=2)
    assert full.reserve(decoding(full, "a", 15), 5) == 0
    behind = make_scheduler(blocks=2)
    assert behind.reserve(decoding(behind, "a", 16), 5) == 0, "its last token has no block yet"


def test_draft_tokens_leave_every_decode_its_token_of_the_budget() -> None:
    scheduler = make_scheduler(budget=5)
    first, second = decoding(scheduler, "a", 3), decoding(scheduler, "b", 3)
    batch = step(scheduler, {first: [7, 8], second: [5, 6, 7]})
    assert [(chunk.seq, chunk.start, chunk.length, chunk.drafts, chunk.samples) for chunk in batch.chunks] == [
        (first, 4, 3, (7, 8), True),
        (second, 3, 2, (5,), True),
    ]
    assert (batch.num_tokens, batch.num_decodes, batch.speculative, batch.plain) == (5, 5, True, False)
    assert all(chunk.decodes for chunk in batch.chunks)
    assert (first.computed, second.computed, first.pending, second.pending) == (7, 5, 1, 1)


def test_draft_tokens_leave_less_for_prompts() -> None:
    scheduler = make_scheduler(budget=10)
    seq = decoding(scheduler, "a", 3)
    scheduler.add(request("late", [9] * 30, 2), 1.0)
    batch = step(scheduler, {seq: [1, 2, 3, 4]})
    assert [(chunk.seq.id, chunk.length, chunk.samples) for chunk in batch.chunks] == [
        ("a", 5, True),
        ("late", 5, False),
    ]
    assert (batch.num_tokens, batch.num_decodes) == (10, 5)


def test_a_batch_puts_decodes_first_and_says_what_it_holds() -> None:
    seqs = [Sequence(request(name, [1] * 8, 4), 0.0, (0.0, at)) for at, name in enumerate("abc")]
    plain = Batch.of([Chunk(seq, 7, 1, True) for seq in seqs])
    assert (plain.num_tokens, plain.num_decodes, plain.plain, plain.speculative) == (3, 3, True, False)
    assert not Batch.of([Chunk(seqs[0], 6, 1, False)]).plain
    mixed = Batch.of([Chunk(seqs[0], 0, 8, True), Chunk(seqs[1], 7, 1, True), Chunk(seqs[2], 7, 3, True, (4, 5))])
    assert [chunk.seq.id for chunk in mixed.chunks] == ["b", "c", "a"]
    assert (mixed.num_tokens, mixed.num_decodes, mixed.plain, mixed.speculative) == (12, 4, False, True)
    kept = Batch.of([Chunk(seqs[0], 7, 1, True), Chunk(seqs[2], 7, 2, True, (4,)), Chunk(seqs[1], 0, 8, True)])
    assert [chunk.seq.id for chunk in kept.chunks] == ["a", "c", "b"] and kept.num_decodes == 3


def test_a_sequence_waits_until_all_it_has_fits() -> None:
    scheduler = make_scheduler(blocks=4, budget=100)
    scheduler.add(request("a", [1] * 32, 20), 0.0)
    scheduler.add(request("b", [2] * 33, 10), 1.0)
    scheduler.add(request("c", [3] * 4, 10), 2.0)
    assert [chunk.seq.id for chunk in step(scheduler).chunks] == ["a"]
    assert (scheduler.waiting, len(scheduler.running), scheduler.has_work) == (2, 1, True), "order is kept"
    exact = make_scheduler(blocks=4, budget=100)
    exact.add(request("a", [1] * 32, 20), 0.0)
    exact.add(request("b", [2] * 32, 10), 1.0)
    assert len(step(exact).chunks) == 2 and exact.waiting == 0


def test_rows_and_the_budget_bound_a_step() -> None:
    scheduler = make_scheduler(running=2, budget=8)
    for name in "abc":
        scheduler.add(request(name, [1] * 4, 4), 0.0)
    batch = step(scheduler)
    assert [(chunk.seq.row, chunk.length) for chunk in batch.chunks] == [(0, 4), (1, 4)]
    assert scheduler.waiting == 1
    rng = random.Random(0)
    emit(scheduler, batch, rng)
    assert [chunk.length for chunk in step(scheduler).chunks] == [1, 1], "no row is free for the third"


def test_counters_of_prefix_hits_count_each_request_once() -> None:
    scheduler = make_scheduler(blocks=8, running=3, budget=100)
    a = scheduler.add(request("a", [5] * 40, 2), 0.0)
    b = scheduler.add(request("b", [5] * 40, 2), 3.0)
    step(scheduler, now=7.0)
    assert (a.cached_tokens, b.cached_tokens, a.first_scheduled, a.epoch) == (0, 32, 7.0, 1)
    assert (scheduler.prefix_query_tokens, scheduler.prefix_hit_tokens, scheduler.host_hit_tokens) == (80, 32, 0)
    for seq in (a, b):
        seq.pending -= 1
        seq.tokens.append(1)
    scheduler.preempt(b)
    assert (scheduler.preemptions, scheduler.waiting, b.row, b.blocks) == (1, 1, -1, [])
    assert scheduler.get("b") is b and scheduler.get("x") is None
    step(scheduler, now=8.0)
    assert (b.first_scheduled, b.cached_tokens, b.epoch, scheduler.prefix_query_tokens) == (7.0, 32, 2, 80)


def test_what_every_allowed_token_was_sampled_for_computes_no_more() -> None:
    scheduler = make_scheduler()
    seq = scheduler.add(request("a", [1] * 4, 2), 0.0)
    step(scheduler)
    assert scheduler.decoding() == [seq]
    step(scheduler)
    assert seq.pending == 2 and scheduler.decoding() == [] and scheduler.schedule(0.0) is None
    capped = make_scheduler(window=5)
    seq = capped.add(request("a", [1] * 4, 90), 0.0)
    assert seq.limit == 5
    step(capped)
    assert capped.schedule(0.0) is None


def test_after_a_failed_step_each_of_its_sequences_runs_alone_once() -> None:
    scheduler = make_scheduler(blocks=12, running=3, budget=20)
    seqs = [scheduler.add(request(name, [at + 1] * 24, 4), float(at)) for at, name in enumerate("abc")]
    rng = random.Random(0)
    step(scheduler)
    scheduler.isolate(seqs[:2])
    assert not scheduler.running and scheduler.decoding() == [] and scheduler.waiting == 3
    alone: list[tuple[str, int, bool]] = []
    for _ in range(4):
        batch = step(scheduler)
        assert len(batch.chunks) == 1
        alone.append((batch.chunks[0].seq.id, batch.chunks[0].length, batch.chunks[0].samples))
        emit(scheduler, batch, rng)
    assert alone == [("a", 20, False), ("a", 4, True), ("b", 20, False), ("b", 4, True)]
    assert [chunk.seq.id for chunk in step(scheduler).chunks] == ["a", "b", "c"], "then all go on"
    gone = make_scheduler()
    seq = gone.add(request("a", [1] * 4, 4), 0.0)
    gone.isolate([seq])
    seq.finish_reason = "abort"
    gone.finish(seq)
    assert gone.schedule(0.0) is None
    gone.check_idle()


def test_a_suspect_takes_the_place_of_others_if_it_must() -> None:
    scheduler = make_scheduler(blocks=4, running=2, budget=64)
    suspect = scheduler.add(request("suspect", [1] * 40, 4), 0.0)
    step(scheduler)
    scheduler.isolate([suspect])
    scheduler._suspects.clear()
    others = [scheduler.add(request(name, [2] * 4, 8, priority=-9), 1.0) for name in "xy"]
    step(scheduler)
    assert set(scheduler.running) == set(others)
    suspect.pending = 0
    scheduler.isolate([suspect])
    batch = step(scheduler)
    assert [chunk.seq.id for chunk in batch.chunks] == ["suspect"] and batch.chunks[0].samples
    assert len(scheduler.running) == 2 and scheduler.preemptions == 2


def test_a_suspect_that_waits_for_a_row_is_not_lost_with_a_rank() -> None:
    scheduler = make_scheduler(running=1, batches=2)
    first, second = (scheduler.add(request(name, [1] * 4, 4), 0.0) for name in "ab")
    scheduler.isolate([first, second])
    assert [chunk.seq for chunk in step(scheduler).chunks] == [first]
    assert scheduler.schedule(0.0) is None, "the step in flight holds the only row"
    scheduler.start_over()
    rng, finished = random.Random(0), list[str]()
    while len(finished) < 2:
        finished += emit(scheduler, step(scheduler), rng)
    scheduler.check_idle()


def test_only_unfinished_ones_are_late() -> None:
    scheduler = make_scheduler()
    early, late = (scheduler.add(request(name, [1], 5, timeout=at), 0.0) for name, at in (("a", 1.0), ("b", 2.0)))
    early.finish_reason = "stop"
    scheduler.finish(early)
    assert scheduler.expired(1.99) == [] and scheduler.expired(2.0) == [late]
    assert scheduler.waiting == 1


def test_the_latest_makes_room_for_one_before_it() -> None:
    scheduler = make_scheduler(blocks=4, running=3, budget=36)
    first = scheduler.add(request("a", [1] * 31, 20), 0.0)
    second = scheduler.add(request("b", [2] * 30, 20), 1.0)
    rng = random.Random(0)
    emit(scheduler, step(scheduler), rng)  # a whole, five tokens of b
    emit(scheduler, step(scheduler), rng)  # a token of a, b whole
    assert scheduler.allocator.pool.free == 0 and (first.length, second.length) == (33, 31)
    batch = step(scheduler)
    assert [chunk.seq for chunk in batch.chunks] == [first], "a needs a third block: b, the latest, makes room"
    assert (scheduler.preemptions, scheduler.waiting, len(first.blocks)) == (1, 1, 3)


def test_one_preempted_after_its_chunk_was_chosen_gives_back_chunk_and_budget() -> None:
    scheduler = make_scheduler(blocks=4, running=3, budget=36)
    late = scheduler.add(request("late", [2] * 5, 20), 9.0)
    rng = random.Random(0)
    emit(scheduler, step(scheduler), rng)
    early = scheduler.add(request("early", [1] * 47, 17), 0.0)
    emit(scheduler, step(scheduler), rng)
    emit(scheduler, step(scheduler), rng)
    assert scheduler.allocator.pool.free == 0 and list(scheduler.running) == [late, early] and early.length == 48
    emit(scheduler, step(scheduler), rng)
    batch = step(scheduler)
    assert [(chunk.seq, chunk.length) for chunk in batch.chunks] == [(early, 1)]
    assert scheduler.preemptions == 1 and late.computed == 0 and late.pending == 0
