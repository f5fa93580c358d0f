"""Grammars in the engine: what comes out follows the grammar, whatever else happens to the sequence."""

from __future__ import annotations

import random
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from penstock.engine.backends import cpu
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.grammar.constraints import MakeCompiler, without
from penstock.engine.grammar.guidance import GuidanceCompiler, GuidanceMatcher
from penstock.engine.grammar.interface import Interruptible, TokenMatcher, words_for
from penstock.engine.request import GRAMMAR_REFUSED, Delta, Request, SamplingParams
from tests.engine.grammar.tokens import END, VOCAB, VOCABULARY, compiler, encode, text_of
from tests.engine.harness import assert_idle, collect, drain, generate, greedy
from tests.engine.speculative.forced import Oracle, eager_engine
from tests.engine.tiny import Reference, write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("grammar"))


def load(checkpoint: Path, make: MakeCompiler | None = compiler, **settings: Any) -> Engine:
    settings = {"device": "cpu", "dtype": "float32", "threads": 1, "num_blocks": 64, "token_budget": 64, **settings}
    return Engine.load(EngineConfig(model=str(checkpoint), **settings), grammars=make)


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Engine:
    return load(checkpoint)


@pytest.fixture
def engine(shared: Engine) -> Engine:
    assert_idle(shared)
    return shared


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def regex(name: str, pattern: str, count: int = 60, length: int = 20, **params: Any) -> Request:
    params = {"temperature": 1.0, "stop_token_ids": (END,), **params}
    grammar = LLMatcher.grammar_from_regex(pattern)
    return Request(name, prompt(length, len(name)), SamplingParams(max_tokens=count, grammar=grammar, **params))


def endings(deltas: list[Delta]) -> dict[str, str]:
    return {delta.request_id: delta.finish_reason for delta in deltas if delta.finish_reason is not None}


DATE = r"(19|20)\d\d-(0[1-9]|1[0-2])-[0-3]\d( and (19|20)\d\d){0,3}!"


def test_random_text_follows_the_grammar_and_ends_with_it(engine: Engine) -> None:
    for seed in range(8):
        engine.submit(regex(f"r{seed}", DATE, seed=seed, temperature=2.0 if seed else 0.0))
    deltas = drain(engine)
    for name, tokens in collect(deltas).items():
        assert re.fullmatch(DATE, text_of(tokens)), name
    assert set(endings(deltas).values()) == {"complete"}
    assert len({text_of(tokens) for tokens in collect(deltas).values()}) > 2
    assert_idle(engine)


def test_the_end_token_ends_what_could_go_on(engine: Engine) -> None:
    bias = {END: 100.0}
    engine.submit(regex("a", "[a-c]+", logit_bias=bias))
    engine.submit(regex("ignored", "[a-c]+", logit_bias=bias, stop_token_ids=()))
    engine.submit(regex("long", "[a-c]+", count=7, logit_bias={END: -100.0}))
    deltas = drain(engine)
    found = collect(deltas)
    assert re.fullmatch("[a-c]", text_of(found["a"])) or text_of(found["a"]) in ("ab", "abc")
    assert found["a"][-1] == END
    # With nothing to stop at, the grammar's end is still an end.
    assert found["ignored"][-1] == END
    assert endings(deltas) == {"a": "stop", "ignored": "complete", "long": "length"}


def test_neighbours_without_a_grammar_are_not_touched(engine: Engine) -> None:
    free = [greedy(f"free{i}", prompt(9 + i, i), 20) for i in range(3)]
    alone = generate(engine, *free)
    mixed = generate(engine, free[0], regex("a", DATE, seed=1), free[1], regex("b", "[xyz]{5,9}", seed=2), free[2])
    assert {name: mixed[name] for name in alone} == alone
    assert re.fullmatch(DATE, text_of(mixed["a"])) and re.fullmatch("[xyz]{5,9}", text_of(mixed["b"]).rstrip())


