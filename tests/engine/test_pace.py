"""The prompt tokens of a step are bounded so that streams keep their gap between tokens."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.backends.errors import error_of
from penstock.engine.batch import Batch
from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.kv.pool import BlockPool
from penstock.engine.pace import LEAST, MARGIN, Pace, PromptBudget
from penstock.engine.request import Request, SamplingParams
from penstock.engine.runner.step import PendingStep
from penstock.engine.scheduler import FRESH_S, Scheduler
from penstock.protocol.errors import Overloaded
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint

PER_TOKEN, PER_KEY, BASE, PER_DECODE = 25e-6, 1.0e-9, 0.006, 30e-6


def truth(decodes: int, prompts: list[tuple[int, int]]) -> float:
    keys = sum(length * (start + length / 2) for start, length in prompts)
    tokens = sum(length for _, length in prompts)
    return BASE + PER_DECODE * decodes + PER_TOKEN * tokens + PER_KEY * keys


def taught(noise: float = 0.0, seed: int = 0) -> Pace:
    pace, rng = Pace(0.03), random.Random(seed)
    for _ in range(300):
        decodes = rng.choice((1, 4, 16, 64))
        prompts = [(rng.randrange(0, 30_000), rng.randrange(16, 2048))] if rng.random() < 0.5 else []
        pace.observe(decodes, prompts, truth(decodes, prompts) * rng.uniform(1 - noise, 1 + noise))
    return pace


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("start", [0, 8_000, 100_000])
def test_a_step_with_the_allowed_prompt_tokens_keeps_the_target(noise: float, start: int) -> None:
    pace = taught(noise)
    for decodes in (1, 16, 64):
        budget = pace.budget(decodes, None)
        tokens = pace.tokens(budget, start, 10_000)
        assert 0.6 * 0.03 < truth(decodes, [(start, tokens)]) < 0.03 * (1.0 if not noise else 1.1)


def test_nothing_is_bounded_without_a_target_a_stream_or_a_measurement() -> None:
    assert taught().budget(0, None) == math.inf
    assert Pace(0.03).budget(4, None) == math.inf
    pace = taught()
    pace.target_s = None
    assert pace.budget(4, None) == math.inf
    assert pace.budget(4, 0.02) < math.inf


def test_the_strictest_target_counts() -> None:
    pace = taught()
    assert pace.budget(4, 0.02) < pace.budget(4, None) == pace.budget(4, 0.2)


def test_a_step_that_was_held_up_is_not_learnt_from() -> None:
    pace = taught()
    before = pace.seconds(4, 512, 0)
    pace.observe(4, [(0, 512)], 30.0)
    pace.observe(4, [], 30.0)
    assert pace.seconds(4, 512, 0) == pytest.approx(before)


def test_after_the_warm_up_nothing_is_known() -> None:
    pace = Pace(0.03)
    pace.observe(1, [(0, 16)], 5.0)
    pace.forget()
    assert pace.budget(4, None) == math.inf
    pace.observe(4, [(0, 512)], 0.02)
    assert pace.tokens(pace.budget(4, None), 0, 10_000) > 500


def test_it_follows_a_machine_that_became_slower() -> None:
    pace = taught()
    for index in range(400):
        prompts = [(0, 512)] if index % 2 else []
        pace.observe(8, prompts, 2 * truth(8, prompts))
    assert pace.seconds(8, 512, 512 * 256) == pytest.approx(2 * truth(8, [(0, 512)]), rel=0.1)


class World:
    """A scheduler whose steps take `truth`."""

    def __init__(self, target_s: float | None) -> None:
        self.now = 0.0
        allocator = BlockAllocator(BlockPool(8001), 16)
        self.scheduler = Scheduler(
            allocator, max_running=64, token_budget=8448, max_model_len=32_768, pace=Pace(target_s)
        )
        self.took: list[tuple[Batch, float]] = []

    def submit(
        self, name: str, prompt: int, output: int, target_s: float | None = None, patience_s: float | None = None
    ) -> None:
        params = SamplingParams(max_tokens=output)
        tokens = [hash((name, i)) % 50_000 for i in range(prompt)]
        self.scheduler.add(Request(name, tokens, params, target_gap_s=target_s, patience_s=patience_s), self.now)

    def late(self, name: str, prompt: int, patience_s: float) -> float:
        """What the engine says that the prompt takes when it refuses it; 0: it begins."""
        self.submit(name, prompt, 2, patience_s=patience_s)
        self.step()
        for seq, seconds in self.scheduler.take_late():
            assert seq.id == name
            seq.finish_reason = "error"
            self.scheduler.finish(seq)
            return seconds
        assert self.scheduler.take_begun() == [name]
        return 0.0

    def step(self) -> bool:
        batch = self.scheduler.schedule(self.now)
        if batch is None:
            return False
        prompts = [(chunk.start, chunk.length) for chunk in batch.chunks if not chunk.decodes]
        seconds = truth(len(batch.chunks) - len(prompts), prompts)
        self.now += seconds
        self.took.append((batch, seconds))
        self.scheduler.landed(batch, seconds)
        for chunk in batch.chunks:
            if chunk.samples:
                chunk.seq.pending -= 1
                chunk.seq.tokens.append(7)
                if chunk.seq.length >= chunk.seq.limit:
                    chunk.seq.finish_reason = "length"
                    self.scheduler.finish(chunk.seq)
        return True

    def until(self, done: Callable[[], bool]) -> None:
        while not done() and self.step():
            pass


def world_with_streams(target_s: float | None, own_s: float | None = None) -> World:
    world = World(target_s)
    world.submit("lesson", 700, 4)
    world.until(lambda: world.scheduler.get("lesson") is None)
    for index in range(8):
        world.submit(f"stream-{index}", 100, 2000, own_s if index == 3 else None)
    for _ in range(20):
        world.step()
    world.took.clear()
    return world


@pytest.mark.parametrize(("target_s", "own_s"), [(0.03, None), (None, 0.03), (0.2, 0.03)])
def test_streams_keep_their_gap_while_long_prompts_arrive(target_s: float | None, own_s: float | None) -> None:
    world = world_with_streams(target_s, own_s)
    for index in range(3):
        world.submit(f"long-{index}", 6000, 4)
    world.until(lambda: all(world.scheduler.get(f"long-{index}") is None for index in range(3)))
    beside = [seconds for batch, seconds in world.took if batch.num_decodes >= 8]
    assert max(beside) < 0.03
    assert sum(batch.num_tokens - batch.num_decodes for batch, _ in world.took) >= 17_900
    busy = [seconds for batch, seconds in world.took if batch.num_tokens - batch.num_decodes > 64]
    assert sum(busy) / len(busy) > 0.8 * MARGIN * 0.03, "the time that is left is used"


def lone_world() -> World:
    world = World(None)
    for length in (100, 700, 7000):
        world.submit(f"lesson-{length}", length, 4)
        world.until(lambda: not world.scheduler.has_work)
    return world


def test_a_prompt_that_takes_longer_than_it_may_is_not_begun() -> None:
    world = lone_world()
    takes = truth(0, [(0, 8448)]) + truth(0, [(8448, 8448)]) + truth(0, [(16_896, 3104)])
    assert world.late("too-long", 20_000, 0.9 * takes) == pytest.approx(takes, rel=0.1)
    assert not world.late("long", 20_000, 1.1 * takes)
    world.until(lambda: not world.scheduler.has_work)
    assert not world.late("long", 20_000, 0.02), "nearly all of it is cached"
    world.until(lambda: not world.scheduler.has_work)
    world.scheduler.check_idle()


def test_prompts_and_streams_that_run_count() -> None:
    world = lone_world()
    alone = truth(0, [(0, 2000)])
    world.submit("ahead", 16_000, 4)
    world.step()
    assert world.late("behind", 2000, 3 * alone) > 0.2, "the rest of the other prompt comes first"
    world = world_with_streams(0.01)
    world.submit("lesson", 3000, 4)
    world.until(lambda: world.scheduler.get("lesson") is None)
    assert world.late("beside", 2000, 2 * alone) > 2 * alone, "a step has time for few prompt tokens"
    assert not world.late("patient", 2000, 20 * alone)


def test_what_is_not_known_refuses_nothing() -> None:
    assert not World(None).late("first", 20_000, 0.001)
    world = World(None)
    for index in range(40):
        world.submit(f"short-{index}", 24, 4)
        world.until(lambda: not world.scheduler.has_work)
    assert world.late("far-too-long", 8000, 0.5 * truth(1, [])) > 0.0, "one step at least"
    assert not world.late("much-longer", 8000, 1.5 * truth(1, [])), "steps of that size have not been measured"
    world.until(lambda: not world.scheduler.has_work)
    assert world.late("as-long", 8000, 0.001) > 0.1


def test_an_old_measurement_refuses_only_what_is_far_too_long() -> None:
    """So that a machine that was slow for a while is measured again, also when all requests have a limit."""
    world = lone_world()
    takes = truth(0, [(0, 8000)])
    assert world.late("now", 8000, 0.5 * takes)
    world.now += FRESH_S + 1.0
    assert world.late("far-too-long", 8000, 0.1 * takes)
    assert not world.late("measured-again", 8000, 0.5 * takes)
    world.until(lambda: not world.scheduler.has_work)
    assert world.late("known-again", 8000, 0.5 * takes)


def test_an_engine_says_that_a_prompt_takes_too_long(tmp_path: Path) -> None:
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path))
    engine.scheduler.pace = taught()
    assert engine.load_snapshot().decode_s == pytest.approx(truth(1, []), rel=0.1)
    engine.submit(Request("late", [5] * 200, SamplingParams(max_tokens=4), patience_s=0.001))
    output = engine.step()
    assert output is not None
    refused = error_of(output.deltas[0])
    assert isinstance(refused, Overloaded) and refused.reason == "slo_ttft" and refused.retry_after
    assert re.match(r"The prompt takes about \d+ ms, longer than `x-slo-ttft-ms` leaves", refused.message)
    assert not engine.has_work
    engine.check_idle()


def test_without_a_target_a_prompt_takes_the_whole_step() -> None:
    world = world_with_streams(None)
    world.submit("long", 6000, 4)
    world.until(lambda: world.scheduler.get("long") is None)
    assert max(seconds for _, seconds in world.took) > 0.1


def test_a_target_that_cannot_be_kept_slows_prompts_down_and_does_not_stop_them() -> None:
    world = world_with_streams(0.001)
    world.submit("long", 1000, 4)
    world.until(lambda: world.scheduler.get("long") is None)
    with_prompts = [batch.num_tokens - batch.num_decodes for batch, _ in world.took]
    assert [tokens for tokens in with_prompts if tokens] == [LEAST] * (1000 // LEAST) + [1000 % LEAST]


def test_prompts_without_streams_are_not_slowed_down() -> None:
    world = World(0.03)
    world.submit("lesson", 700, 4)
    world.until(lambda: world.scheduler.get("lesson") is None)
    world.took.clear()
    world.submit("long", 8000, 4)
    world.step()
    assert world.took[0][0].num_tokens == 8000


def test_a_default_target_yields_where_many_prompts_wait() -> None:
    pace = taught()
    pace.yields_s = 0.25
    assert pace.budget(4, None, backlog=2_000) < math.inf
    assert pace.budget(4, None, backlog=20_000) == math.inf
    assert pace.budget(4, 0.02, backlog=20_000) < math.inf  # a request's own does not
    pace.yields_s = None
    assert pace.budget(4, None, backlog=20_000) < math.inf


def test_a_step_that_is_computed_while_it_is_launched_counts_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CPU, where a target would otherwise bound nothing."""
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path), target_gap_ms=300.0)
    engine.scheduler.pace.forget()
    now, run = 0.0, engine.runner.run

    def computed(batch: Batch) -> PendingStep:
        nonlocal now
        now += 0.1 + 0.01 * (batch.num_tokens - batch.num_decodes)
        return run(batch)

    monkeypatch.setattr(engine, "clock", lambda: now)
    monkeypatch.setattr(engine.runner, "run", computed)
    generate(engine, greedy("stream", [5] * 8, 8))
    generate(engine, greedy("prompt", [7] * 32, 4))
    assert engine.scheduler.pace.expected(1, []) == pytest.approx(0.1)
    assert engine.scheduler.pace.expected(1, [(0, 32)]) == pytest.approx(0.42, rel=0.1)


