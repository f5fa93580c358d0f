"""Allowed tokens and forbidden words: whatever else happens to the sequence, the output keeps to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher

from penstock.engine.core import Engine
from penstock.engine.grammar.interface import words_for
from penstock.engine.grammar.token_rules import TokenRules
from penstock.engine.request import GRAMMAR_REFUSED, Request, SamplingParams
from tests.engine.grammar.test_constraints import load
from tests.engine.grammar.tokens import END, VOCAB, encode, text_of
from tests.engine.harness import assert_idle, drain, generate, greedy
from tests.engine.speculative.forced import eager_engine
from tests.engine.tiny import write_checkpoint

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
Words = tuple[tuple[int, ...], ...]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(write_checkpoint("llama-gqa", tmp_path_factory.mktemp("rules")))


def mask_of(params: SamplingParams, taken: list[int]) -> list[int]:
    rules = TokenRules(params, VOCAB)
    for token in taken:
        rules.accept(token)
    mask = np.full(words_for(VOCAB), -1, np.int32)
    rules.restrict(mask)
    return [t for t in range(VOCAB) if mask.view(np.uint32)[t // 32] >> np.uint32(t % 32) & np.uint32(1)]


EVERY = list(range(VOCAB))
CASES: list[tuple[tuple[int, ...], Words, list[int], list[int]]] = [
    # allowed, bad words, output so far, what may follow
    ((3, 31, 32, 198), (), [], [3, 31, 32, 198]),
    ((), ((7,), (0,)), [], [t for t in EVERY if t not in (0, 7)]),
    ((3, 7), ((7,),), [1, 2], [3]),
    ((), ((5, 6),), [], EVERY),
    ((), ((5, 6),), [1, 5], [t for t in EVERY if t != 6]),
    ((), ((5, 6),), [5, 1], EVERY),
    ((), ((5, 6, 7), (6, 8)), [4, 5, 6], [t for t in EVERY if t not in (7, 8)]),
    ((), ((5, 5, 5),), [5], EVERY),
    ((), ((5, 5, 5),), [5, 5], [t for t in EVERY if t != 5]),
]


@pytest.mark.parametrize(("allowed", "words", "taken", "expected"), CASES)
def test_what_may_follow(allowed: tuple[int, ...], words: Words, taken: list[int], expected: list[int]) -> None:
    assert mask_of(SamplingParams(allowed_token_ids=allowed, bad_words=words), taken) == expected


def test_only_allowed_tokens_are_generated_greedily_and_sampled(engine: Engine) -> None:
    allowed = (17, 64, 65, 130)
    requests = [
        greedy("g", PROMPT, 12, allowed_token_ids=allowed),
        Request("s", PROMPT, SamplingParams(max_tokens=12, seed=5, top_p=0.9, allowed_token_ids=allowed)),
        greedy("free", PROMPT, 12),
    ]
    found = generate(engine, *requests)
    assert set(found["g"]) <= set(allowed) and set(found["s"]) <= set(allowed)
    assert found["free"] == generate(engine, greedy("alone", PROMPT, 12))["alone"], "others are not touched"
    assert_idle(engine)


def test_a_forbidden_word_is_avoided_and_everything_before_it_is_as_it_was(engine: Engine) -> None:
    free = generate(engine, greedy("free", PROMPT, 12))["free"]
    for first, length in ((0, 1), (3, 2), (5, 3)):
        word = tuple(free[first : first + length])
        kept = generate(engine, greedy("r", PROMPT, 12, bad_words=(word,)))["r"]
        assert not any(tuple(kept[i : i + length]) == word for i in range(len(kept))), (word, kept)
        # Where the word would have been completed for the first time, another token comes.
        ends = [i + length for i in range(12) if tuple(free[i : i + length]) == word]
        assert kept[: ends[0] - 1] == free[: ends[0] - 1] and kept[ends[0] - 1] != word[-1]


def test_preemption_speculation_and_continuation_change_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    params = SamplingParams(max_tokens=16, seed=3, bad_words=((7,), (12, 30)), allowed_token_ids=tuple(range(60)))
    request = Request("a", PROMPT, params)
    plain = generate(load(folder), request)["a"]
    moved = generate(load(folder), Request("b", PROMPT, params, produced=plain[:5]))["b"]
    assert moved == plain[5:]
    assert generate(eager_engine(folder), request)["a"] == plain, "speculation"
    overlapped = load(folder)
    overlapped._depth = 1
    assert generate(overlapped, request)["a"] == plain
    small = load(folder, num_blocks=6, max_model_len=64)
    found = generate(small, request, *(greedy(f"x{i}", PROMPT, 30) for i in range(3)))
    assert small.load_snapshot().preemptions > 0 and found["a"] == plain


def test_rules_and_a_grammar_together(engine: Engine) -> None:
    grammar = LLMatcher.grammar_from_regex("(the |ab|a|b|1|0)+x")
    params = SamplingParams(
        max_tokens=20, seed=1, grammar=grammar, stop_token_ids=(END,), bad_words=((encode("a")[0],), (128,), (129,))
    )
    text = text_of(generate(engine, Request("g", PROMPT, params))["g"])
    assert "a" not in text and set(text) <= set("the b10x")


def test_rules_that_leave_nothing_fail_the_request_alone(engine: Engine) -> None:
    engine.submit(greedy("bad", PROMPT, 4, allowed_token_ids=(5,), bad_words=((5,),)))
    engine.submit(greedy("good", PROMPT, 4))
    deltas = drain(engine)
    (failed,) = [delta for delta in deltas if delta.request_id == "bad"]
    assert failed.finish_reason == "error" and failed.error is not None and failed.error.startswith(GRAMMAR_REFUSED)
    assert sum(len(delta.tokens) for delta in deltas if delta.request_id == "good") == 4
    engine.submit(greedy("far", PROMPT, 4, allowed_token_ids=(100_000,)))
    (refused,) = drain(engine)
    assert refused.error is not None and "token ids must be" in refused.error
