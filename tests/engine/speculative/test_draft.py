"""Draft tokens of a draft model: the same text as without, accepted where the models agree, wrong ones harmless."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.backends.backend import Backend
from penstock.engine.core import Engine
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.request import Request, SamplingParams
from penstock.engine.speculative.draft import DraftProposer
from penstock.errors import ConfigError
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine
from tests.engine.speculative.forced import eager_engine
from tests.engine.speculative.test_same_text import any_requests, run
from tests.engine.tiny import write_checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("target"), spread=0.3)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another family with the same vocabulary."""
    return write_checkpoint("qwen3-qknorm", tmp_path_factory.mktemp("other"), spread=0.3, num_hidden_layers=1)


@pytest.fixture(scope="module")
def plain(target: Path) -> Engine:
    return make_engine(target, num_blocks=400)


def drafting(target: Path, draft: Path, **settings: object) -> Engine:
    return eager_engine(target, speculation="draft", draft_model=str(draft), **settings)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_any_mix_of_requests_gets_the_same_answers(target: Path, other: Path, plain: Engine, seed: int) -> None:
    """With a draft model that is mostly wrong, and one that is the target itself; preempted, aborted, resumed."""
    requests = any_requests(100 + seed)
    expected = run(plain, requests)
    for draft in (target, other):
        engine = drafting(target, draft, num_blocks=11, token_budget=64)
        got = run(engine, requests)
        assert {name: delta.tokens for name, delta in got.items()} == {n: d.tokens for n, d in expected.items()}
        load = engine.load_snapshot()
        assert load.draft_tokens > 100 and load.preemptions > 0
        assert_idle(engine)


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 4}, {"temperature": 0.8, "top_p": 0.8, "seed": 9}]
)
def test_a_draft_that_is_the_target_is_always_right(target: Path, params: dict[str, float]) -> None:
    """Its cache must be as the target's after every number of accepted tokens, or some draft would be rejected."""
    engine = drafting(target, target, speculation_depth=5)
    request = Request("a", list(range(50)), SamplingParams(max_tokens=61, **params))
    assert len(generate(engine, request)["a"]) == 61
    load = engine.load_snapshot()
    assert load.accepted_tokens == load.draft_tokens > 0
    assert engine.steps == 1 + 10


def test_sampled_drafts_use_the_targets_noise(target: Path, other: Path, tmp_path: Path) -> None:
    """A draft close to the target is right more often when both draw with the same noise than chance would have it."""
    close = tmp_path / "close"
    shutil.copytree(target, close)
    engine = drafting(target, close)
    assert isinstance(engine.speculation.proposer, DraftProposer)  # type: ignore[union-attr]
    requests = [Request(f"r{i}", [i, 2, 3], SamplingParams(max_tokens=40, temperature=1.5, seed=i)) for i in range(8)]
    generate(engine, *requests)
    load = engine.load_snapshot()
    assert load.accepted_tokens == load.draft_tokens > 100


def test_the_draft_reads_what_it_missed(target: Path, plain: Engine) -> None:
    """Long prompts are read in parts, shared prefixes once, and tokens made without it when it is asked again."""
    prompt = [i % 199 for i in range(300)]
    engine = drafting(target, target, token_budget=64)
    first = greedy("a", prompt, 30)
    expected = generate(plain, first)
    assert generate(engine, first) == expected
    before = engine.load_snapshot()
    assert before.accepted_tokens == before.draft_tokens > 10
    proposer = engine.speculation.proposer  # type: ignore[union-attr]
    assert isinstance(proposer, DraftProposer)
    read: list[int] = []
    launch = proposer.runner.run

    def noting(batch: object) -> object:
        read.append(batch.num_tokens)  # type: ignore[attr-defined]
        return launch(batch)  # type: ignore[arg-type]

    proposer.runner.run = noting  # type: ignore[method-assign, assignment]
    engine.submit(greedy("b", prompt, 30))
    assert collect(drain(engine))["b"] == expected["a"]
    assert max(read) < 32, "the shared prefix was read again"
    load = engine.load_snapshot()
    assert load.accepted_tokens == load.draft_tokens > before.draft_tokens


def test_nothing_of_a_cache_that_was_emptied_is_taken_for_a_prefix(target: Path) -> None:
    engine = drafting(target, target, num_blocks=7)
    for _ in range(4):
        generate(engine, greedy("a", [i % 199 for i in range(70)], 20))
        engine.forget_caches()
        proposer = engine.speculation.proposer  # type: ignore[union-attr]
        assert isinstance(proposer, DraftProposer)
        for tensor in (*proposer.runner.kv.tensors, *engine.runner.kv.tensors):
            tensor.zero_()
    load = engine.load_snapshot()
    assert load.accepted_tokens == load.draft_tokens > 0


