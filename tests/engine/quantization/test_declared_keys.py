"""Every key of a quantization configuration is honoured or refused: each is changed in turn, and the weights must be
those that the reference would read, or the checkpoint must be refused by name of the key."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import quantization_config as reference

from penstock.engine.loading import quantization_keys as rules
from penstock.engine.loading.checkpoint import open_checkpoint
from penstock.engine.loading.keys import KeyRules
from penstock.errors import CheckpointError
from tests.engine.harness import make_engine
from tests.engine.quantization.layouts import LAYOUTS, Array, fp8_tiles, gptq, tensor, write
from tests.engine.tiny import write_checkpoint

METHODS: dict[str, tuple[str, KeyRules, Any]] = {
    "gptq": ("gptq", rules.GPTQ, reference.GPTQConfig),
    "awq": ("awq", rules.AWQ, reference.AwqConfig),
    "fp8": ("fp8-tiles", rules.FP8, reference.FineGrainedFP8Config),
}
INERT_VALUES: list[Any] = [True, "x"]
QUICK_VALUES: list[Any] = [None, True, 0, 8, 64, "", "gptq_v2", "marlin", [64, 64], {"a": 1}]
ALL_VALUES: list[Any] = [
    *QUICK_VALUES, False, 1, 2, 3, 16, -1, -2, 100, 0.5, "gptq", "gemv", "fp4", "ue8m0", "static", "auto", [],
    ["lm_head"], [32], [0, 0], [[]], {}, {".*": {"bits": 8}},
]  # fmt: skip
MEANINGFUL = {
    "bits",
    "w_bit",
    "group_size",
    "q_group_size",
    "format",
    "checkpoint_format",
    "version",
    "weight_block_size",
}
"""Keys whose value says how the numbers are stored: another value gives other weights, or a refusal."""
SCHEME = {
    "num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "strategy": None, "block_structure": None,
    "dynamic": False, "actorder": None, "scale_dtype": None, "zp_dtype": None, "observer": None, "observer_kwargs": {},
}  # fmt: skip
"""`QuantizationArgs` of compressed-tensors, with its defaults."""
COMPRESSED = (
    "config_groups", "quant_method", "kv_cache_scheme", "format", "quantization_status", "global_compression_ratio",
    "ignore", "moe_sparsity_config", "sparsity_config", "transform_config", "version",
)  # fmt: skip
"""`QuantizationConfig` of compressed-tensors, and what it writes beside it."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("dense"), spread=0.5, num_hidden_layers=1)