def test_a_seed_gives_the_same_text_in_any_batch(engine: Engine) -> None:
    alone = generate(engine, regex("a", DATE, seed=5, top_p=0.9))["a"]
    crowd = [regex(f"c{i}", "[0-9]{30}", seed=i) for i in range(4)]
    assert generate(engine, *crowd, regex("a", DATE, seed=5, top_p=0.9))["a"] == alone


def test_steps_launched_ahead_give_the_same_text(checkpoint: Path, engine: Engine) -> None:
    """As on a GPU: a step is launched before the previous one was seen; only those with a grammar wait for it."""
    requests = [regex("a", DATE, seed=3), greedy("free", prompt(9), 25), regex("b", "[xyz]{5,9}", seed=4)]
    plain = generate(engine, *requests)
    ahead = load(checkpoint)
    ahead._depth = 1
    assert generate(ahead, *requests) == plain
    assert_idle(ahead)


def test_those_without_a_grammar_go_on_with_draft_tokens(checkpoint: Path, engine: Engine) -> None:
    requests = [regex("a", DATE, seed=3), greedy("free", prompt(9), 25), regex("b", "[xyz]{5,9}", seed=4)]
    plain = generate(engine, *requests)
    speculating = eager_engine(checkpoint, lambda _: Oracle(plain, 0.3, VOCAB), num_blocks=64, grammars=compiler)
    assert generate(speculating, *requests) == plain
    assert speculating.load_snapshot().accepted_tokens > 0
    assert_idle(speculating)


def test_preemption_does_not_lose_the_place(checkpoint: Path, engine: Engine) -> None:
    requests = [regex(f"r{i}", "([0-9]{3} ){20}!", count=100, length=18, seed=i) for i in range(4)]
    plain = generate(engine, *requests)
    small = load(checkpoint, num_blocks=16)
    assert generate(small, *requests) == plain
    assert small.load_snapshot().preemptions > 0
    assert_idle(small)


def test_a_minimum_length_yields_to_the_grammar(engine: Engine) -> None:
    wants_end = {"logit_bias": {END: 100.0}, "min_tokens": 6}
    found = generate(engine, regex("open", "[x-z]+", **wants_end), regex("closed", "xyz", **wants_end))
    assert len(found["open"]) == 7 and found["open"][-1] == END
    assert text_of(found["closed"]) == "xyz"
    # A stop token of the caller's own, the only one the grammar allows here.
    (stop,) = encode("y")
    forced = generate(engine, regex("forced", "xyz", min_tokens=6, stop_token_ids=(stop,)))["forced"]
    assert text_of(forced) == "xy"


def test_logprobs_are_the_models_own(checkpoint: Path, engine: Engine) -> None:
    engine.submit(regex("a", "[0-9]{4}", temperature=0.0, logprobs=2))
    deltas = drain(engine)
    tokens = collect(deltas)["a"]
    start = prompt(20, 1)
    truth = Reference(checkpoint).logprobs(start + tokens)
    for index, delta in enumerate(deltas):
        assert delta.logprobs is not None
        row = truth[len(start) + index - 1]
        assert delta.logprobs[0].logprob == pytest.approx(float(row[tokens[index]]), abs=2e-3)
        assert delta.logprobs[0].top_ids == row.topk(2).indices.tolist()


def test_a_bad_grammar_fails_alone(engine: Engine) -> None:
    bad = Request("bad", [1, 2], SamplingParams(grammar="start: nonsense"))
    engine.submit(bad)
    engine.submit(greedy("good", prompt(5), 3))
    deltas = drain(engine)
    assert endings(deltas) == {"bad": "error", "good": "length"}
    (error,) = [delta.error for delta in deltas if delta.error]
    assert error.startswith(GRAMMAR_REFUSED) and "nonsense" in error
    assert_idle(engine)


