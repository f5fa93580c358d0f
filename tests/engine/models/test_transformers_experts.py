"""Experts of models that run through `transformers`, whole on shards: `expert_parallel` and `attention_parallel`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.models.transformers.experts import DividedExperts
from penstock.errors import ConfigError
from tests.engine.foreign import without_families, write_foreign
from tests.engine.harness import assert_idle, carry, collect, drain, generate, greedy, make_engine
from tests.engine.models.test_transformers import prompt_of
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference

TYPES = ["phimoe", "dots1", "mimo_v2_flash", "glm4_moe_lite", "laguna", "hunyuan_v1_moe", "ernie4_5_moe", "minimax_m2",
         "cohere2_moe"]  # fmt: skip
SHARED: dict[str, Any] = {"expert_parallel": True}
BY_SEQUENCES: dict[str, Any] = {"expert_parallel": True, "attention_parallel": "data"}
GRIDS = [("tensor", (2, 1)), ("data", (2, 1)), ("tensor", (3, 1)), ("data", (2, 2))]
CASES = [
    pytest.param(
        name, attention, grid, marks=() if (name, attention, grid) == ("phimoe", "data", (2, 1)) else pytest.mark.slow
    )
    for name in TYPES
    for attention, grid in GRIDS
]


@pytest.fixture(autouse=True)
def through_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    without_families(monkeypatch)


@pytest.mark.parametrize(("model_type", "attention", "grid"), CASES)
def test_tokens_equal_the_library(
    model_type: str, attention: str, grid: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_foreign(model_type, tmp_path)
    reference, rng = Reference(folder), random.Random(7)
    prompts = {f"r{n}": prompt_of(rng, n) for n in (1, 17, 70)}
    settings = {**SHARED, "attention_parallel": attention, "token_budget": 48, "num_blocks": 40, "max_running": 4}
    with threaded_engine(folder, *grid, **settings) as engine:
        got = generate(engine, *(greedy(name, prompt, 10) for name, prompt in prompts.items()))
        for name, prompt in prompts.items():
            assert len(got[name]) == 10 and reference.agrees(prompt, got[name]), name
        assert_idle(engine)
        part: Any = engine.runner.decoder.stage.decoder  # type: ignore[attr-defined]
        divided = [module for module in part.stage.base.modules() if isinstance(module, DividedExperts)]
        if grid[1] == 1:
            assert divided, "its experts are divided"
        assert "expert_rebalance_s has no effect" in caplog.text
        for module in divided:
            assert all(len(value) < 8 for value in module.inner.parameters())


@pytest.mark.slow
def test_prompts_of_shards_with_their_own_sequences_are_handed_over(tmp_path: Path) -> None:
    folder, prompt = write_foreign("mimo_v2_flash", tmp_path), prompt_of(random.Random(3), 140)
    request = greedy("r", prompt, 10)
    with threaded_engine(folder, 2, 1, role="prefill", **BY_SEQUENCES) as giver:
        expected = generate(giver, request)["r"]
        taker = make_engine(folder, role="decode")
        assert giver.info.kv_format == taker.info.kv_format
        exchange = taker.exchange
        assert exchange is not None
        exchange.release(carry(giver, taker, exchange.names(request)))
        taker.submit(greedy("s", prompt, 10))
        deltas = drain(taker)
        assert collect(deltas)["s"] == expected and deltas[0].cached_tokens == 128


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        pytest.param("starcoder2", SHARED, "this model has no experts", marks=pytest.mark.slow),
        pytest.param("jetmoe", SHARED, "this model has no experts that could be divided", marks=pytest.mark.slow),
        ("phimoe", {**SHARED, "expert_copies": 1}, "expert_copies: not available for phimoe models"),
    ],
)
def test_what_cannot_be_is_refused(model_type: str, settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = write_foreign(model_type, tmp_path)
    with pytest.raises(ConfigError, match=reason), threaded_engine(folder, 2, 1, **settings):
        pass