def change(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def weights(folder: Path, names: list[str]) -> list[Array] | None:
    """None where the checkpoint is refused."""
    try:
        checkpoint = open_checkpoint(folder)
        return [checkpoint.tensor(name).double().numpy() for name in names]
    except CheckpointError:
        return None


def close(some: list[Array], others: list[Array]) -> bool:
    return all(a.shape == b.shape and np.allclose(a, b, rtol=1e-6) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_every_key_of_the_reference_is_declared(method: str) -> None:
    _, declared, cls = METHODS[method]
    parents = [c for c in cls.__mro__ if "__init__" in vars(c) and c is not object]
    keys = {key for c in parents for key in inspect.signature(c.__init__).parameters} - {"self", "kwargs", "args"}
    known = {*declared.read, *declared.limited, *declared.inert, *declared.reference}
    assert keys <= known | {"quant_method"}


@pytest.mark.parametrize("values_tried", [QUICK_VALUES, pytest.param(ALL_VALUES, marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("method", METHODS)
def test_each_key_is_honoured_or_refused(method: str, values_tried: list[Any], dense: Path, tmp_path: Path) -> None:
    layout, declared, _ = METHODS[method]
    few, _, values = write(dense, layout, tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    settings = {key: value for key, value in LAYOUTS[layout][0].items() if key != "version"}
    change(few, settings)
    stored = [values[name]]
    assert close(weights(few, [name]) or [], stored)
    for key in sorted({*declared.read, *declared.limited, *declared.inert, *declared.reference} - {"quant_method"}):
        for value in INERT_VALUES if key in declared.inert and values_tried is QUICK_VALUES else values_tried:
            change(few, {**settings, key: value})
            found = weights(few, [name])
            if found is None:
                with pytest.raises(CheckpointError) as error:
                    open_checkpoint(few).tensor(name)
                assert key in str(error.value) or key in MEANINGFUL
            elif key in MEANINGFUL and value not in (None, "", "gptq", settings.get(key)):
                # Older names are hidden by the newer ones, which these settings have.
                assert key in ("w_bit", "q_group_size") or not close(found, stored), (key, value)
            else:
                assert close(found, stored), (key, value)


@pytest.mark.parametrize(
    ("layout", "settings", "word"),
    [
        ("gptq", {"is_marlin_format": True}, "is_marlin_format"),
        ("gptq", {"adapter": {"path": "x", "rank": 8}}, "adapter"),
        ("gptq", {"rotation": "hadamard"}, "rotation"),
        ("gptq", {"pack_dtype": "int8"}, "pack_dtype"),
        ("gptq", {"format": "bitblas"}, "format"),
        ("gptq", {"a_switch_of_tomorrow": True}, "a_switch_of_tomorrow"),
        ("awq", {"zero_point": False}, "zero_point"),
        ("awq", {"version": "llm-awq"}, "llm-awq"),
        ("fp8-tiles", {"expert_dtype": "nf4"}, "expert_dtype"),
        ("fp8-tiles", {"weight_block_size": [128]}, "weight_block_size"),
        ("fp8-tiles", {"weight_block_size": None}, "names no tiles"),
        ("packed", {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config"),
        ("packed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("packed", {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme"),
        ("packed", {"moe_sparsity_config": {"method": "prune"}}, "moe_sparsity_config"),
        ("packed", {"format": "marlin-24"}, "marlin-24"),
        ("packed", {"config_groups": {"W4A16": ["Linear"]}}, "preset"),
        ("packed", {"config_groups": []}, "config_groups"),
        ("fp8", {"format": "dense"}, "dense"),
        ("fp8", [], "quantization_config"),
    ],
)
def test_what_cannot_be_honoured_is_named(layout: str, settings: Any, word: str, dense: Path, tmp_path: Path) -> None:
    few, _, values = write(dense, layout, tmp_path)
    whole = {**LAYOUTS[layout][0], **settings} if isinstance(settings, dict) else [1]
    change(few, whole)
    with pytest.raises(CheckpointError, match=word):
        checkpoint = open_checkpoint(few)
        [checkpoint.tensor(name) for name in values]


@pytest.mark.parametrize("layout", ["packed", "int8", "fp8"])
def test_each_key_of_a_compressed_scheme_is_honoured_or_refused(layout: str, dense: Path, tmp_path: Path) -> None:
    few, _, values = write(dense, layout, tmp_path)
    names = [name for name in values if "down_proj" in name]
    stored, settings = [values[name] for name in names], LAYOUTS[layout][0]
    scheme = settings["config_groups"]["group_0"]
    told = {"num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "actorder", "dynamic"}
    values_of = {
        "num_bits": [2, 4, 6, 8, 16], "type": ["int", "float"], "symmetric": [True, False],
        "strategy": ["tensor", "channel", "group", "block", "tensor_group", "token"], "dynamic": [False, True, "local"],
        "actorder": [None, "weight", "group", True], "group_size": [-1, 16, 32, 64, 0], "observer": ["minmax", "mse"],
        "block_structure": [None, [32, 32], "32x32", "x"], "scale_dtype": [None, "torch.float8_e8m0fnu"],
    }  # fmt: skip
    for key, default in SCHEME.items():
        for value in values_of.get(key, [default, "x"]):
            change(
                few, settings | {"config_groups": {"group_0": scheme | {"weights": scheme["weights"] | {key: value}}}}
            )
            found = weights(few, names)
            assert found is None or close(found, stored), (key, value)
            if found is None:
                assert key in told, (key, value)
    for key in COMPRESSED:
        for value in [None, {}, [], {"a": {"b": 1}}, "x", 3]:
            if key in ("config_groups", "quant_method", "format") and not value:
                continue
            change(few, settings | {key: value})
            found = weights(few, names)
            assert found is None or close(found, stored), (key, value)
    for part in ("input_activations", "output_activations"):
        for bits in (4, 8):
            changed = scheme | {part: {"num_bits": bits, "type": "int", "dynamic": True, "strategy": "token"}}
            change(few, settings | {"config_groups": {"group_0": changed}})
            assert (weights(few, names) is None) == (bits == 4 or part == "output_activations")


def test_matrices_with_bits_and_groups_of_their_own(dense: Path, tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: the down matrix has 8 bits in groups of 16, the key matrix is not quantized."""
    few, _, values = write(dense, "gptq", tmp_path)
    tensors, base = load_file(few / "model.safetensors"), "model.layers.0.mlp.down_proj."
    plain = load_file(dense / "model.safetensors")
    made = gptq(plain[f"{base}weight"].double().numpy(), bits=8, group=16)
    tensors |= {f"{base}{suffix}": part.contiguous() for suffix, part in made.tensors.items()}
    key = "model.layers.0.self_attn.k_proj."
    tensors = {name: part for name, part in tensors.items() if not name.startswith(key)}
    tensors[f"{key}weight"] = plain[f"{key}weight"]
    save_file(tensors, few / "model.safetensors")
    patterns = {r"+:.*down_proj": {"bits": 8, "group_size": 16}, r"-:.*k_proj": {}}
    change(few, LAYOUTS["gptq"][0] | {"dynamic": patterns})
    expected = values | {f"{base}weight": made.dense, f"{key}weight": plain[f"{key}weight"].double().numpy()}
    assert close(weights(few, list(expected)) or [], list(expected.values()))
    make_engine(few)
    del tensors[f"{base}g_idx"]
    save_file(tensors, few / "model.safetensors")
    with pytest.raises(CheckpointError, match="dynamic"):
        open_checkpoint(few).tensor(f"{base}weight")
    change(few, LAYOUTS["gptq"][0])
    with pytest.raises(CheckpointError, match="do not fit together"):
        open_checkpoint(few).tensor(f"{base}weight")


def test_scales_are_applied_to_every_kind_of_float8(dense: Path, tmp_path: Path) -> None:
    few, _, _ = write(dense, "fp8-tiles", tmp_path)
    tensors, plain = load_file(few / "model.safetensors"), load_file(dense / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    made = fp8_tiles(plain[name].double().numpy(), dtype=torch.float8_e5m2)
    save_file(tensors | {name: made.tensors["weight"], f"{name}_scale_inv": made.tensors["weight_scale_inv"]},
              few / "model.safetensors")  # fmt: skip
    assert close(weights(few, [name]) or [], [made.dense])
    make_engine(few)
    without = {key: part for key, part in tensors.items() if key != f"{name}_scale_inv"}
    save_file(without | {name: made.tensors["weight"]}, few / "model.safetensors")
    with pytest.raises(CheckpointError, match="no scale"):
        make_engine(few)


def test_one_scale_for_a_whole_matrix_under_either_name(dense: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    for suffix, settings in (("_scale_inv", {"weight_block_size": None}), ("_scale", {})):
        few, _, _ = write(dense, "fp8-tiles", tmp_path / suffix)
        tensors = {key: part for key, part in load_file(few / "model.safetensors").items() if "scale" not in key}
        scales = {f"{key}{suffix}": torch.tensor(0.25) for key, part in tensors.items() if part.itemsize == 1}
        save_file(tensors | scales, few / "model.safetensors")
        change(few, {"quant_method": "fp8", **settings})
        assert close(weights(few, [name]) or [], [tensors[name].double().numpy() * 0.25])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu, torch.bfloat16])
def test_scales_that_are_powers_of_two_in_any_type(dtype: torch.dtype, dense: Path, tmp_path: Path) -> None:
    few, _, _ = write(dense, "fp8-tiles", tmp_path)
    tensors, name = load_file(few / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
    scale = torch.tensor([[0.5, 2.0, 0.25], [4.0, 1.0, 0.125]])
    stored = (scale.log2() + 127).to(torch.uint8) if dtype is torch.uint8 else scale.to(dtype)
    save_file(tensors | {f"{name}_scale_inv": stored}, few / "model.safetensors")
    wide = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert close(weights(few, [name]) or [], [(tensors[name].float() * wide).double().numpy()])
    save_file(tensors | {f"{name}_scale_inv": scale.int()}, few / "model.safetensors")
    assert weights(few, [name]) is None


def test_a_quantized_checkpoint_that_does_not_say_so_is_refused(dense: Path, tmp_path: Path) -> None:
    few, _, _ = write(dense, "fp8", tmp_path)
    (few / "config.json").write_text((dense / "config.json").read_text())
    with pytest.raises(CheckpointError, match="no quantization_config"):
        open_checkpoint(few)


def test_weights_saved_before_they_were_compressed_are_refused(dense: Path, tmp_path: Path) -> None:
    for layout, kind in (("fp8", "not FP8"), ("int8", "not int8")):
        few, _, values = write(dense, layout, tmp_path)
        tensors, name = load_file(few / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
        save_file(tensors | {name: tensor(values[name], torch.float32)}, few / "model.safetensors")
        with pytest.raises(CheckpointError, match=kind):
            make_engine(few)


@pytest.mark.slow
def test_the_schema_of_compressed_tensors_is_the_one_walked_here() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    assert set(quantization.QuantizationArgs.model_fields) == set(SCHEME)
    assert set(quantization.QuantizationConfig.model_fields) <= set(COMPRESSED)
