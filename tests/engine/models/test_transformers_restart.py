"""Models that run through `transformers`: a lost rank is started again and loads without the others (R-ENG-10)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.parallel import launch
from penstock.engine.parallel.kept_sums import KeptSums
from penstock.engine.request import Request, SamplingParams
from penstock.errors import ReplicaLost
from tests.engine.foreign import without_families, write_foreign
from tests.engine.harness import assert_idle, collect, generate, make_engine
from tests.engine.models.test_transformers import write_lora
from tests.engine.parallel.lost_rank import run_losing
from tests.engine.parallel.threads import _spawn, threaded_engine

SETTINGS: dict[str, Any] = {"token_budget": 48, "rank_restarts": 2, "kv_dtype": "full", "watchdog_s": 60}


@pytest.fixture(autouse=True)
def through_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    without_families(monkeypatch)


def batch(*names: str) -> list[Request]:
    params = SamplingParams(max_tokens=16, temperature=0.0)
    prompts = [[(i * 17 + j * 5) % 150 for j in range(3 + 11 * i)] for i in range(4)]
    return [Request(f"r{i}", prompt, params, adapter=names[i % len(names)]) for i, prompt in enumerate(prompts)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "tensor", "pipeline", "rank", "more"),
    [
        ("starcoder2", 2, 1, 1, {}),
        ("starcoder2", 2, 2, 3, {}),
        ("starcoder2", 1, 2, 1, {}),
        ("bloom", 2, 1, 1, {}),  # attention of its own
        ("jetmoe", 2, 1, 1, {}),  # whole on every shard
        ("mimo_v2_flash", 2, 1, 1, {"expert_parallel": True}),
        ("phimoe", 2, 2, 3, {"expert_parallel": True}),
        ("mimo_v2_flash", 2, 2, 1, {"role": "prefill"}),  # all are told what each stage keeps
    ],
)
def test_streams_go_on_after_a_rank_was_lost(
    model_type: str, tensor: int, pipeline: int, rank: int, more: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_foreign(model_type, tmp_path)
    expected = generate(make_engine(folder, token_budget=48, kv_dtype="full"), *batch(""))
    as_threads = patch.object(launch, "_spawn", _spawn)
    with threaded_engine(folder, tensor, pipeline, **SETTINGS, **more) as engine, as_threads:
        for _ in range(2):
            assert collect(run_losing(engine, batch(""), rank)) == expected
        assert generate(engine, *batch("")) == expected
        assert engine.load_snapshot().preemptions > 0
        assert engine.ranks is not None and engine.ranks.generation == 2
        assert_idle(engine)


@pytest.mark.slow
def test_with_adapters_and_rounded_keys(tmp_path: Path) -> None:
    folder = write_foreign("starcoder2", tmp_path / "model")
    adapters = (AdapterSpec("a", str(write_lora(tmp_path, folder, ("q_proj", "v_proj"))[0])),)
    settings = {**SETTINGS, "adapters": adapters, "kv_dtype": "int8"}
    with threaded_engine(folder, 2, 1, **settings) as engine, patch.object(launch, "_spawn", _spawn):
        expected = generate(engine, *batch("", "a"))
        assert collect(run_losing(engine, batch("", "a"), 1)) == expected
        assert_idle(engine)


def test_sums_of_the_load_are_those_of_the_rank_before(tmp_path: Path) -> None:
    file = tmp_path / "sums.safetensors"
    first = KeptSums(lambda x: x.mul_(2), file)
    found = [first(torch.ones(2)), first(torch.full((3,), 5.0))]
    assert not file.exists()
    first.loaded()
    assert first(torch.ones(2)).tolist() == [2, 2]

    def alone(x: Tensor) -> Tensor:
        raise AssertionError("there is nobody to add to")

    again = KeptSums(alone, file)
    x = torch.zeros(2)
    assert again(x) is x and torch.equal(x, found[0])
    with pytest.raises(ReplicaLost, match="loads otherwise"):
        again(torch.zeros(4))
