"""`deterministic` for models that run through `transformers`: a request gets the same bits whatever else is in its
steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.request import Request, SamplingParams
from tests.engine.foreign import without_families, write_foreign
from tests.engine.harness import assert_idle, make_engine
from tests.engine.models.test_transformers import prompt_of, write_lora
from tests.engine.parallel.threads import threaded_engine
from tests.engine.test_determinism import bits, native, run
from tests.engine.tiny import Reference

WATCHED = [
    Request("greedy", prompt_of(random.Random(1), 40), SamplingParams(max_tokens=9, temperature=0.0, logprobs=2)),
    Request("sampled", prompt_of(random.Random(2), 17), SamplingParams(max_tokens=9, seed=5, logprobs=0)),
]
CASES: list[Any] = [
    pytest.param("starcoder2", {}, id="starcoder2"),
    *(
        pytest.param(model_type, settings, marks=pytest.mark.slow, id=f"{model_type}-{'-'.join(settings)}")
        for model_type in ("gpt2", "bloom", "dots1", "apertus", "vaultgemma")
        for settings in ({}, {"weights": "int8"}, {"threads": 2})
    ),
]


@pytest.fixture(autouse=True)
def through_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    without_families(monkeypatch)


@native
@pytest.mark.parametrize(("model_type", "settings"), CASES)
def test_the_same_bits_alone_and_in_any_batch(model_type: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = write_foreign(model_type, tmp_path)
    fixed = {"deterministic": True, "num_blocks": 100, **settings}
    alone = make_engine(folder, **fixed)
    expected = {request.request_id: bits(run(alone, [request]), request.request_id) for request in WATCHED}
    again = {request.request_id: bits(run(alone, [request]), request.request_id) for request in WATCHED}
    assert again == expected, "with the prompt found in the cache"
    if not settings:
        assert Reference(folder).agrees(WATCHED[0].prompt, expected["greedy"][0])
    rng = random.Random(4)
    others = [
        Request(f"o{i}", WATCHED[i % 2].prompt[:16] + prompt_of(rng, 5 + 9 * i), SamplingParams(max_tokens=7, seed=i))
        for i in range(3)
    ]
    for budget in (256, 11):
        engine = make_engine(folder, **fixed, token_budget=budget)
        deltas = run(engine, others + WATCHED)
        for name, wanted in expected.items():
            assert bits(deltas, name) == wanted, (name, budget)
        assert_idle(engine)


@native
@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (1, 2), (2, 1)])
def test_with_adapters_and_ranks(tensor: int, pipeline: int, tmp_path: Path) -> None:
    base = write_foreign("starcoder2", tmp_path / "base")
    adapter, merged = write_lora(tmp_path, base, ("q_proj", "o_proj", "c_fc"))
    asked = [
        Request("tuned", WATCHED[0].prompt, WATCHED[0].params, adapter="tuned"),
        Request("plain", WATCHED[0].prompt, WATCHED[0].params),
        Request("other", prompt_of(random.Random(8), 30), SamplingParams(max_tokens=12, seed=3), adapter="tuned"),
    ]
    specs = (AdapterSpec("tuned", str(adapter)),)
    with threaded_engine(base, tensor, pipeline, deterministic=True, adapters=specs, num_blocks=60) as engine:
        expected = {request.request_id: bits(run(engine, [request]), request.request_id) for request in asked}
        deltas = run(engine, asked)
        assert {name: bits(deltas, name) for name in expected} == expected
        assert Reference(merged).agrees(asked[0].prompt, expected["tuned"][0], 2e-2)
        assert Reference(base).agrees(asked[1].prompt, expected["plain"][0], 2e-2)
        assert_idle(engine)


@native
@pytest.mark.slow
@pytest.mark.parametrize("attention", ["tensor", "data"])
def test_with_experts_on_shards(attention: str, tmp_path: Path) -> None:
    folder = write_foreign("phimoe", tmp_path)
    settings: dict[str, Any] = {"expert_parallel": True, "attention_parallel": attention, "num_blocks": 60}
    with threaded_engine(folder, 2, 1, deterministic=True, **settings) as engine:
        expected = {request.request_id: bits(run(engine, [request]), request.request_id) for request in WATCHED}
        deltas = run(engine, WATCHED)
        assert {name: bits(deltas, name) for name in expected} == expected
        assert Reference(folder).agrees(WATCHED[0].prompt, expected["greedy"][0])
        assert_idle(engine)
