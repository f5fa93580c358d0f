"""Depth follows what pays: likely draft tokens and cheap steps deepen it, the opposite switches it off."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from penstock.engine.batch import Batch, Chunk
from penstock.engine.request import Request, SamplingParams
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


def test_free_drafts_are_all_taken_and_dear_ones_none() -> None:
    assert choose_depths([(0.5, 4), (0.9, 2)], 2, 64, 1.0, flat) == (
        [4, 2],
        pytest.approx(2.0 + (0.9375 + 1.71 - 2) / 2),
    )
    assert choose_depths([(0.9, 4)] * 2, 2, 64, 2.0, linear) == ([0, 0], 1.0)


def test_the_likeliest_drafts_come_first() -> None:
    depths, _ = choose_depths([(0.3, 6), (0.9, 6)], 2, 6, 1.0, flat)
    assert depths == [0, 4]


def test_a_dear_proposer_is_asked_for_less() -> None:
    def seconds(per_draft: float) -> list[int]:
        return choose_depths([(0.8, 8)], 1, 64, 1.0, lambda tokens, depth: 1.0 + per_draft * depth)[0]

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


def test_costs_are_known_where_something_near_was_measured() -> None:
    costs = StepCosts()
    costs.observe(4, 1.0)
    assert [size for size in range(1, 17) if costs.knows(size)] == [2, 3, 4]
    costs.observe(16, 2.0)
    assert [size for size in range(1, 33) if costs.knows(size)] == list(range(2, 17))
    assert costs.largest == 16
    assert costs.estimate(28) == pytest.approx(3.0), "as the last two went"


def test_sizes_never_seen_are_entered_in_small_strides() -> None:
    """Where every token costs as much as a step, the first draft must not be six tokens long."""
    machine = _Machine(0.9, 0.9, overlap=False, base=0.0, slope=1.0)
    seen: list[int] = []
    observe = machine.speculation.plain.observe
    machine.speculation.plain.observe = lambda tokens, seconds: (seen.append(tokens), observe(tokens, seconds))  # type: ignore[assignment,func-returns-value]
    machine.steps(60, sequences=1)
    assert max(seen) == 2 and seen.count(2) < 5


def test_acceptance_starts_from_others_and_follows_its_own() -> None:
    everyone = Acceptance(0.5, decay=0.99)
    for _ in range(50):
        everyone.observe(0, 1)
    fresh = Acceptance(everyone, decay=0.9)
    assert fresh.chance < 0.1
    for _ in range(30):
        fresh.observe(4, 4)
    assert fresh.chance > 0.9


class _FixedProposer:
    """Always has draft tokens, and claims that they are accepted with the given chance."""

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

    def forget_caches(self) -> None:
        pass


class _Machine:
    """Steps on a clock of its own: `base + slope * tokens` seconds each; `true`: the real acceptance rate."""

    def __init__(self, claimed: float, true: float, *, overlap: bool, base: float = 1.0, slope: float) -> None:
        self.now = 0.0
        self.true, self.base, self.slope = true, base, slope
        self.rng = random.Random(0)
        self.speculation = Speculation(
            _FixedProposer(claimed), depth=4, most_tokens=64, overlap=overlap, clock=lambda: self.now
        )
        self.overlap = overlap
        self.ahead = False
        """The step before this one was launched ahead of its predecessor, or could have been."""

    def steps(self, count: int, sequences: int = 4) -> tuple[int, float]:
        """How many verified draft tokens, and how much faster tokens came than without."""
        decoding = [
            Sequence(Request(f"r{i}", [1], SamplingParams(max_tokens=9999)), 0.0, (0.0, i)) for i in range(sequences)
        ]
        verifying, tokens, begin = 0, 0, self.now
        for _ in range(count):
            speculation = self.speculation
            drafts: dict[Sequence, list[int]] = {}
            waits = not (self.overlap and self.ahead) or bool(speculation.plan(decoding))
            if waits:
                drafts = speculation.propose(decoding)
            chunks = [Chunk(s, 0, 1 + len(drafts.get(s, ())), True, tuple(drafts.get(s, ()))) for s in decoding]
            batch = Batch.of(chunks)
            bubble = 0.2 if self.overlap and waits else 0.0
            self.now += bubble + self.base + self.slope * batch.num_tokens
            for chunk in chunks:
                held = next((i for i in range(len(chunk.drafts)) if self.rng.random() >= self.true), len(chunk.drafts))
                tokens += 1 + held
                speculation.learn(chunk, [0] * (1 + held))
            speculation.step_done(batch)
            self.ahead = not batch.speculative
            verifying += batch.speculative
        plain_s = tokens / sequences * (self.base + self.slope * sequences)
        return verifying, plain_s / (self.now - begin)


def test_it_switches_itself_off_and_tries_again_rarely() -> None:
    """Arithmetic-bound steps: nothing pays, so nearly all steps are plain; then they become cheap, and it is back."""
    machine = _Machine(0.6, 0.6, overlap=False, slope=1.0)
    machine.steps(100)
    assert machine.steps(1000)[0] < 20
    machine.slope = 0.01
    assert machine.steps(1500)[0] > 500


@pytest.mark.parametrize("overlap", [False, True])
def test_good_drafts_in_cheap_steps_keep_what_they_promise(overlap: bool) -> None:
    machine = _Machine(0.9, 0.9, overlap=overlap, slope=0.01)
    machine.steps(50)
    verifying, gain = machine.steps(2000)
    assert verifying > 1900 and gain > 2.5


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("slope", [0.01, 0.5])
def test_drafts_that_are_never_accepted_cost_next_to_nothing_whatever_was_said_of_them(
    overlap: bool, slope: float
) -> None:
    """By its own account the proposer is nearly always right; the clock says otherwise."""
    machine = _Machine(0.9, 0.0, overlap=overlap, slope=slope)
    machine.steps(200)
    _, gain = machine.steps(2000)
    assert gain > 0.98
    machine.true = 0.9
    machine.steps(2500)
    _, gain = machine.steps(1000)
    assert gain > (2.0 if slope < 0.1 else 0.98)


def test_what_there_is_to_beat_is_measured_now_and_then() -> None:
    """Plain steps were dear when they were last seen; now that they are not, speculation must notice."""
    machine = _Machine(0.3, 0.3, overlap=True, base=0.2, slope=0.02)
    machine.speculation.plain.observe(4, 1.0)
    assert machine.steps(400)[0] > 380
    machine.steps(400)
    verifying, gain = machine.steps(1000)
    assert verifying < 100 and gain > 0.97


def test_a_wait_for_drafts_that_are_gone_by_then_is_charged_to_speculation() -> None:
    machine = _Machine(0.9, 0.9, overlap=True, slope=0.01)
    proposer = machine.speculation.proposer
    machine.steps(10)
    proposer.propose = lambda depths: {}  # type: ignore[method-assign]
    machine.steps(200)
    assert machine.steps(2000)[1] > 0.98


def test_a_proposer_that_reads_a_prompt_first_is_not_switched_off_for_it() -> None:
    machine = _Machine(0.9, 0.9, overlap=False, slope=0.01)
    machine.steps(5)
    proposer = machine.speculation.proposer
    propose = proposer.propose

    def reads(depths: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        machine.now += 50.0
        proposer.propose = propose  # type: ignore[method-assign]
        return propose(depths)

    proposer.propose = reads  # type: ignore[method-assign]
    verifying, _ = machine.steps(50)
    assert verifying == 50


def test_a_full_batch_is_left_alone() -> None:
    speculation = Speculation(_FixedProposer(0.9), depth=4, most_tokens=4, overlap=False, clock=lambda: 0.0)
    speculation.plain.observe(3, 1.0)
    sequences = [Sequence(Request(f"r{i}", [1], SamplingParams(max_tokens=99)), 0.0, (0.0, i)) for i in range(4)]
    assert speculation.propose(sequences) == {}
    assert speculation.propose(sequences[:3]) != {}


def test_a_text_that_repeats_itself_is_drafted_from_itself(tmp_path: Path) -> None:
    """A tiny random model with small weights comes back to the same phrases, in changing order."""
    folder = write_checkpoint("llama-gqa", tmp_path, spread=0.3)
    engine = eager_engine(folder, speculation_depth=4)
    request = greedy("a", [3, 1, 4, 1, 5], 200)
    text = generate(engine, request)["a"]
    load = engine.load_snapshot()
    assert text == generate(make_engine(folder), request)["a"]
    assert 50 < load.accepted_tokens < load.draft_tokens and engine.steps < 150
