"""Few-bit checkpoints as published: every layout reads to the values it stands for, runs as they do, stays small."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.engine.loading.checkpoint import open_checkpoint
from penstock.engine.quantization.grids import pick_group, round_int4, round_int8
from penstock.errors import CheckpointError
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.quantization.layouts import LAYOUTS, write
from tests.engine.tiny import Reference, write_checkpoint

PROMPTS = ([7, 1, 190, 33, 4], list(range(40, 75)), [11] * 9)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("dense"), spread=0.5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_weight_has_the_value_the_layout_gives_it(layout: str, dense: Path, tmp_path: Path) -> None:
    few, _, values = write(dense, layout, tmp_path)
    checkpoint = open_checkpoint(few)
    assert set(checkpoint.names()) == set(open_checkpoint(dense).names())
    for name, want in values.items():
        got = checkpoint.tensor(name).double().numpy()
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    assert torch.equal(checkpoint.tensor("model.norm.weight"), open_checkpoint(dense).tensor("model.norm.weight"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_output_is_that_of_the_dense_values_in_a_fraction_of_the_memory(
    layout: str, dense: Path, tmp_path: Path
) -> None:
    few, same, _ = write(dense, layout, tmp_path)
    engine = make_engine(few)
    outputs = generate(engine, *(greedy(str(i), prompt, 12) for i, prompt in enumerate(PROMPTS)))
    reference = Reference(same)
    for i, prompt in enumerate(PROMPTS):
        assert reference.agrees(prompt, outputs[str(i)], tie=0.02)
    whole = make_engine(same, weights="dense")
    layers, dense_layers = engine.runner.decoder.layers, whole.runner.decoder.layers
    size = sum(linear.weight_bytes for layer in layers for linear in layer.linears)
    before = sum(linear.weight_bytes for layer in dense_layers for linear in layer.linears)
    # Blocks of 32 take 5 bits (int4) or 8.5 bits (int8) per weight, FP8 takes 8 and a float32 scale per row or group of
    # 32 inputs; float32 takes 32.
    bits = 9.1 if "fp8-" in layout else 8.6 if "8" in layout else 5.1
    assert size <= before * bits / 32


def test_an_unknown_method_is_refused_by_name(dense: Path, tmp_path: Path) -> None:
    few, _, _ = write(dense, "gptq", tmp_path)
    config = json.loads((few / "config.json").read_text())
    for settings, word in (
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}}, "marlin-24"),
    ):
        (few / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        with pytest.raises(CheckpointError, match=word):
            open_checkpoint(few)


def test_tensors_that_do_not_fit_together_are_refused(dense: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    few, _, _ = write(dense, "gptq", tmp_path)
    tensors = load_file(few / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.scales"
    tensors[name] = tensors[name][:, :8].contiguous()
    save_file(tensors, few / "model.safetensors")
    with pytest.raises(CheckpointError, match="do not fit together"):
        make_engine(few)


def test_rounding_to_nearest_stays_within_half_a_step() -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 128)
    for groups, steps in ((round_int4(weight, 32), 15), (round_int8(weight, 128), 254)):
        cut = weight.reshape(24, -1, groups.group)
        span = cut.amax(-1) - cut.amin(-1) if steps == 15 else 2 * cut.abs().amax(-1)
        error = (groups.dense() - weight).reshape(cut.shape).abs().amax(-1)
        assert bool((error <= span / steps * 0.52).all())


def test_the_largest_group_that_divides_the_inputs_is_taken() -> None:
    assert [pick_group(n) for n in (4096, 576, 96, 48)] == [128, 64, 32, None]
    assert pick_group(4096, 64) == 64


def test_a_dense_checkpoint_is_rounded_to_fp8_at_load(dense: Path) -> None:
    engine, whole = make_engine(dense, weights="fp8"), make_engine(dense, weights="dense")
    for rounded, exact in zip(engine.runner.decoder.layers, whole.runner.decoder.layers, strict=True):
        for few, many in zip(rounded.linears, exact.linears, strict=True):
            assert few.weight_bytes < many.weight_bytes * 8.6 / 32
            x = torch.eye(few.in_features)  # type: ignore[attr-defined]
            torch.testing.assert_close(few(x), many(x), rtol=1 / 16, atol=1e-3)
    assert len(generate(engine, greedy("a", PROMPTS[0], 12))["a"]) == 12
