"""FP8 checkpoints in the layouts people publish: read exactly, refused when they are something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.loading.checkpoint import open_checkpoint
from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.errors import CheckpointError
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint

LAYOUTS: dict[str, dict[str, Any]] = {
    "row": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"0": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8}}},
    },
    "tensor": {"quant_method": "fp8"},
    "tile": {"quant_method": "fp8", "weight_block_size": [32, 32]},
}


def to_fp8(folder: Path, layout: str) -> dict[str, torch.Tensor]:
    """Rewrite a checkpoint's linears in FP8; what they then stand for."""
    tensors = load_file(folder / "model.safetensors")
    meaning: dict[str, torch.Tensor] = {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight = tensors[name].float()
        if layout == "row":
            scale = weight.abs().amax(1, keepdim=True) / 448
            wide, key = scale, f"{name}_scale"
        elif layout == "tensor":
            scale = weight.abs().max() / 448
            wide, key = scale, f"{name}_scale"
        else:
            tiles = weight.unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
            scale = tiles.abs().amax((1, 3)) / 448
            wide, key = scale.repeat_interleave(32, 0).repeat_interleave(32, 1), f"{name}_scale_inv"
        tensors[name] = (weight / wide).to(torch.float8_e4m3fn)
        tensors[key] = scale.clone()
        meaning[name] = tensors[name].float() * wide
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": LAYOUTS[layout]}))
    return meaning


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_mean_what_they_say(tmp_path: Path, layout: str) -> None:
    meaning = to_fp8(write_checkpoint("llama-gqa", tmp_path), layout)
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, Fp8Checkpoint)
    assert not [name for name in checkpoint.names() if "scale" in name]
    for name, expected in meaning.items():
        torch.testing.assert_close(checkpoint.tensor(name).float(), expected, rtol=2**-8, atol=1e-6)
        stored = checkpoint.stored(name)
        if layout == "tile":
            assert stored is None
        else:
            assert stored is not None and stored[0].dtype == torch.float8_e4m3fn
            torch.testing.assert_close(stored[0].float() * stored[1][:, None], expected)


def test_it_runs_on_cpu_as_the_same_numbers_would(tmp_path: Path) -> None:
    fp8, plain = tmp_path / "fp8", tmp_path / "plain"
    meaning = to_fp8(write_checkpoint("llama-gqa", fp8), "row")
    write_checkpoint("llama-gqa", plain)
    tensors = load_file(plain / "model.safetensors")
    save_file(tensors | {n: w.to(torch.bfloat16) for n, w in meaning.items()}, plain / "model.safetensors")
    prompt = list(range(40))
    expected = generate(make_engine(plain), greedy("a", prompt, 12))
    assert generate(make_engine(fp8), greedy("a", prompt, 12)) == expected


def test_kv_scales_are_read_where_they_are(tmp_path: Path) -> None:
    to_fp8(write_checkpoint("llama-gqa", tmp_path), "row")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.1.self_attn.k_scale": torch.tensor(0.25)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, Fp8Checkpoint)
    assert checkpoint.kv_scale("model.layers.1.self_attn.") == (0.25, 1.0)
    assert checkpoint.kv_scale("model.layers.0.self_attn.") == (1.0, 1.0)


def test_a_missing_scale_is_an_incomplete_checkpoint(tmp_path: Path) -> None:
    to_fp8(write_checkpoint("llama-gqa", tmp_path), "row")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.weight_scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no scale"):
        make_engine(tmp_path)
