"""Safetensors folders: one file or many, and clear words when something is missing or damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine.loading import open_checkpoint
from penstock.errors import CheckpointError

CONFIG = {"model_type": "llama", "hidden_size": 8}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(4, 8, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(8),
        "lm_head.weight": torch.randn(4, 8, dtype=torch.float16),
    }


def single(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), folder / "model.safetensors")
    return folder


def sharded(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for index, (name, tensor) in enumerate(tensors().items()):
        file = f"model-{index + 1:05}-of-00003.safetensors"
        save_file({name: tensor}, folder / file)
        weight_map[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("layout", [single, sharded])
def test_tensors_come_back_as_stored(tmp_path: Path, layout) -> None:
    checkpoint = open_checkpoint(layout(tmp_path))
    assert checkpoint.config == CONFIG
    assert set(checkpoint.names()) == set(tensors())
    for name, expected in tensors().items():
        found = checkpoint.tensor(name)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_unknown_tensor(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensor 'nope'"):
        open_checkpoint(single(tmp_path)).tensor("nope")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"incomplete.*model-00002-of-00003\.safetensors.*fetch"):
        open_checkpoint(tmp_path)


def test_index_that_points_to_the_wrong_shard(tmp_path: Path) -> None:
    index = sharded(tmp_path) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"does not hold 'model\.norm\.weight'"):
        open_checkpoint(tmp_path)


def test_truncated_weights(tmp_path: Path) -> None:
    file = single(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or incomplete.*fetch it again"):
        open_checkpoint(tmp_path)


def test_damaged_config(tmp_path: Path) -> None:
    (single(tmp_path) / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        open_checkpoint(tmp_path)


def test_pickled_weights_are_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="convert them to safetensors"):
        open_checkpoint(tmp_path)


def test_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"\.gguf file or a folder"):
        open_checkpoint(tmp_path / "notes.txt")
