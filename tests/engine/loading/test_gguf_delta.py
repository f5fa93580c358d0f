"""Qwen3-Next and Qwen3.5 in GGUF files, as llama.cpp's converter writes them now and wrote them before."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from penstock.bench.soak.engines import verify_everything
from penstock.engine.loading.checkpoint import GGUFCheckpoint, SafetensorsCheckpoint
from penstock.errors import CheckpointError
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.loading.gguf_files import write_gguf
from tests.engine.parallel.threads import threaded_engine
from tests.engine.speculative.forced import eager_engine
from tests.engine.speculative.mtp_layers import write_mtp
from tests.engine.tiny import write_checkpoint

ARCHITECTURES = {"qwen3-next": "qwen3next", "qwen3.5": "qwen35", "qwen3.5-moe": "qwen35moe"}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
DRAFTING = {
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}
REQUEST = greedy("r", [i * 7 % 199 for i in range(60)], 20)


def convert(
    folder: Path,
    arch: str,
    *,
    together: bool = False,
    quantized: gguf.GGMLQuantizationType | None = None,
    **changed: Any,
) -> Path:
    """`together`: projections by key head in one tensor, as older files of Qwen3-Next have them."""
    config = json.loads((folder / "config.json").read_text())
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    k_dim, v_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    ratio, tensors, stacks = values // keys, dict[str, np.ndarray](), dict[str, dict[int, np.ndarray]]()

    def tiled(tensor: np.ndarray, size: int, before: int = 0, axis: int = 0) -> np.ndarray:
        """Value heads of Qwen3.5: the first of each key head first."""
        if arch == "qwen3next":
            return tensor
        tensor = np.moveaxis(tensor, axis, 0)
        heads = tensor[before:].reshape(keys, ratio, size, *tensor.shape[1:]).swapaxes(0, 1)
        return np.moveaxis(np.concatenate((tensor[:before], heads.reshape(tensor[before:].shape))), 0, axis)

    stored, layers, drafting = load_file(folder / "model.safetensors"), config["num_hidden_layers"], 0
    for name, tensor in stored.items():
        stem, _, suffix = name.rpartition(".")
        if stem.startswith("mtp."):
            drafting = 1
        if stem in DRAFTING:
            stem = f"blk.{layers}.{DRAFTING[stem]}"
            tensors[f"{stem}.weight"] = tensor if stem.endswith("eh_proj") else tensor + 1
            continue
        stem = stem.replace("mtp.layers.0.", f"model.layers.{layers}.")
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + 1
        if stem in TOP:
            tensors[f"{TOP[stem]}.weight"] = tensor
            continue
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem)
        assert match is not None, name
        at, part = f"blk.{match[1]}.", match[2]
        expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)_proj", part)
        if expert is not None:
            stacks.setdefault(f"{at}ffn_{expert[2]}_exps.weight", {})[int(expert[1])] = tensor
        elif suffix == "A_log":
            tensors[f"{at}ssm_a"] = -np.exp(tiled(tensor, 1))
        elif suffix == "dt_bias":
            tensors[f"{at}ssm_dt.bias"] = tiled(tensor, 1)
        elif part == "linear_attn.in_proj_qkvz" and not together:
            sizes = np.cumsum([k_dim, k_dim, ratio * v_dim])
            parts = np.split(tensor.reshape(keys, -1, tensor.shape[1]), sizes, axis=1)
            q, k, v, z = (one.reshape(-1, tensor.shape[1]) for one in parts)
            tensors |= {f"{at}attn_qkv.weight": np.concatenate((q, k, v)), f"{at}attn_gate.weight": z}
        else:
            if part == "mlp.shared_expert_gate":
                tensor = tensor.reshape(-1)
            elif part == "linear_attn.conv1d":
                tensor = tiled(tensor[:, 0], v_dim, 2 * keys * k_dim)
            elif part == "linear_attn.in_proj_qkv":
                tensor = tiled(tensor, v_dim, 2 * keys * k_dim)
            elif part == "linear_attn.in_proj_z":
                tensor = tiled(tensor, v_dim)
            elif part in ("linear_attn.in_proj_a", "linear_attn.in_proj_b"):
                tensor = tiled(tensor, 1)
            elif part == "linear_attn.out_proj":
                tensor = tiled(tensor, v_dim, axis=1)
            tensors[f"{at}{NAMES[part]}.{suffix}"] = np.ascontiguousarray(tensor)
    tensors |= {name: np.stack([stack[i] for i in sorted(stack)]) for name, stack in stacks.items()}
    given: dict[str, Any] = {
        "block_count": layers + drafting,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
        "rope.dimension_count": int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": k_dim,
        "ssm.group_count": keys,
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * v_dim,
        "full_attention_interval": config["layer_types"].index("full_attention") + 1,
    }
    if "intermediate_size" in config:
        given["feed_forward_length"] = config["intermediate_size"]
    if config.get("num_experts"):
        given |= {"expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"]}
        given["expert_feed_forward_length"] = config["moe_intermediate_size"]
        given["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if arch != "qwen3next":
        given["rope.dimension_sections"] = [11, 11, 10, 0]
    given |= {"nextn_predict_layers": drafting} if drafting else {}
    given |= changed
    metadata = {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in given.items()}}
    plain = ("conv1d", "norm", "ssm_a", "ssm_dt", "gate_inp")
    kinds = {
        name: quantized
        for name, tensor in tensors.items()
        if quantized is not None
        and tensor.ndim > 1
        and tensor.shape[-1] % 32 == 0
        and not any(word in name for word in plain)
    }
    return write_gguf(folder / "model.gguf", metadata, tensors, kinds)


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return write_checkpoint(request.param, tmp_path_factory.mktemp("model")), ARCHITECTURES[request.param]


def test_the_file_gives_the_tokens_of_the_checkpoint(family: tuple[Path, str]) -> None:
    folder, arch = family
    expected = generate(make_engine(folder), REQUEST)
    assert generate(make_engine(convert(folder, arch)), REQUEST) == expected


def test_projections_in_one_tensor(tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3-next", tmp_path)
    expected = generate(make_engine(folder), REQUEST)
    assert generate(make_engine(convert(folder, "qwen3next", together=True)), REQUEST) == expected


def test_tensors_are_those_of_the_checkpoint(family: tuple[Path, str]) -> None:
    """Where they are stored alike."""
    folder, arch = family
    converted, plain = GGUFCheckpoint(convert(folder, arch)), SafetensorsCheckpoint(folder)
    shared = [name for name in converted.names() if name in plain.names()]
    assert sum("linear_attn" in name for name in shared) >= 5
    for name in shared:
        found, wanted = converted.tensor(name), plain.tensor(name)
        assert found.shape == wanted.shape, name
        assert (found - wanted).abs().max() < 1e-6, name


@pytest.mark.slow
def test_ranks_cut_the_file(family: tuple[Path, str]) -> None:
    folder, arch = family
    expected = generate(make_engine(folder), REQUEST)
    file = convert(folder, arch)
    for grid in ((2, 1), (1, 2)):
        with threaded_engine(file, *grid) as engine:
            assert generate(engine, REQUEST) == expected


@pytest.mark.slow
def test_quantized_files_run(family: tuple[Path, str]) -> None:
    folder, arch = family
    file = convert(folder, arch, quantized=gguf.GGMLQuantizationType.Q8_0)
    tokens = generate(make_engine(file), REQUEST)["r"]
    assert len(tokens) == 20
    with threaded_engine(file, 2, 1) as engine:
        assert len(generate(engine, REQUEST)["r"]) == 20


@pytest.mark.parametrize(
    "family", ["qwen3.5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3.5-moe", "qwen3-next"))]
)
def test_the_layer_that_drafts(family: str, tmp_path: Path) -> None:
    """The converter counts it with the others: it is no part of the decoder, and drafts with `speculation: mtp`."""
    folder = write_mtp(family, tmp_path)
    file = convert(folder, ARCHITECTURES[family])
    expected = generate(make_engine(folder), REQUEST)
    assert generate(make_engine(file), REQUEST) == expected
    alone, engine = (eager_engine(source, speculation="mtp") for source in (folder, file))
    assert generate(engine, REQUEST) == generate(alone, REQUEST) == expected
    assert engine.load_snapshot().accepted_tokens == alone.load_snapshot().accepted_tokens
    assert engine.load_snapshot().draft_tokens > 5


@pytest.mark.slow
def test_ranks_draft_from_the_file(tmp_path: Path) -> None:
    file = convert(write_mtp("qwen3.5-moe", tmp_path), "qwen35moe")
    alone = eager_engine(file, speculation="mtp", num_blocks=100)
    expected = generate(alone, REQUEST)
    for grid in ((2, 1), (1, 2)):
        with threaded_engine(file, *grid, speculation="mtp", num_blocks=100) as engine:
            assert engine.speculation is not None
            verify_everything(engine.speculation)
            assert generate(engine, REQUEST) == expected
            assert engine.load_snapshot().accepted_tokens == alone.load_snapshot().accepted_tokens


def test_what_cannot_be_run_exactly_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint("qwen3.5-moe", tmp_path)
    with pytest.raises(CheckpointError, match="nextn_predict_layers is 4 of 4 layers"):
        GGUFCheckpoint(convert(folder, "qwen35moe", nextn_predict_layers=4))
    with pytest.raises(CheckpointError, match=r"ssm\.inner_size"):
        GGUFCheckpoint(convert(folder, "qwen35moe", **{"ssm.time_step_rank": 7}))
