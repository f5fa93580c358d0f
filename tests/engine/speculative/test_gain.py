"""Depth follows what pays: likely guesses and cheap steps deepen it, the opposite switches it off."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduler import Batch, Chunk
from penstock.engine.sequence import Sequence
from penstock.engine.speculative.gain import Acceptance, StepCosts, choose_depths
from penstock.engine.speculative.speculation import Speculation
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.speculative.forced import eager_engine
from tests.engine.tiny import write_checkpoint


def flat(tokens: int, depth: int) -> float:
    """Reading the weights is everything."""
    return 1.0


def linear(tokens: int, depth: int) -> float:
    """Arithmetic is everything."""
    return float(tokens)


def test_free_guesses_are_all_taken_and_dear_ones_none() -> None:
    assert choose_depths([(0.5, 4), (0.9, 2)], 2, 64, 1.0, flat) == (
        [4, 2],
        pytest.approx(2.0 + (0.9375 + 1.71 - 2) / 2),
    )
    assert choose_depths([(0.9, 4)] * 2, 2, 64, 2.0, linear) == ([0, 0], 1.0)


def test_the_likeliest_guesses_come_first() -> None:
    depths, _ = choose_depths([(0.3, 6), (0.9, 6)], 2, 6, 1.0, flat)
    assert depths == [0, 4]


def test_a_dear_proposer_is_asked_for_less() -> None:
    def seconds(per_guess: float) -> list[int]:
        return choose_depths([(0.8, 8)], 1, 64, 1.0, lambda tokens, depth: 1.0 + per_guess * depth)[0]

    assert seconds(0.0) == [8]
    assert 0 < seconds(0.2)[0] < 8
    assert seconds(0.9) == [0]


def test_the_choice_is_the_best_of_all() -> None:
    """Against every possible choice, on random costs."""
    rng = random.Random(2)
    for _ in range(60):
        outlooks = [(rng.random(), rng.randrange(4)) for _ in range(3)]
        costs = [1.0]
        for _ in range(16):
            costs.append(costs[-1] + rng.random() * 0.4)
        depths, factor = choose_depths(outlooks, 3, 64, costs[3], lambda n, d, c=costs: c[n])
        every = [
            (3 + sum(p**j for (p, _), k in zip(outlooks, choice, strict=True) for j in range(1, k + 1)))
            / costs[3 + sum(choice)] * costs[3] / 3
            for choice in ((a, b, c) for a in range(outlooks[0][1] + 1) for b in range(outlooks[1][1] + 1)
                           for c in range(outlooks[2][1] + 1))
        ]  # fmt: skip
        assert factor == pytest.approx(max(every))
        assert all(depth <= most for depth, (_, most) in zip(depths, outlooks, strict=True))


def test_costs_are_learned_and_hiccups_hardly_matter() -> None:
    costs = StepCosts()
    assert costs.estimate(1) is None
    for _ in range(30):
        costs.observe(1, 1.0)
        costs.observe(8, 2.0)
    assert costs.estimate(4) == pytest.approx(1.0 + 3 / 7)
    costs.observe(1, 1000.0)
    assert costs.estimate(1) < 1.5
    assert costs.estimate(64) > 2.0


def test_acceptance_starts_from_others_and_follows_its_own() -> None:
    everyone = Acceptance(0.5, decay=0.99)
    for _ in range(50):
        everyone.observe(0, 1)
    fresh = Acceptance(everyone, decay=0.9)
    assert fresh.chance < 0.1
    for _ in range(30):
        fresh.observe(4, 4)
    assert fresh.chance > 0.9


class _Guesser:
    """Always has guesses; they hold with the given chance."""

    def __init__(self, chance: float) -> None:
        self.chance = chance

    def outlook(self, seq: Sequence) -> tuple[float, int]:
        return self.chance, 4

    def seconds(self, sequences: int) -> float:
        return 0.0

    def propose(self, depths: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        return {seq: [0] * depth for seq, depth in depths.items()}

    def learn(self, seq: Sequence, drafts: tuple[int, ...], tokens: list[int]) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass


def test_it_switches_itself_off_and_tries_again_rarely() -> None:
    """Arithmetic-bound steps: nothing pays, so nearly all steps are plain; then they become cheap, and it is back."""
    now = 0.0
    speculation = Speculation(_Guesser(0.6), depth=4, most_tokens=64, overlap=False, clock=lambda: now)
    sequences = [Sequence(Request(f"r{i}", [1], SamplingParams(max_tokens=9999)), 0.0, (0.0, i)) for i in range(4)]
    slope = 1.0

    def steps(count: int) -> int:
        nonlocal now
        verifying = 0
        for _ in range(count):
            drafts = speculation.propose(sequences)
            chunks = [Chunk(s, 0, 1 + len(drafts.get(s, ())), True, tuple(drafts.get(s, ()))) for s in sequences]
            batch = Batch(chunks, 0, sum(chunk.length for chunk in chunks))
            now += 1.0 + slope * batch.num_tokens
            speculation.step_done(batch)
            verifying += batch.speculative
        return verifying

    steps(100)
    assert steps(1000) < 20
    slope = 0.01
    assert steps(1500) > 500


def test_a_full_batch_is_left_alone() -> None:
    speculation = Speculation(_Guesser(0.9), depth=4, most_tokens=4, overlap=False, clock=lambda: 0.0)
    speculation.plain.observe(4, 1.0)
    sequences = [Sequence(Request(f"r{i}", [1], SamplingParams(max_tokens=99)), 0.0, (0.0, i)) for i in range(4)]
    assert speculation.propose(sequences) == {}
    assert speculation.propose(sequences[:3]) != {}


def test_a_text_that_repeats_itself_is_guessed_from_itself(tmp_path: Path) -> None:
    """A tiny random model with small weights comes back to the same phrases, in changing order."""
    folder = write_checkpoint("llama-gqa", tmp_path, spread=0.3)
    engine = eager_engine(folder, speculation_depth=4)
    request = greedy("a", [3, 1, 4, 1, 5], 200)
    text = generate(engine, request)["a"]
    load = engine.load_snapshot()
    assert text == generate(make_engine(folder), request)["a"]
    assert 50 < load.accepted_tokens < load.draft_tokens and engine.steps < 150
