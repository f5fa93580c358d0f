"""GGUF files of the text part of models that take images: llama.cpp keeps what sees in a file of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.harness import generate, greedy, make_engine
from tests.engine.loading.test_gguf_families import convert
from tests.engine.tiny import write_checkpoint

SECTIONS = {"rope.dimension_sections": [4, 6, 6, 0]}


def halved(folder: Path, target: Path) -> Path:
    """With the rows of queries and keys as llama.cpp's converter of GLM-4.1V puts them: of the rotated part of a head
    first the even ones, then the odd ones."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "q_proj" not in name and "k_proj" not in name:
            continue
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        rows = torch.arange(len(tensor)).view(heads, -1)
        rotated = int(rows.shape[1] * config["rope_parameters"]["partial_rotary_factor"])
        turned = torch.cat((rows[:, :rotated:2], rows[:, 1:rotated:2], rows[:, rotated:]), 1)
        tensors[name] = tensor[turned.flatten()].contiguous()
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    ("family", "arch", "more"),
    [
        ("qwen2-bias", "qwen2vl", SECTIONS),
        ("qwen3-qknorm", "qwen3vl", {**SECTIONS, "n_deepstack_layers": 3}),
        pytest.param("qwen3-moe", "qwen3vlmoe", {**SECTIONS, "n_deepstack_layers": 3}, marks=pytest.mark.slow),
        ("glm4", "glm4", SECTIONS),
        pytest.param("glm4", "glm4", {"rope.dimension_sections": [0, 0, 0, 0]}, marks=pytest.mark.slow),
        pytest.param("glm4-moe", "glm4moe", SECTIONS, marks=pytest.mark.slow),
    ],
)
def test_the_text_part_gives_the_tokens_of_its_family(
    family: str, arch: str, more: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_checkpoint(family, tmp_path / "folder")
    request = greedy("a", [23 * i % 199 for i in range(60)], 16)
    expected = generate(make_engine(folder), request)
    if arch == "glm4" and any(more["rope.dimension_sections"]):
        folder = halved(folder, tmp_path / "halved")
    assert generate(make_engine(convert(folder, arch, more=more)), request) == expected
