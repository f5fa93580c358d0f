"""Gemma 4 in GGUF files, all sizes, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from penstock.engine.loading.checkpoint import GGUFCheckpoint, open_checkpoint
from penstock.engine.loading.expert_stacks import with_stacks
from penstock.engine.loading.gguf import GGUFFile
from penstock.engine.models.families import FAMILIES, read_config
from penstock.errors import CheckpointError
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.loading.gguf_files import write_gguf
from tests.engine.loading.test_gguf_families import GEMMA_NAMES, NAMES
from tests.engine.tiny import write_checkpoint
from tests.engine.tiny.common import FULL, SLIDING

TOP = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}
OF_LAYER = {
    **{name: theirs for name, theirs in NAMES.items() if name.startswith(("self_attn", "mlp", "input"))},
    **GEMMA_NAMES,
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
}
WHOLE = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
SIZES = ("gemma4", "gemma4-experts", "gemma4-small")
SMALL = [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL]
PROMPT = [23 * i % 199 for i in range(150)]


def write(family: str, folder: Path) -> Path:
    kinds = {"layer_types": SMALL} if family == "gemma4-small" else {}
    return write_checkpoint(family, folder, final_logit_softcapping=8.0, **kinds)


def convert(
    folder: Path,
    *,
    quantized: gguf.GGMLQuantizationType | None = None,
    parts: bool = False,
    more: dict[str, np.ndarray] | None = None,
    leave_out: tuple[str, ...] = (),
    **changed: Any,
) -> Path:
    """`parts`: gate and up of experts as two stacks. `more`: further tensors. `quantized`: the type of all matrices."""
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, suffix = name.removeprefix("model.").rpartition(".")
        layer = re.fullmatch(r"layers\.(\d+)\.(.*)", name.removeprefix("model."))
        if layer is None:
            tensors[f"{TOP.get(stem, 'output')}.{suffix}"] = tensor
        elif layer[2] in WHOLE:
            tensors[f"blk.{layer[1]}.{WHOLE[layer[2]]}"] = tensor
        else:
            part, _, suffix = layer[2].rpartition(".")
            tensors[f"blk.{layer[1]}.{OF_LAYER[part]}.{suffix}"] = tensor
    if parts:
        for name in [name for name in tensors if "gate_up" in name]:
            gate, up = np.split(tensors.pop(name), 2, axis=1)
            tensors[name.replace("gate_up", "gate")] = np.ascontiguousarray(gate)
            tensors[name.replace("gate_up", "up")] = np.ascontiguousarray(up)
    layers, kinds, shared = config["num_hidden_layers"], config["layer_types"], config["num_kv_shared_layers"]
    by_layer = [config["per_layer_config"].get(str(layer), {}) for layer in range(layers)]
    wide = by_layer[kinds.index(FULL)]["head_dim"]
    ropes, width = config["rope_parameters"], config["intermediate_size"]
    rotated = int(wide * ropes[FULL]["partial_rotary_factor"] / 2)
    tensors["rope_freqs.weight"] = np.array([1.0] * rotated + [1e30] * (wide // 2 - rotated), np.float32)
    keys: dict[str, Any] = {
        "block_count": layers,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "feed_forward_length": width,
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": [own.get("num_key_value_heads", config["num_key_value_heads"]) for own in by_layer],
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.shared_kv_layers": shared,
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == SLIDING for kind in kinds],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base": ropes[FULL]["rope_theta"],
        "rope.freq_base_swa": ropes[SLIDING]["rope_theta"],
    }
    if len({*keys["attention.head_count_kv"]}) == 1:
        keys["attention.head_count_kv"] = config["num_key_value_heads"]
    if config["use_double_wide_mlp"]:
        keys["feed_forward_length"] = [width * (1 + (layer >= layers - shared)) for layer in range(layers)]
    if config["enable_moe_block"]:
        keys |= {"expert_count": config["num_experts"], "expert_used_count": config["top_k_experts"]}
        keys["expert_feed_forward_length"] = config["moe_intermediate_size"]
    keys = {key: value for key, value in (keys | changed).items() if key not in leave_out}
    tensors = {name: data for name, data in (tensors | (more or {})).items() if name not in leave_out}
    few = {name: quantized for name, data in tensors.items() if quantized and data.ndim > 1 and not data.shape[-1] % 32}
    metadata = {"general.architecture": "gemma4", **{f"gemma4.{key}": value for key, value in keys.items()}}
    return write_gguf(folder / "model.gguf", metadata, tensors, few)


@pytest.mark.parametrize("family", SIZES)
def test_configuration_and_tensors_are_those_of_the_folder(family: str, tmp_path: Path) -> None:
    folder = write(family, tmp_path)
    theirs = with_stacks(open_checkpoint(folder), FAMILIES["gemma4_text"].names)
    for parts in (False, True) if family == "gemma4-experts" else (False,):
        ours = GGUFCheckpoint(convert(folder, parts=parts))
        assert read_config(ours.config) == read_config(theirs.config)
        assert set(ours.names()) == set(theirs.names())
        for name in theirs.names():
            assert torch.equal(ours.tensor(name), theirs.tensor(name)), name


@pytest.mark.parametrize("family", [pytest.param("gemma4", marks=pytest.mark.slow), *SIZES[1:]])
def test_a_file_gives_the_tokens_of_the_folder(family: str, tmp_path: Path) -> None:
    """With the matrices of keys and values that published files have in layers that share those of others."""
    folder = write(family, tmp_path)
    expected = generate(make_engine(folder), greedy("a", PROMPT, 16))
    rows = {"attn_k.weight": (32, 64), "attn_v.weight": (32, 64), "attn_k_norm.weight": (16,)}
    unread = {f"blk.4.{name}": np.ones(shape, np.float32) for name, shape in rows.items()}
    file = convert(folder, more=unread if family == "gemma4-small" else None)
    assert generate(make_engine(file), greedy("a", PROMPT, 16)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", SIZES)
def test_a_quantized_file_runs(family: str, tmp_path: Path) -> None:
    file = convert(write(family, tmp_path), quantized=gguf.GGMLQuantizationType.Q8_0)
    assert len(generate(make_engine(file), greedy("a", PROMPT, 8))["a"]) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.key_length_swa": 0}, "key_length_swa is 0"),
        ({"attention.value_length_swa": 8}, "value_length_swa 8"),
        ({"rope.dimension_count_swa": 8}, "dimension_count_swa 8"),
        ({"attention.shared_kv_layers": 9}, "shared_kv_layers is 9 of 6"),
        ({"attention.sliding_window": 0}, "sliding_window is missing"),
        ({"leave_out": ("attention.sliding_window_pattern",)}, "sliding_window_pattern is missing"),
        ({"attention.sliding_window_pattern": [True, False]}, "2 entries for 6 layers"),
        ({"attention.head_count_kv": [2, 2, 1, 2, 2, 1]}, "whose values are their keys"),
        ({"feed_forward_length": [96, 96, 192, 192, 192, 192]}, "twice as wide"),
        ({"attention.scale": 0.5}, "attention.scale is 0.5"),
        ({"rope.scaling.factor": 2.0}, "rope_freqs"),
        ({"leave_out": ("rope_freqs.weight",)}, "must have rope_freqs"),
        ({"more": {"rope_freqs.weight": np.array([1.0, 2.0] * 8, np.float32)}}, "must be ones, and 1e30 behind them"),
    ],
)
def test_what_cannot_be_honoured_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write("gemma4-small", tmp_path)
    with pytest.raises(CheckpointError, match=message):
        GGUFCheckpoint(convert(folder, **changes))


def test_what_files_leave_to_the_reader(tmp_path: Path) -> None:
    folder = write("gemma4", tmp_path)
    found = GGUFCheckpoint(convert(folder, leave_out=("final_logit_softcapping", "rope.freq_base_swa"))).config
    assert found["final_logit_softcapping"] == 30.0
    assert found["rope_parameters"][SLIDING]["rope_theta"] == 10_000.0
    assert GGUFCheckpoint(convert(folder, final_logit_softcapping=0.0)).config["final_logit_softcapping"] is None


def test_turns_end_with_tokens_that_files_have_no_key_for(tmp_path: Path) -> None:
    tokens = [f"t{index}" for index in range(199)]
    tokens[1], tokens[50], tokens[106] = "<eos>", "<|tool_response>", "<turn|>"
    file = convert(write("gemma4", tmp_path))
    more = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 106}
    metadata = {key: value for key, value in GGUFFile(file).metadata.items() if not key.startswith("GGUF")}
    plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in metadata.items()}
    tensors = {"token_embd.weight": np.ones((199, 64), np.float32), "rope_freqs.weight": np.ones(16, np.float32)}
    tensors["blk.2.attn_k.weight"] = np.ones((32, 64), np.float32)
    tensors |= {f"blk.{layer}.attn_norm.weight": np.ones(64, np.float32) for layer in range(4)}
    written = write_gguf(tmp_path / "named.gguf", plain | more, tensors)
    assert GGUFCheckpoint(written).config["eos_token_id"] == [106, 1, 50]
