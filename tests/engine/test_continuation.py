"""A request whose first tokens another engine generated goes on as if it had never moved (R-RT-7)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from llguidance import LLMatcher

from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.request import Delta, Request, SamplingParams
from tests.engine.grammar.tokens import END, VOCAB, compiler
from tests.engine.harness import assert_idle, drain
from tests.engine.tiny import write_checkpoint

COUNT = 24


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    checkpoint = write_checkpoint("llama-gqa", tmp_path_factory.mktemp("continued"), spread=0.6)
    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", threads=1, num_blocks=64, token_budget=64
    )
    return Engine.load(config, grammars=compiler)


def prompt(length: int = 30) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(VOCAB) for _ in range(length)]


CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=7),
    "penalized": SamplingParams(
        seed=3, presence_penalty=1.0, frequency_penalty=0.7, repetition_penalty=1.3, temperature=0.8
    ),
    "at least so long": SamplingParams(seed=5, min_tokens=20, stop_token_ids=tuple(range(0, VOCAB, 3))),
    "in a grammar": SamplingParams(
        seed=9, grammar=LLMatcher.grammar_from_regex("([a-f]{3}-)*[0-9]{9}[x-z]{40}"), stop_token_ids=(END,)
    ),
    "with probabilities": SamplingParams(temperature=0.0, logprobs=2),
}


def run(engine: Engine, request: Request) -> tuple[list[int], list[Delta]]:
    engine.submit(request)
    deltas = drain(engine)
    assert_idle(engine)
    return [token for delta in deltas for token in delta.tokens], deltas


@pytest.mark.parametrize("case", CASES)
def test_wherever_it_is_cut_the_rest_is_the_same(engine: Engine, case: str) -> None:
    request = Request(case, prompt(), replace(CASES[case], max_tokens=COUNT))
    whole, deltas = run(engine, request)
    assert len(whole) > 3
    for cut in {1, 2, len(whole) // 2, len(whole) - 1}:
        rest, continued = run(engine, replace(request, produced=whole[:cut]))
        assert whole[:cut] + rest == whole
        assert continued[-1].finish_reason == deltas[-1].finish_reason
        if case == "with probabilities":
            before, after = ([s.logprob for d in ds for s in d.logprobs or ()] for ds in (deltas, continued))
            assert after == pytest.approx(before[cut:], abs=1e-4)


def test_what_cannot_go_on_is_refused(engine: Engine) -> None:
    params = SamplingParams(max_tokens=4)
    for produced, says in (([1, 2, 3, 4], "nothing to generate"), ([VOCAB + 5], "token ids must be between")):
        _, deltas = run(engine, Request("bad", prompt(), params, produced=produced))
        assert says in (deltas[-1].error or "")
    strict = SamplingParams(max_tokens=9, grammar=LLMatcher.grammar_from_regex("[0-9]{20}"), stop_token_ids=(END,))
    _, deltas = run(engine, Request("off", prompt(), strict, produced=[END + 1 if END + 1 < VOCAB else 0, 1]))
    assert deltas[-1].finish_reason == "error"