def test_a_draft_that_fails_is_given_up(target: Path, plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = drafting(target, target)
    request = greedy("a", [1, 2, 3], 20)
    expected = generate(plain, request)
    proposer = engine.speculation.proposer  # type: ignore[union-attr]
    monkeypatch.setattr(proposer, "propose", lambda depths: 1 / 0)
    assert generate(engine, request) == expected
    assert engine.load_snapshot().drafts == 0
    assert_idle(engine)


def test_a_draft_model_need_not_attend_in_fp8(target: Path, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does where it can, since it shares the device's operations with its target; where it cannot, nothing is
    refused."""
    found: list[tuple[str, int]] = []

    def attend_in_fp8(self: Backend, model: ModelConfig, *_: Any) -> None:
        found.append((model.family, id(self)))
        if model.family == "qwen3":
            raise ConfigError("heads of 128")

    monkeypatch.setattr(Backend, "attend_in_fp8", attend_in_fp8)
    settings: dict[str, Any] = {"kv_dtype": "fp8", "fp8_attention": True}
    drafting(target, other, **settings)
    assert [family for family, _ in found] == ["qwen3", "llama"] and len({backend for _, backend in found}) == 1
    with pytest.raises(ConfigError, match="heads of 128"):
        drafting(other, target, **settings)


def test_another_vocabulary_is_refused_at_start(target: Path, other: Path, tmp_path: Path) -> None:
    small = write_checkpoint("llama-gqa", tmp_path / "small", vocab_size=100)
    with pytest.raises(ConfigError, match="vocabulary of 100 tokens, the model one of 199"):
        make_engine(target, speculation="draft", draft_model=str(small))
    with pytest.raises(ConfigError, match="needs a draft_model"):
        make_engine(target, speculation="draft")
    with pytest.raises(ConfigError, match="only used with speculation: draft or eagle3"):
        make_engine(target, draft_model=str(other))
    for name, folder in (("a", target), ("b", other)):
        shutil.copytree(folder, tmp_path / name)
        words = {f"{name}{i}": i for i in range(199)}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    with pytest.raises(ConfigError, match="other meanings"):
        make_engine(tmp_path / "a", speculation="draft", draft_model=str(tmp_path / "b"))


def test_the_draft_has_its_share_of_the_cache_memory(target: Path) -> None:
    alone = make_engine(target, kv_memory=1 << 20)
    both = make_engine(target, kv_memory=1 << 20, speculation="draft", draft_model=str(target))
    assert both.info.num_blocks == alone.info.num_blocks // 2
    replaced = replace(alone.config, speculation="draft")
    assert replaced.max_verified(4) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mamba2", "qwen3-next", "falcon-h1"])
def test_a_recurrent_draft_goes_on_from_the_state_behind_the_last_accepted_token(model: str, tmp_path: Path) -> None:
    """Drafting for itself it is always right, whatever it was rejected for before; for another model it is harmless."""
    hybrid = write_checkpoint(model, tmp_path / "hybrid", spread=0.3)
    itself = drafting(hybrid, hybrid, speculation_depth=4, num_blocks=40)
    requests = [Request(f"r{n}", list(range(n)), SamplingParams(max_tokens=31, temperature=0.0)) for n in (5, 40)]
    expected = generate(make_engine(hybrid), *requests)
    assert generate(itself, *requests) == expected
    load = itself.load_snapshot()
    assert load.accepted_tokens == load.draft_tokens > 40
    assert_idle(itself)

    target = write_checkpoint("llama-gqa", tmp_path / "target", spread=0.3)
    several = any_requests(7)
    engine = drafting(target, hybrid, num_blocks=11, token_budget=64)
    got = run(engine, several)
    expected_text = run(make_engine(target, num_blocks=400), several)
    assert {name: delta.tokens for name, delta in got.items()} == {n: d.tokens for n, d in expected_text.items()}
    load = engine.load_snapshot()
    assert load.draft_tokens > 100 and load.preemptions > 0
    assert_idle(engine)


def test_a_recurrent_draft_forgets_rejected_tokens(tmp_path: Path) -> None:
    """A penalty that it does not follow makes the target reject some of its tokens; behind them it must propose what
    the model itself would go on with."""
    hybrid = write_checkpoint("qwen3-next-dense", tmp_path, spread=0.3)
    engine, plain = drafting(hybrid, hybrid, speculation_depth=4), make_engine(hybrid)
    proposer = engine.speculation.proposer  # type: ignore[union-attr]
    propose, seen = proposer.propose, []

    def noted(depths: dict[Any, int]) -> dict[Any, list[int]]:
        drafts = propose(depths)
        seen.extend((list(seq.tokens), tokens[0]) for seq, tokens in drafts.items())
        return drafts

    proposer.propose = noted  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=24, temperature=0.0, presence_penalty=1.5)
    generate(engine, Request("r", list(range(30)), params))
    load = engine.load_snapshot()
    assert 0 < load.accepted_tokens < load.draft_tokens
    wanted = generate(plain, *(greedy(str(number), tokens, 1) for number, (tokens, _) in enumerate(seen)))
    assert wanted == {str(number): [first] for number, (_, first) in enumerate(seen)}
