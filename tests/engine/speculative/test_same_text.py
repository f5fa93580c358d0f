"""Speculation changes when tokens come, never which: every interaction against the engine without it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.batch import Batch
from penstock.engine.core import Engine
from penstock.engine.request import Delta, Request, SamplingParams
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine
from tests.engine.speculative.forced import Oracle, eager_engine
from tests.engine.tiny import write_checkpoint

VOCAB = 199


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("speculative"))


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Engine:
    return make_engine(checkpoint, num_blocks=400)


def run(engine: Engine, requests: list[Request]) -> dict[str, Delta]:
    """Each request's deltas joined into one."""
    for request in requests:
        engine.submit(request)
    joined: dict[str, Delta] = {}
    for delta in drain(engine):
        whole = joined.setdefault(delta.request_id, Delta(delta.request_id))
        assert whole.finish_reason is None, "a delta after the last one"
        whole.tokens += delta.tokens
        whole.finish_reason, whole.error = delta.finish_reason, delta.error
        if delta.logprobs is not None:
            assert len(delta.logprobs) == len(delta.tokens)
            whole.logprobs = (whole.logprobs or []) + delta.logprobs
    return joined


def any_params(rng: random.Random) -> SamplingParams:
    values: dict[str, Any] = {"max_tokens": rng.choice((1, 7, 40, 60, 60)), "seed": rng.randrange(1 << 40)}
    values["temperature"] = rng.choice((0.0, 0.0, 0.7, 1.0))
    if rng.random() < 0.3:
        values |= {"top_k": rng.choice((3, 20)), "top_p": 0.9, "min_p": rng.choice((0.0, 0.05))}
    if rng.random() < 0.4:
        values |= {"presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": rng.choice((1.0, 1.3))}
    if rng.random() < 0.3:
        values["logit_bias"] = {rng.randrange(VOCAB): 4.0, rng.randrange(VOCAB): -4.0}
    if rng.random() < 0.4:
        values["stop_token_ids"] = tuple(rng.sample(range(VOCAB), 6))
        values["min_tokens"] = rng.choice((0, 5, 20))
    if rng.random() < 0.4:
        values["logprobs"] = rng.choice((0, 2))
    return SamplingParams(**values)


def any_requests(seed: int, count: int = 12) -> list[Request]:
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(48)]
    requests = []
    for index in range(count):
        tail = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
        prompt = (shared if rng.random() < 0.5 else []) + tail
        requests.append(Request(f"r{index}", prompt, any_params(rng), speculation=rng.random() < 0.85))
    return requests


@pytest.mark.parametrize("seed", [0, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_any_mix_of_requests_gets_the_same_answers(checkpoint: Path, plain: Engine, seed: int) -> None:
    """Random parameters, shared prefixes, right and wrong drafts, and a pool so small that sequences are preempted."""
    requests = any_requests(seed)
    expected = run(plain, requests)
    texts = {name: delta.tokens for name, delta in expected.items()}
    engine = eager_engine(
        checkpoint, lambda _: Oracle(texts, wrong=0.25, vocab_size=VOCAB, seed=seed), num_blocks=14, token_budget=64
    )
    got = run(engine, requests)
    for name, delta in expected.items():
        assert got[name].tokens == delta.tokens, name
        assert got[name].finish_reason == delta.finish_reason
        if delta.logprobs is not None:
            scores = got[name].logprobs
            assert scores is not None
            assert [s.logprob for s in scores] == pytest.approx([s.logprob for s in delta.logprobs], abs=1e-4)
            assert [s.top_ids for s in scores] == [s.top_ids for s in delta.logprobs]
    load = engine.load_snapshot()
    assert load.accepted_tokens > 40 and load.draft_tokens > load.accepted_tokens
    assert load.generation_tokens == sum(len(delta.tokens) for delta in expected.values())
    assert load.preemptions > 0
    assert_idle(engine)


def test_right_drafts_save_steps(checkpoint: Path, plain: Engine) -> None:
    request = greedy("a", list(range(40)), 70)
    texts = generate(plain, request)
    engine = eager_engine(checkpoint, lambda _: Oracle(texts, wrong=0.0, vocab_size=VOCAB))
    assert generate(engine, request) == texts
    assert engine.steps < 50


def test_only_accepted_tokens_are_found_by_others(checkpoint: Path, plain: Engine) -> None:
    """Wrong draft tokens fill whole blocks; a request that goes on from the text must not meet them."""
    first = greedy("a", list(range(60)), 60)
    texts = generate(plain, first)
    engine = eager_engine(
        checkpoint, lambda _: Oracle(texts, wrong=0.9, vocab_size=VOCAB), block_size=4, num_blocks=300
    )
    assert generate(engine, first) == texts
    again = greedy("b", list(range(60)) + texts["a"][:50], 20)
    expected = generate(plain, again)
    engine.submit(replace(again, speculation=False))
    deltas = drain(engine)
    assert collect(deltas) == expected
    assert deltas[0].cached_tokens is not None and deltas[0].cached_tokens >= 104


def test_aborts_and_deadlines_between_verifying_steps(checkpoint: Path, plain: Engine) -> None:
    texts = generate(plain, *(greedy(name, list(range(30)), 60) for name in ("stay", "gone", "late")))
    engine = eager_engine(checkpoint, lambda _: Oracle(texts, wrong=0.2, vocab_size=VOCAB))
    now = 0.0
    engine.clock = lambda: now
    engine.submit(greedy("stay", list(range(30)), 60))
    engine.submit(greedy("gone", list(range(30)), 60))
    engine.submit(replace(greedy("late", list(range(30)), 60), timeout_s=5.0))
    deltas: list[Delta] = []
    for _ in range(4):
        output = engine.step()
        deltas += output.deltas if output else []
    engine.abort("gone")
    now = 6.0
    deltas += drain(engine)
    reasons = {delta.request_id: delta.finish_reason for delta in deltas if delta.finish_reason}
    assert reasons == {"stay": "length", "gone": "abort", "late": "timeout"}
    got = collect(deltas)
    assert got["stay"] == texts["stay"]
    assert all(0 < len(got[name]) < 60 and got[name] == texts[name][: len(got[name])] for name in ("gone", "late"))
    assert_idle(engine)


def test_a_verifying_step_that_fails_is_run_again_without_drafts(
    checkpoint: Path, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = greedy("a", list(range(30)), 20)
    texts = generate(plain, request)
    engine = eager_engine(checkpoint, lambda _: Oracle(texts, wrong=0.0, vocab_size=VOCAB))
    launch = engine.runner.run
    failures = []

    def fail_once(batch: Batch) -> Any:
        if batch.speculative and not failures:
            failures.append(batch)
            raise RuntimeError("lost")
        return launch(batch)

    monkeypatch.setattr(engine.runner, "run", fail_once)
    assert generate(engine, request) == texts
    assert failures and engine.load_snapshot().accepted_tokens > 0
    assert_idle(engine)


def test_a_request_can_opt_out(checkpoint: Path, plain: Engine) -> None:
    request = greedy("a", list(range(30)), 20)
    texts = generate(plain, request)
    engine = eager_engine(checkpoint, lambda _: Oracle(texts, wrong=0.0, vocab_size=VOCAB))
    assert generate(engine, replace(request, speculation=False)) == texts
    assert engine.load_snapshot().drafts == 0
    assert generate(engine, request) == texts
    assert engine.load_snapshot().drafts > 0
