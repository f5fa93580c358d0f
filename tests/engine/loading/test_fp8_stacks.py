"""Stacks of experts in FP8 with scales beside them: the tokens are those of the reference with the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.errors import CheckpointError
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.multimodal import tiny_model, write_as_named
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference, write_checkpoint

PROMPT = [29 * i % 199 for i in range(50)]
STACKS = ("experts.gate_up_proj", "experts.down_proj", "input_linear.weight", "output_linear.weight")
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float",
        "strategy": "channel", "symmetric": True, "dynamic": False}}},
}  # fmt: skip


def tiled(rows: int, columns: int) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """FP8 numbers of a stack [experts, out, in], a scale for each tile, and what both mean."""

    def quantize(stack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        experts, out, inputs = stack.shape
        down, across = -(-out // rows), -(-inputs // columns)
        padded = torch.zeros(experts, down * rows, across * columns)
        padded[:, :out, :inputs] = stack
        scale = padded.view(experts, down, rows, across, columns).abs().amax((2, 4)) / 448
        spread = scale.repeat_interleave(rows, 1).repeat_interleave(columns, 2)[:, :out, :inputs]
        quants = (stack / spread).to(torch.float8_e4m3fn)
        return quants, scale, quants.float() * spread

    return quantize


def by_expert(stack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = stack.abs().amax((1, 2), keepdim=True) / 448
    quants = (stack / scale).to(torch.float8_e4m3fn)
    return quants, scale, quants.float() * scale


def by_row(stack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = stack.abs().amax(2, keepdim=True) / 448
    quants = (stack / scale).to(torch.float8_e4m3fn)
    return quants, scale, quants.float() * scale


def in_fp8(folder: Path, settings: dict[str, Any], quantize: Any, suffix: str, *, turned: bool = False) -> None:
    """Stores the stacks of a checkpoint in FP8. `turned`: inputs before outputs, as in the first releases."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(STACKS)]:
        quants, scale, _ = quantize(tensors[name])
        turn = (lambda x: x.transpose(1, 2).contiguous()) if turned else Tensor.contiguous
        tensors[name], tensors[name + suffix] = turn(quants), turn(scale)
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def rounded(model: Any, quantize: Any) -> Any:
    """The model with the numbers that the FP8 checkpoint means."""
    stacks = [parameter for name, parameter in model.named_parameters() if name.endswith(STACKS)]
    assert stacks, "nothing to round"
    for parameter in stacks:
        parameter.data = quantize(parameter.data)[2]
    return model


@pytest.mark.parametrize("turned", [False, True], ids=["as read", "as published"])
@pytest.mark.parametrize(
    ("quantize", "settings"),
    [
        (tiled(16, 32), {"quant_method": "fp8", "weight_block_size": [16, 32]}),
        (tiled(48, 48), {"quant_method": "fp8", "weight_block_size": [48, 48]}),
        pytest.param(by_expert, {"quant_method": "fp8", "weight_block_size": None}, marks=pytest.mark.slow),
    ],
    ids=["tiles", "tiles cut at the edge", "a scale for each expert"],
)
def test_qwen3_vl_moe(quantize: Any, settings: dict[str, Any], turned: bool, tmp_path: Path) -> None:
    model = tiny_model("qwen3_vl_moe")
    in_fp8(write_as_named(model, tmp_path), settings, quantize, "_scale_inv", turned=turned)
    got = generate(make_engine(tmp_path), greedy("a", PROMPT, 12))["a"]
    with torch.inference_mode():
        logits = rounded(model, quantize)(torch.tensor([PROMPT + got[:-1]])).logits[0, len(PROMPT) - 1 :]
    assert logits.argmax(-1).tolist() == got
    with threaded_engine(tmp_path, 2, 1, expert_parallel=True) as ranks:
        assert generate(ranks, greedy("a", PROMPT, 12))["a"] == got


def test_granite_with_a_scale_for_each_row(tmp_path: Path) -> None:
    plain = write_checkpoint("granite-moe", tmp_path / "plain")
    fp8 = write_checkpoint("granite-moe", tmp_path / "fp8")
    in_fp8(fp8, CHANNELS, by_row, "_scale")
    reference = Reference(plain)
    rounded(reference.model, by_row)
    got = generate(make_engine(fp8), greedy("a", PROMPT, 12))["a"]
    assert reference.agrees(PROMPT, got)
    with threaded_engine(fp8, 2, 1) as ranks:
        assert generate(ranks, greedy("a", PROMPT, 12))["a"] == got


def test_scales_that_gate_and_up_share_are_refused(tmp_path: Path) -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    in_fp8(write_as_named(tiny_model("qwen3_vl_moe"), tmp_path), settings, tiled(64, 64), "_scale_inv")
    with pytest.raises(CheckpointError, match="2 rows of scales for 96 rows of gate and up"):
        make_engine(tmp_path)


def test_a_stack_without_scales_is_refused(tmp_path: Path) -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    in_fp8(write_as_named(tiny_model("qwen3_vl_moe"), tmp_path), settings, tiled(16, 32), "_lost")
    with pytest.raises(CheckpointError, match="FP8 but has no scale"):
        make_engine(tmp_path)
