"""Nemotron-H checkpoints in other forms than transformers saves by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.harness import generate, greedy, make_engine
from tests.engine.tiny import Reference, write_checkpoint

PROMPT = [i * 7 % 199 for i in range(50)]


def agrees(folder: Path) -> bool:
    return Reference(folder).agrees(PROMPT, generate(make_engine(folder), greedy("a", PROMPT, 10))["a"])


def test_experts_as_stacks_under_the_names_of_the_reference(tmp_path: Path) -> None:
    folder = write_checkpoint("nemotron-h-experts", tmp_path / "one by one")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "stacks", save_original_format=False)
    assert agrees(tmp_path / "stacks")


@pytest.mark.parametrize(
    ("removed", "added"),
    [
        ("layers_block_type", {"hybrid_override_pattern": "ME*E", "num_hidden_layers": 9}),
        pytest.param("n_routed_experts", {"num_local_experts": 12}, marks=pytest.mark.slow),
    ],
)
def test_keys_of_older_files(tmp_path: Path, removed: str, added: dict[str, Any]) -> None:
    folder = write_checkpoint("nemotron-h-experts", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config[removed]
    (folder / "config.json").write_text(json.dumps({**config, **added}))
    assert agrees(folder)


@pytest.mark.slow
def test_layers_and_widths_that_are_left_to_the_reference(tmp_path: Path) -> None:
    """Neither a list nor a pattern; a shared expert of no width has that of dense layers."""
    folder = write_checkpoint(
        "nemotron-h-experts", tmp_path, layers_block_type=None, moe_shared_expert_intermediate_size=0
    )
    config = json.loads((folder / "config.json").read_text())
    del config["layers_block_type"]
    (folder / "config.json").write_text(json.dumps(config))
    assert agrees(folder)
