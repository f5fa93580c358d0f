"""MTP layers of checkpoints as drafters, in both layouts: they draft what the reference's layer does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from penstock.bench.soak.engines import verify_everything
from penstock.errors import ConfigError
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.speculative.forced import eager_engine
from tests.engine.speculative.heads import noted_drafts
from tests.engine.speculative.mtp_layers import PlainMtp, write_mtp
from tests.engine.tiny import write_checkpoint

CASES = ["glm4-moe", "deepseek-v3", "qwen3-next"]


FURTHER = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in (
        "glm4-moe",
        "glm4-moe-lite",
        "qwen3-next",
        "qwen3.5",
        "qwen3.5-moe",
        "deepseek-v32",
        "glm-dsa",
        "step3.5",
    )
]


@pytest.mark.parametrize("family", ["deepseek-v3", *FURTHER])
def test_drafts_are_those_of_the_reference_layer(family: str, tmp_path: Path) -> None:
    target = write_mtp(family, tmp_path)
    plain = make_engine(target, num_blocks=200)
    engine = eager_engine(target, speculation="auto", speculation_depth=3, token_budget=48, num_blocks=200)
    assert engine.config.speculation == "mtp"
    drafts = noted_drafts(engine)
    prompt = [i * 7 % 199 for i in range(70)]
    requests = [greedy("a", prompt, 14), greedy("b", [5, 4], 14), greedy("c", prompt[:40], 8)]
    assert generate(engine, *requests) == generate(plain, *requests)
    again = [greedy("d", prompt, 8)]  # from the prefix cache
    assert generate(engine, *again) == generate(plain, *again)
    reference = PlainMtp(target)
    right = [draft == reference.draft(tokens, len(draft)) for tokens, draft in drafts]
    assert len(right) > 15 and all(right), right
    assert_idle(engine)


def test_a_checkpoint_without_such_a_layer_says_so(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    with pytest.raises(ConfigError, match="has no MTP layer"):
        make_engine(folder, speculation="mtp")
    assert make_engine(folder, speculation="auto").config.speculation == "ngram"


@pytest.mark.slow
def test_two_ranks_have_the_same_text(tmp_path: Path) -> None:
    target = write_mtp("glm4-moe", tmp_path)
    request = greedy("a", [i * 7 % 199 for i in range(70)], 14)
    engine = eager_engine(target, speculation="mtp", tensor_parallel=2, num_blocks=100)
    try:
        assert generate(engine, request) == generate(make_engine(target), request)
        assert engine.load_snapshot().draft_tokens > 10
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"),
    [("glm4-moe", 1, 3), ("deepseek-v3", 2, 2), ("qwen3-next", 1, 2), ("step3.5", 2, 2)],
)
def test_stages_of_a_pipeline_have_the_same_drafts(tmp_path: Path, family: str, tensor: int, pipeline: int) -> None:
    target = write_mtp(family, tmp_path)
    requests = [greedy("a", [i * 7 % 199 for i in range(70)], 14), greedy("b", [3, 1, 4], 14)]
    alone = eager_engine(target, speculation="mtp", num_blocks=100)
    expected = generate(alone, *requests)
    with threaded_engine(target, tensor, pipeline, speculation="mtp", num_blocks=100) as engine:
        assert engine.speculation is not None
        verify_everything(engine.speculation)
        assert generate(engine, *requests) == expected
        drafted, accepted = (getattr(engine.load_snapshot(), name) for name in ("draft_tokens", "accepted_tokens"))
        assert drafted > 10
        assert accepted == alone.load_snapshot().accepted_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "pipeline"), [*((family, 1) for family in CASES), ("glm4-moe", 2), ("qwen3-next", 2), ("step3.5", 1)]
)
def test_shards_with_sequences_of_their_own_have_the_same_drafts(tmp_path: Path, family: str, pipeline: int) -> None:
    target = write_mtp(family, tmp_path)
    requests = [greedy(f"r{n}", [(i * 7 + n) % 199 for i in range(n)], 14) for n in (70, 3, 40, 90, 17)]
    alone = eager_engine(target, speculation="mtp", num_blocks=100)
    spread = {"expert_parallel": True, "attention_parallel": "data"}
    with threaded_engine(target, 2, pipeline, speculation="mtp", num_blocks=60, token_budget=48, **spread) as engine:
        assert engine.speculation is not None
        verify_everything(engine.speculation)
        drafts = noted_drafts(engine)
        for turn in range(2):  # again from the prefix caches
            again = [dataclasses.replace(one, request_id=f"{one.request_id}-{turn}") for one in requests]
            assert generate(engine, *again) == generate(alone, *again)
        drafted, accepted = (getattr(engine.load_snapshot(), name) for name in ("draft_tokens", "accepted_tokens"))
        assert drafted > 10
        assert_idle(engine)
    reference = PlainMtp(target)
    right = [draft == reference.draft(tokens, len(draft)) for tokens, draft in drafts]
    assert len(right) > 30 and all(right), right
    assert accepted == alone.load_snapshot().accepted_tokens