@pytest.mark.parametrize(("tile", "tokens"), [(128, 256), (32, 288)])
def test_prompts_are_cut_to_tiles_of_the_device(tile: int, tokens: int) -> None:
    pace = Pace(0.4, tile=tile)
    pace.observe(1, [], 0.05)
    pace.observe(1, [(0, 100)], 0.15)
    assert PromptBudget(pace, pace.budget(1, None)).fit(0, 512) == tokens


def test_engines_on_cpu_hold_a_target_until_prompts_of_seconds_wait(tmp_path: Path) -> None:
    pace = make_engine(write_checkpoint("llama-gqa", tmp_path), target_gap_ms=None).scheduler.pace
    assert (pace.target_s, pace.default, pace.yields_s, pace.tile) == (0.5, True, 2.0, 32)


@pytest.mark.parametrize(("base", "default", "asked"), [(0.01, 0.08, 0.08), (0.06, 0.06, 0.03), (0.2, 0.2, 0.0)])
def test_a_default_that_a_model_is_too_slow_for_does_not_stop_its_prompts(
    base: float, default: float, asked: float
) -> None:
    for is_default, left in ((True, default), (False, asked)):
        pace = Pace(0.1, default=is_default)
        pace.observe(1, [], base)
        pace.observe(1, [(0, 100)], base + 0.1)
        assert pace.budget(1, None) == pytest.approx(left)
