"""Thoughts in the engine: a budget closes them, a grammar begins behind them, and neither depends on how the sequence
is run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher

from penstock.engine.core import Engine
from penstock.engine.grammar.interface import words_for
from penstock.engine.grammar.thought import NEVER, ThoughtState
from penstock.engine.request import Request, SamplingParams, Thought
from tests.engine.grammar.test_constraints import load
from tests.engine.grammar.tokens import END, VOCAB, compiler, encode, text_of
from tests.engine.harness import assert_idle, drain, generate, greedy
from tests.engine.speculative.forced import Oracle, eager_engine
from tests.engine.tiny import write_checkpoint

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
CLOSE = (190, 10)
DIGITS = LLMatcher.grammar_from_regex("[0-9]{3}!")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("thought"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return load(checkpoint)


def test_a_budget_closes_the_thought_and_the_answer_goes_on(engine: Engine) -> None:
    free = generate(engine, greedy("free", PROMPT, 20))["free"]
    assert 190 not in free
    thought = Thought(end=((190,),), close=CLOSE, budget=6)
    found = generate(engine, greedy("a", PROMPT, 20, thought=thought), greedy("b", PROMPT, 20))
    assert found["b"] == free, "others are not touched"
    assert found["a"][:6] == free[:6] and tuple(found["a"][6:8]) == CLOSE and len(found["a"]) == 20
    # What follows is what the model says behind these very tokens.
    assert found["a"][8:] == generate(engine, greedy("c", [*PROMPT, *found["a"][:8]], 12))["c"]
    # A thought that ends by itself is left alone.
    early = Thought(end=(tuple(free[3:5]),), close=CLOSE, budget=6)
    assert generate(engine, greedy("d", PROMPT, 20, thought=early))["d"] == free
    # So is an answer without one; one that begins with it is counted from there.
    none = Thought(end=((190,),), begin=((191,), (free[0], 191)), close=CLOSE, budget=0)
    assert generate(engine, greedy("e", PROMPT, 20, thought=none))["e"] == free
    begun = dataclasses.replace(none, begin=(tuple(free[:2]),))
    assert tuple(generate(engine, greedy("f", PROMPT, 20, thought=begun))["f"][:4]) == (*free[:2], *CLOSE)
    zero = Thought(end=((190,),), close=CLOSE, budget=0)
    assert tuple(generate(engine, greedy("g", PROMPT, 20, thought=zero))["g"][:2]) == CLOSE
    assert_idle(engine)


def test_the_grammar_begins_behind_the_thought(engine: Engine) -> None:
    free = generate(engine, greedy("free", PROMPT, 20))["free"]
    end = tuple(free[4:6])
    params = {"grammar": DIGITS, "stop_token_ids": (END, free[2])}
    said = generate(engine, greedy("a", PROMPT, 30, thought=Thought(end=(end,)), **params))["a"]
    assert free[2] not in said, "a thought cannot end the answer that a grammar waits for"
    cut = greedy("b", PROMPT, 30, grammar=DIGITS, stop_token_ids=(END,), thought=Thought(end=(end,), after=(191,)))
    said = generate(engine, cut)["b"]
    assert said[:6] == free[:6] and said[6] == 191 and re.fullmatch("[0-9]{3}!", text_of(said[7:]))
    closed = Thought(end=((190,),), opening=(192,), after=(191,), close=(190,), budget=5)
    said = generate(engine, greedy("c", PROMPT, 30, grammar=DIGITS, stop_token_ids=(END,), thought=closed))["c"]
    assert said[0] == 192 and said[6:8] == [190, 191] and re.fullmatch("[0-9]{3}!", text_of(said[8:]))
    rules = Thought(end=((190,),), close=(190,), budget=5)
    banned = {"bad_words": (tuple(encode("7")), (free[0],)), "stop_token_ids": (END,)}
    said = generate(engine, greedy("d", PROMPT, 30, grammar=DIGITS, thought=rules, **banned))["d"]
    assert free[0] not in said and "7" not in text_of(said[6:]) and re.fullmatch("[0-9]{3}!", text_of(said[6:]))
    assert_idle(engine)


def test_an_answer_with_a_grammar_may_begin_with_a_thought_or_not(engine: Engine) -> None:
    thought = Thought(end=((190,),), begin=((191, 192),), close=(190,), budget=3)
    for bias, begins in ((-100.0, False), (100.0, True)):
        request = greedy(
            "a", PROMPT, 30, grammar=DIGITS, thought=thought, stop_token_ids=(END,), logit_bias={191: bias}
        )
        said = generate(engine, request)["a"]
        assert (said[:2] == [191, 192] and said[5] == 190) == begins, said
        assert re.fullmatch("[0-9]{3}!", text_of(said[6:] if begins else said))
    assert_idle(engine)


@pytest.mark.parametrize("grammar", ["", DIGITS])
def test_preemption_speculation_overlap_and_continuation_change_nothing(checkpoint: Path, grammar: str) -> None:
    thought = Thought(end=((190,), (7, 7)), close=CLOSE, budget=11)
    params = SamplingParams(max_tokens=24, seed=3, grammar=grammar, thought=thought, stop_token_ids=(END,))
    request = Request("a", PROMPT, params)
    plain = generate(load(checkpoint), request)["a"]
    assert tuple(plain[11:13]) == CLOSE
    for produced in (0, 5, 11, 12, 13, 14):
        moved = generate(load(checkpoint), Request("b", PROMPT, params, produced=plain[:produced]))["b"]
        assert moved == plain[produced:]
    overlapped = load(checkpoint)
    overlapped._depth = 1
    assert generate(overlapped, request)["a"] == plain
    for wrong in (0.0, 0.4):
        fast = eager_engine(checkpoint, lambda _, wrong=wrong: Oracle({"a": plain}, wrong, VOCAB), grammars=compiler)
        assert generate(fast, request)["a"] == plain
        assert fast.load_snapshot().accepted_tokens > 0 or wrong, "thoughts are speculated on"
    small = load(checkpoint, num_blocks=6, max_model_len=64)
    found = generate(small, request, *(greedy(f"x{i}", PROMPT, 30) for i in range(3)))
    assert small.load_snapshot().preemptions > 0 and found["a"] == plain


def test_a_grammar_may_describe_the_thought_too(checkpoint: Path) -> None:
    grammar = LLMatcher.grammar_from_regex("[a-z]*=[0-9]{3}!")
    end = tuple(encode("="))
    thought = Thought(end=(end,), close=end, budget=5, within=True)
    for more in ({}, {"bad_words": (tuple(encode("7")),)}):
        params = SamplingParams(max_tokens=40, seed=3, grammar=grammar, thought=thought, stop_token_ids=(END,), **more)
        plain = generate(load(checkpoint), Request("a", PROMPT, params))["a"]
        assert re.fullmatch("[a-z]*=[0-9]{3}!", text_of(plain)) and plain.index(end[0]) <= 5
        for produced in (2, plain.index(end[0]) + 1):
            moved = generate(load(checkpoint), Request("b", PROMPT, params, produced=plain[:produced]))["b"]
            assert moved == plain[produced:]


def test_penalties_count_what_was_said_in_a_thought(checkpoint: Path) -> None:
    params = SamplingParams(
        *(24, 0, 0.0),
        presence_penalty=1.5,
        repetition_penalty=1.3,
        thought=Thought(end=((190,),), close=CLOSE, budget=6),
    )
    plain = generate(load(checkpoint), Request("a", PROMPT, params))["a"]
    for produced in (3, 8, 12):
        moved = generate(load(checkpoint), Request("b", PROMPT, params, produced=plain[:produced]))["b"]
        assert moved == plain[produced:]


def test_penalties_count_the_token_that_is_under_way_when_a_thought_ends(checkpoint: Path) -> None:
    """With overlap it has been sampled, but the host does not know it yet."""
    alone, overlapped = load(checkpoint), load(checkpoint)
    overlapped._depth = 1
    params = SamplingParams(
        max_tokens=40, temperature=0.0, presence_penalty=1.5, logit_bias=dict.fromkeys(range(12), 60.0)
    )
    said = generate(alone, Request("a", PROMPT, params))["a"]
    for end in said[2:8]:
        ended = dataclasses.replace(params, thought=Thought(end=((end,),), close=CLOSE, budget=30))
        assert generate(alone, Request("b", PROMPT, ended))["b"] == said, "it ends by itself"
        assert generate(overlapped, Request("b", PROMPT, ended))["b"] == said


def test_what_a_state_holds_and_allows() -> None:
    state = ThoughtState(Thought(end=((9,),), close=(9,), budget=4), None, None)
    assert state.matcher is None and state.hold(100) == 104 and not state.awaited
    assert state.allowed([1, 2, 9, 4, 5]) == [1, 2, 9]
    state.accept(1)
    state.accept(9)
    assert state.over and state.matcher is None and state.hold(102) == NEVER
    state = ThoughtState(Thought(end=((9,),), close=(9,), budget=1), None, None)
    assert state.allowed([1]) == []
    state.accept(1)
    assert state.matcher is state
    mask = np.full(words_for(VOCAB), -1, np.int32)
    state.restrict(mask)
    assert [t for t in range(VOCAB) if mask.view(np.uint32)[t // 32] >> np.uint32(t % 32) & np.uint32(1)] == [9]
    state.accept(9)
    assert state.over


def test_tokens_that_do_not_exist_are_refused(engine: Engine) -> None:
    engine.submit(greedy("far", PROMPT, 4, thought=Thought(end=((100_000,),))))
    (refused,) = drain(engine)
    assert refused.error is not None and "token ids must be" in refused.error
