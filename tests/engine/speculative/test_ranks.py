"""Speculation with several ranks: the text of one device, accepted as there (R-ENG-7, R-ENG-10)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from penstock.bench.soak.engines import verify_everything
from penstock.engine.core import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.errors import ConfigError, ReplicaLost
from tests.engine.foreign import write_foreign
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.speculative.forced import Oracle
from tests.engine.speculative.mtp_layers import write_mtp
from tests.engine.speculative.test_same_text import any_requests, run
from tests.engine.tiny import write_checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("target"), spread=0.3)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another family with the same vocabulary, which two shards can have and four cannot."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    return write_checkpoint("qwen3-qknorm", tmp_path_factory.mktemp("other"), spread=0.3, **sizes)


@contextmanager
def drafting(target: Path, draft: Path, tensor: int, pipeline: int, **settings: Any) -> Iterator[Engine]:
    settings = {"speculation": "draft", "draft_model": str(draft), **settings}
    with threaded_engine(target, tensor, pipeline, **settings) as engine:
        assert engine.speculation is not None
        verify_everything(engine.speculation)
        yield engine


GRIDS = [
    pytest.param(2, 2, 1, 1, marks=pytest.mark.slow),
    pytest.param(2, 2, None, 2, marks=pytest.mark.slow),
    pytest.param(1, 3, None, 1, marks=pytest.mark.slow),
    pytest.param(4, 1, None, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("tensor", "pipeline", "asked", "shards"), GRIDS)
def test_any_mix_of_requests_gets_the_answers_of_one_device(
    target: Path, other: Path, tensor: int, pipeline: int, asked: int | None, shards: int
) -> None:
    """With a draft model that is mostly wrong; shared prefixes, preemption, any sampling, some without speculation."""
    requests = any_requests(7, count=6)
    expected = run(make_engine(target, num_blocks=400), requests)
    settings = {"num_blocks": 11, "token_budget": 64, "draft_tensor_parallel": asked}
    with drafting(target, other, tensor, pipeline, **settings) as engine:
        assert engine.config.draft_tensor_parallel == shards
        got = run(engine, requests)
        assert {name: delta.tokens for name, delta in got.items()} == {n: d.tokens for n, d in expected.items()}
        load = engine.load_snapshot()
        assert load.draft_tokens > 50 and load.preemptions > 0
        assert_idle(engine)


@pytest.mark.slow
def test_a_draft_on_fewer_shards_than_the_target(target: Path, other: Path) -> None:
    asked = [greedy("a", [5, 9, 2], 12), Request("b", [7] * 20, SamplingParams(max_tokens=12, temperature=0.8, seed=3))]
    expected = generate(make_engine(target), *asked)
    with drafting(target, other, 4, 1) as engine:
        assert engine.config.draft_tensor_parallel == 2
        assert generate(engine, *asked) == expected
        assert engine.load_snapshot().draft_tokens > 10


@pytest.mark.slow
def test_a_draft_that_is_the_target_is_always_right(target: Path) -> None:
    """At any temperature: the ranks' caches of the draft are as the target's after every number of accepted tokens."""
    with drafting(target, target, 2, 2, speculation_depth=5) as engine:
        for params in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 4}):
            before = engine.steps
            request = Request("a", list(range(50)), SamplingParams(max_tokens=61, **params))
            assert len(generate(engine, request)["a"]) == 61
            assert engine.steps - before == 1 + 10
        load = engine.load_snapshot()
        assert load.accepted_tokens == load.draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline", "shards"), [(2, 1, 2), (4, 1, 4), (2, 2, 1)])
def test_one_draft_for_shards_with_sequences_of_their_own(
    tmp_path: Path, tensor: int, pipeline: int, shards: int
) -> None:
    """Its blocks are those of all shards. As its own draft the model is right wherever the cache is as it should be."""
    model = write_checkpoint("mixtral", tmp_path / "mixtral", spread=0.3)
    requests = any_requests(7, count=6)
    expected = run(make_engine(model, num_blocks=400), requests)
    spread = {"expert_parallel": True, "attention_parallel": "data", "draft_tensor_parallel": shards}
    with drafting(model, model, tensor, pipeline, num_blocks=11, token_budget=64, **spread) as engine:
        for _ in range(2):
            got = run(engine, requests)
            assert {name: delta.tokens for name, delta in got.items()} == {n: d.tokens for n, d in expected.items()}
            greedily = [replace(request, params=SamplingParams(40, temperature=0.0)) for request in requests]
            before = engine.load_snapshot()
            run(engine, greedily)
            load = engine.load_snapshot()
            tried, accepted = load.draft_tokens - before.draft_tokens, load.accepted_tokens - before.accepted_tokens
            assert accepted == tried > 0
        assert load.prefix_hit_tokens > 0
        assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_tokens_of_the_text_itself_are_verified_by_all_ranks(target: Path, seed: int) -> None:
    requests = any_requests(seed, count=8)
    expected = run(make_engine(target, num_blocks=400), requests)
    with threaded_engine(target, 2, 2, speculation="ngram", num_blocks=11, token_budget=64) as engine:
        assert engine.speculation is not None
        verify_everything(engine.speculation)
        got = run(engine, requests)
        assert {name: delta.tokens for name, delta in got.items()} == {n: d.tokens for n, d in expected.items()}
        assert engine.load_snapshot().draft_tokens > 0
        assert_idle(engine)


def test_every_rank_with_a_part_of_the_draft_has_room_for_its_cache(target: Path) -> None:
    """A draft that is the target takes as much as it where both are cut, and twice as much as it on rank 0 alone."""
    settings = {"kv_memory": 1 << 18, "max_model_len": 1024, "max_running": 64}
    blocks = make_engine(target, **settings).info.num_blocks
    for asked, expected in ((None, blocks), (1, 2 * blocks / 3)):
        drafts = {"speculation": "draft", "draft_model": str(target), "draft_tensor_parallel": asked}
        with threaded_engine(target, 2, 1, **settings, **drafts) as engine:
            assert engine.info.num_blocks == pytest.approx(expected, abs=1)


def test_a_step_of_the_draft_that_fails_on_some_rank_ends_the_engine(target: Path) -> None:
    """Unlike a draft on one device: its ranks, and those of the target, no longer agree."""
    with drafting(target, target, 2, 1) as engine:
        stage = engine.speculation.proposer.runner.decoder.stage  # type: ignore[union-attr]
        step = stage.forward

        def fail(*args: Any) -> None:
            step(*args)  # the other rank takes part
            raise RuntimeError("lost")

        with patch.object(stage, "forward", fail), pytest.raises(ReplicaLost, match="lost"):
            generate(engine, greedy("a", [1, 2, 3], 20))


def test_what_cannot_be_is_refused_before_ranks_start(target: Path, other: Path) -> None:
    drafts = {"speculation": "draft", "draft_model": str(other)}
    with pytest.raises(ConfigError, match="draft_tensor_parallel: 2 is more than tensor_parallel: 1"):
        make_engine(target, **drafts, draft_tensor_parallel=2)
    with pytest.raises(
        ConfigError, match="draft_tensor_parallel: 4 does not split the draft model evenly; 1, 2 would do"
    ):
        make_engine(target, **drafts, tensor_parallel=4, draft_tensor_parallel=4)
    with pytest.raises(ConfigError, match="draft_tensor_parallel is only used with speculation: draft"):
        make_engine(target, tensor_parallel=2, draft_tensor_parallel=2)
    with pytest.raises(ConfigError, match="needs a draft_model"):
        make_engine(target, tensor_parallel=2, speculation="draft")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ngram", "draft", "mtp"])
@pytest.mark.parametrize(("tensor", "pipeline", "more"), [
    (2, 1, {}), (1, 2, {}), (2, 1, {"expert_parallel": True, "attention_parallel": "data"}),
    (2, 2, {"expert_parallel": True, "attention_parallel": "data"}),
])  # fmt: skip
def test_states_behind_draft_tokens_on_every_rank(
    other: Path, tmp_path: Path, kind: str, tensor: int, pipeline: int, more: dict[str, Any]
) -> None:
    """A target with recurrent layers: rejected draft tokens leave no trace in any rank's states."""
    hybrid = write_mtp("qwen3-next", tmp_path)
    requests = [greedy(f"r{n}", [i * 7 % 199 for i in range(n)] * 2, 24) for n in (3, 40, 64)]
    expected = generate(make_engine(hybrid), *requests)
    settings = {"speculation": kind, "num_blocks": 15, "token_budget": 64, "state_interval": 16, **more}
    if kind == "draft":
        settings["draft_model"] = str(other)
    texts = {f"{name}-{turn}": tokens for name, tokens in expected.items() for turn in range(2)}
    with threaded_engine(hybrid, tensor, pipeline, **settings) as engine:
        assert engine.speculation is not None
        verify_everything(engine.speculation)
        if kind == "ngram":
            engine.speculation.proposer = Oracle(texts, wrong=0.3, vocab_size=190)
        for turn in range(2):
            assert generate(
                engine, *(replace(request, request_id=f"{request.request_id}-{turn}") for request in requests)
            ) == {f"{name}-{turn}": tokens for name, tokens in expected.items()}
        assert engine.load_snapshot().draft_tokens > 5
        assert_idle(engine)


@pytest.mark.slow
def test_a_draft_through_transformers_stays_whole_unless_asked(tmp_path: Path) -> None:
    """Whether it can be cut is only known once it is read."""
    target, draft = write_checkpoint("llama-gqa", tmp_path / "target"), write_foreign("bloom", tmp_path / "draft")
    request = greedy("r", list(range(20)), 8)
    expected = generate(make_engine(target), request)
    settings = {"speculation": "draft", "draft_model": str(draft)}
    for asked in ({}, {"draft_tensor_parallel": 2}):
        with threaded_engine(target, 2, 1, **settings, **asked) as engine:
            assert generate(engine, request) == expected