def test_an_engine_without_a_compiler_refuses(checkpoint: Path) -> None:
    engine = load(checkpoint, make=None)
    engine.submit(regex("a", "x"))
    (delta,) = drain(engine)
    assert delta.error is not None and "without grammar support" in delta.error


class Breaking(GuidanceCompiler):
    """Loses its way after a few masks, for one grammar."""

    class Matcher(GuidanceMatcher):
        left = 5

        def look(self) -> None:
            super().look()
            self.left -= 1
            if not self.left:
                self._why = "too complex"

    def compile(self, grammar: str, interruptible: Interruptible | None = None) -> GuidanceMatcher:
        matcher = super().compile(grammar)
        return self.Matcher(matcher.raw, self._ends) if "x{50}" in grammar else matcher

    def copy(self, matcher: TokenMatcher) -> GuidanceMatcher:
        fresh = super().copy(matcher)
        return self.Matcher(fresh.raw, self._ends) if isinstance(matcher, self.Matcher) else fresh


def test_a_matcher_that_breaks_fails_its_request_alone(checkpoint: Path) -> None:
    engine = load(checkpoint, make=lambda size: Breaking(VOCABULARY, size))
    engine.submit(regex("broken", "x{50}"))
    engine.submit(regex("good", "[0-9]{9}"))
    deltas = drain(engine)
    assert endings(deltas) == {"broken": "error", "good": "complete"}
    assert len(collect(deltas)["broken"]) == 2  # it looks after every mask and after every token
    assert_idle(engine)


class Slow(GuidanceCompiler):
    gate = threading.Event()

    def compile(self, grammar: str, interruptible: Interruptible | None = None) -> Any:
        assert self.gate.wait(200)
        return super().compile(grammar)


def test_a_grammar_being_compiled_delays_no_other_request(checkpoint: Path) -> None:
    engine = load(checkpoint, make=lambda size: Slow(VOCABULARY, size), max_waiting=3)
    Slow.gate.clear()
    engine.submit(regex("slow", "[0-9]{3}"))
    engine.submit(regex("gone", "[0-9]{4}"))
    assert engine.load_snapshot().waiting == 2
    engine.submit(greedy("free", prompt(5), 4))
    deltas: list[Delta] = []
    while "free" not in endings(deltas):
        output = engine.step()
        deltas += output.deltas if output else []
    engine.submit(regex("slow", "x"))
    engine.abort("gone")
    engine.abort("gone")
    output = engine.step()
    assert output is not None
    assert endings(output.deltas) == {"gone": "abort", "slow": "error"}
    Slow.gate.set()
    done = drain(engine)
    assert endings(done) == {"slow": "complete"}
    assert re.fullmatch("[0-9]{3}", text_of(collect(done)["slow"]))


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("vocab", [5, 32, 77, 3001])
def test_masks_on_logits(name: str, vocab: int) -> None:
    found = cpu.load(1) if name == "cpu" else ReferenceOps()
    if found is None:
        pytest.skip("no C++ compiler")
    rng = np.random.default_rng(0)
    bits = rng.integers(-(2**31), 2**31, (3, words_for(vocab)), dtype=np.int64).astype(np.int32)
    bits[1, 0], bits[0, -1] = 0, -1
    logits = torch.randn(5, vocab)
    before = logits.clone()
    found.mask_logits(logits, torch.tensor([4, 0, 2]), torch.from_numpy(bits))
    for row, at in enumerate([4, 0, 2]):
        allowed = [(int(bits[row, token // 32]) >> (token % 32)) & 1 for token in range(vocab)]
        want = torch.where(torch.tensor(allowed) == 1, before[at], float("-inf"))
        assert torch.equal(logits[at], want)
    assert torch.equal(logits[[1, 3]], before[[1, 3]])


def test_taking_tokens_out_of_a_mask() -> None:
    mask = np.array([0b1011, -(2**31)], np.int32)
    assert without(mask, (0, 63)).tolist() == [0b1010, 0]
    assert without(mask, (0, 1, 3, 63)).tolist() == mask.tolist()
