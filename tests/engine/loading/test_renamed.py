"""Checkpoints under other names: what each tensor is called, what is left out, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine.loading.checkpoint import SafetensorsCheckpoint, open_checkpoint
from penstock.engine.loading.renamed import RenamedCheckpoint, decoder_name
from penstock.errors import CheckpointError


def _folder(path: Path, *names: str) -> Path:
    """A checkpoint of Gemma 3n, whose decoder runs through the `transformers` library."""
    save_file({name: torch.full((2,), float(at)) for at, name in enumerate(names)}, path / "model.safetensors")
    config = {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_wrapped_decoder_has_the_names_that_it_has_alone(tmp_path: Path) -> None:
    """Without the tensors that see or hear, also through `open_checkpoint`."""
    folder = _folder(
        tmp_path,
        "model.language_model.norm.weight",
        "model.vision_tower.norm.weight",
        "model.embed_audio.weight",
        "language_model.lm_head.weight",
    )
    for found in (RenamedCheckpoint(SafetensorsCheckpoint(folder), decoder_name), open_checkpoint(folder)):
        assert set(found.names()) == {"model.norm.weight", "lm_head.weight"}
        assert found.tensor("model.norm.weight").tolist() == [0.0, 0.0]
        assert found.tensor("lm_head.weight").tolist() == [3.0, 3.0]


def test_a_tensor_that_was_left_out_is_not_there(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "lm_head.weight", "model.vision_tower.norm.weight")
    found = RenamedCheckpoint(SafetensorsCheckpoint(folder), decoder_name)
    with pytest.raises(CheckpointError, match=r"has no tensor 'model.vision_tower.norm.weight'"):
        found.tensor("model.vision_tower.norm.weight")


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    """The model has one of them, and nothing says which."""
    folder = _folder(tmp_path, "lm_head.weight", "language_model.lm_head.weight")
    with pytest.raises(CheckpointError, match="which are the same tensor"):
        open_checkpoint(folder)
