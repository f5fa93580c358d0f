"""Adapters of experts on several ranks: the tokens of one device, whether experts are cut, whole or exchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engine.adapters.spec import AdapterSpec
from tests.engine.adapters.expert_files import write_expert_adapter
from tests.engine.adapters.files import ALL, write_adapter
from tests.engine.adapters.test_experts import DELTA
from tests.engine.harness import assert_idle, generate, make_engine
from tests.engine.parallel.test_adapters import requests
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference, write_checkpoint

STACKS = ("gate_up_proj", "down_proj")
LATENTS = ("fc1_latent_proj", "fc2_latent_proj")
INDEX = ("wq_b", "wk", "weights_proj")
WHOLE = {"expert_parallel": True, "expert_copies": 1}
GRIDS: list[Any] = [
    ("qwen3-moe", 2, 2, {}),
    ("mixtral", 2, 1, {**WHOLE, "attention_parallel": "data"}),
    *(
        pytest.param(*grid, marks=pytest.mark.slow)
        for grid in (
            ("mixtral", 2, 1, {}),
            ("mixtral", 2, 2, WHOLE),
            ("deepseek-v3", 2, 1, {}),
            ("deepseek-v3", 2, 1, {**WHOLE, "attention_parallel": "data"}),
            ("deepseek-v3", 1, 2, {}),
            ("deepseek-v32", 2, 2, {}),
            ("gpt-oss", 2, 1, {}),
            ("llama4", 2, 2, {}),
            ("granite-moe-shared", 2, 1, WHOLE),
            ("qwen2-moe", 2, 1, {}),
            ("qwen3-next", 2, 2, {}),
            ("qwen3.5", 2, 1, {}),
            ("nemotron-h-experts", 2, 2, {}),
            ("nemotron-h-narrow-experts", 2, 1, {}),
            ("nemotron-h-narrow-experts", 2, 1, WHOLE),
            ("nemotron-h-narrow-experts", 2, 1, {**WHOLE, "attention_parallel": "data"}),
        )
    ),
]


@pytest.mark.parametrize(("family", "tensor", "pipeline", "settings"), GRIDS)
def test_adapters_of_experts_give_the_tokens_of_one_device(
    tmp_path: Path, family: str, tensor: int, pipeline: int, settings: dict[str, Any]
) -> None:
    base = write_checkpoint(family, tmp_path / "base")
    model = Reference(base).model
    folders = [
        write_expert_adapter(
            tmp_path / "every",
            model,
            rank=8,
            seed=1,
            targets=(*STACKS, "gate", "router", "up_proj", *DELTA, *LATENTS, *INDEX),
        ),
        write_expert_adapter(tmp_path / "down", model, rank=3, seed=2, targets=("down_proj", "shared_expert_gate")),
        write_adapter(tmp_path / "attention", base, rank=5, targets=ALL[:4], seed=3),
    ]
    specs = tuple(AdapterSpec(folder.name, str(folder)) for folder in folders)
    expected = generate(make_engine(base, adapters=specs), *requests(specs))
    with threaded_engine(base, tensor, pipeline, adapters=specs, token_budget=48, **settings) as engine:
        assert generate(engine, *requests(specs)) == expected
        assert_idle(engine)
