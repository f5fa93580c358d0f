"""Models with Mamba-2 layers in GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from penstock.engine.loading.checkpoint import GGUFCheckpoint
from penstock.errors import CheckpointError
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.loading.gguf_files import write_gguf
from tests.engine.loading.test_gguf_checkpoint import interleaved
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import write_checkpoint
from tests.engine.tiny.states import ATTENTION, MAMBA

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "granite4, experts": ("granite4-hybrid", "granitehybrid", {}),
    "granite4, dense": ("granite4-hybrid-dense", "granitehybrid", {"time_step_limit": (0.0, float("inf"))}),
    "bamba": ("bamba", "granitehybrid", {}),
    "falcon-h1": ("falcon-h1", "falcon-h1", {}),
    "falcon-h1, no norm": ("falcon-h1", "falcon-h1", {"mamba_rms_norm": False, "num_key_value_heads": 1}),
    "nemotron-h": ("nemotron-h", "nemotron_h", {"mlp_bias": True, "use_bias": True}),
    "nemotron 3": ("nemotron-h-experts", "nemotron_h_moe", {}),
    "nemotron 3, narrow": (
        "nemotron-h-narrow-experts",
        "nemotron_h_moe",
        {"layers_block_type": ["moe", ATTENTION, MAMBA]},
    ),
    "mamba2": ("mamba2", "mamba2", {}),
    "mamba2, tied": ("mamba2-biased", "mamba2", {"time_step_limit": (0.0, float("inf"))}),
}
QUICK = ("granite4, experts", "falcon-h1", "nemotron 3", "mamba2")
TOP = {
    "embed_tokens": "token_embd", "embeddings": "token_embd", "norm": "output_norm", "final_layernorm": "output_norm",
    "norm_f": "output_norm", "lm_head": "output",
}  # fmt: skip
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm",
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    "self_attn.o_proj": "attn_output",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "in_proj": "ssm_in",
    "out_proj": "ssm_out",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
}
ONE_PART = {
    "norm": "attn_norm",
    **{f"mixer.{one}_proj": f"attn_{one}" for one in "qkv"},
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
REQUEST = greedy("r", [i * 7 % 199 for i in range(60)], 20)


def convert(folder: Path, arch: str, quantized: gguf.GGMLQuantizationType | None = None, **changed: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config.get("num_attention_heads", 0), config.get("num_key_value_heads", 0)
    groups = config.get("mamba_n_groups", config.get("n_groups"))
    tensors: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        found = re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\.(.*)", stem)
        if found is None:
            tensors[f"{TOP[stem.rpartition('.')[2]]}.weight"] = _multiplied(config, stem, tensor)
            continue
        at, part = f"blk.{found[1]}.", found[2]
        expert = re.fullmatch(r"mixer\.experts\.(\d+)\.(\w+)_proj", part)
        inner = part.removeprefix("mamba").removeprefix("mixer").removeprefix(".")
        if expert is not None:
            stacks.setdefault(f"{at}ffn_{expert[2]}_exps.weight", {})[int(expert[1])] = tensor
        elif part.startswith(("block_sparse_moe.input", "block_sparse_moe.output", "shared_mlp.")):
            tensors |= {f"{at}{theirs}.weight": one for theirs, one in _granite(config, part, tensor).items()}
        elif suffix == "e_score_correction_bias":
            tensors[f"{at}exp_probs_b.bias"] = tensor
        elif suffix == "A_log":
            tensors[f"{at}ssm_a"] = -np.exp(tensor)[:, None]
        elif suffix == "D":
            tensors[f"{at}ssm_d"] = tensor[:, None]
        elif suffix == "dt_bias":
            tensors[f"{at}ssm_dt.bias"] = tensor
        elif part in ONE_PART or part in NAMES:
            if arch != "falcon-h1" and part.endswith(("q_proj", "k_proj")):
                tensor = interleaved(tensor, heads if part.endswith("q_proj") else kv_heads)
            tensors[f"{at}{(ONE_PART | NAMES if part != 'norm' else ONE_PART)[part]}.{suffix}"] = _multiplied(
                config, part, tensor
            )
        else:
            if inner == "conv1d" and suffix == "weight":
                tensor = tensor[:, 0]
            if inner == "norm":
                tensor = tensor.reshape(groups, -1)
            tensors[f"{at}{NAMES[inner]}.{suffix}"] = _multiplied(config, part, tensor)
    tensors |= {name: np.stack([stack[i] for i in sorted(stack)]) for name, stack in stacks.items()}
    keys = {**_keys(config, arch), **changed}
    metadata = {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in keys.items()}}
    types = {} if quantized is None else dict.fromkeys([n for n in tensors if _matrix(n, tensors[n])], quantized)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    return write_gguf(folder / "model.gguf", metadata, tensors, types)


def _matrix(name: str, tensor: np.ndarray) -> bool:
    return name.startswith("blk.") and tensor.ndim == 2 and tensor.shape[1] % 32 == 0 and "norm" not in name


def _granite(config: dict[str, Any], part: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Stacks of experts, and the expert that all tokens visit: the feed-forward, where there are no others."""
    if part.startswith("block_sparse_moe"):
        kind = "_exps"
    else:
        kind = "_shexp" if config["num_local_experts"] else ""
    if "output" in part:
        return {f"ffn_down{kind}": tensor}
    gate, up = np.split(tensor, 2, axis=-2)
    return {f"ffn_gate{kind}": gate, f"ffn_up{kind}": up}


def _multiplied(config: dict[str, Any], part: str, tensor: np.ndarray) -> np.ndarray:
    """Falcon-H1's factors become part of the matrices."""
    if config["model_type"] != "falcon_h1":
        return tensor
    gate, down = config["mlp_multipliers"]
    within = config["attention_in_multiplier"]
    factors = {
        "down_proj": down, "gate_proj": gate, "q_proj": within, "v_proj": within,
        "k_proj": config["key_multiplier"] * within, "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"], "in_proj": config["ssm_in_multiplier"],
        "lm_head": config["lm_head_multiplier"], "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    last = part.rpartition(".")[2]
    tensor = tensor * np.float32(factors.get(last, 1.0))
    if last == "in_proj":
        inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (inner, inner, shared, shared, config["mamba_n_heads"])
        tensor *= np.repeat(np.float32(config["ssm_multipliers"]), sizes)[:, None]
    return tensor


def _keys(config: dict[str, Any], arch: str) -> dict[str, Any]:
    hidden, layers, kind = config["hidden_size"], config.get("num_hidden_layers", 0), config["model_type"]
    kinds = config.get("layers_block_type") or config.get("layer_types") or []
    if kind == "bamba":
        kinds = [ATTENTION if index in config["attn_layer_indices"] else MAMBA for index in range(layers)]
    attended = [one in (ATTENTION, "attention") for one in kinds]
    inner = {
        "falcon_h1": lambda: config["mamba_d_ssm"],
        "nemotron_h": lambda: config["mamba_num_heads"] * config["mamba_head_dim"],
        "mamba2": lambda: config["expand"] * hidden,
    }.get(kind, lambda: config["mamba_expand"] * hidden)()
    keys: dict[str, Any] = {
        "block_count": len(kinds) or layers,
        "context_length": 1 << 20 if kind == "mamba2" else 1024,
        "embedding_length": hidden,
        "attention.layer_norm_rms_epsilon": config.get("layer_norm_epsilon", config.get("rms_norm_eps")),
        "ssm.conv_kernel": config.get("mamba_d_conv", config.get("conv_kernel")),
        "ssm.inner_size": inner,
        "ssm.state_size": config.get("mamba_d_state", config.get("state_size", config.get("ssm_state_size"))),
        "ssm.time_step_rank": next(
            config[key] for key in ("mamba_n_heads", "mamba_num_heads", "num_heads") if key in config
        ),
        "ssm.group_count": config.get("mamba_n_groups", config.get("n_groups")),
        "feed_forward_length": config.get("intermediate_size", 0),
        "attention.head_count": config.get("num_attention_heads", 0),
    }
    if arch in ("mamba2",):
        return keys | {"feed_forward_length": 0}
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    if arch == "falcon-h1":
        return keys | {
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.freq_base": config["rope_parameters"]["rope_theta"],
        }
    keys |= {
        "attention.head_count_kv": [config["num_key_value_heads"] if own else 0 for own in attended],
        "rope.dimension_count": head_dim,
        "rope.scaling.finetuned": kind == "bamba",
    }
    if kind == "bamba":
        return keys | {"rope.dimension_count": head_dim // 2, "rope.freq_base": config["rope_parameters"]["rope_theta"]}
    if kind == "granitemoehybrid":
        keys |= {f"{part}_scale": config[f"{part}_multiplier"] for part in ("embedding", "residual")}
        keys |= {"attention.scale": config["attention_multiplier"], "logit_scale": config["logits_scaling"]}
        keys["expert_shared_feed_forward_length"] = config["shared_intermediate_size"]
        if config["num_local_experts"]:
            keys["expert_count"] = config["num_local_experts"]
            keys["expert_used_count"] = config["num_experts_per_tok"]
        return keys
    keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim, "rope.freq_base": 10000.0}
    wide = "moe" if arch == "nemotron_h_moe" else "mlp"
    width = config["moe_intermediate_size" if wide == "moe" else "intermediate_size"]
    keys["feed_forward_length"] = [width if one == wide else 0 for one in kinds]
    if wide == "moe":
        keys |= {
            "expert_count": config["n_routed_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": width,
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
        }
        if config["moe_latent_size"]:
            keys["moe_latent_size"] = config["moe_latent_size"]
    return keys


@pytest.mark.parametrize("case", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in CASES])
def test_a_converted_model_gives_the_same_tokens(case: str, tmp_path: Path) -> None:
    family, arch, changes = CASES[case]
    folder = write_checkpoint(family, tmp_path, **changes)
    expected = generate(make_engine(folder), REQUEST)
    assert generate(make_engine(convert(folder, arch)), REQUEST) == expected


@pytest.mark.slow
@pytest.mark.parametrize("case", ["granite4, experts", "falcon-h1", "nemotron 3, narrow", "mamba2"])
def test_few_bits_and_ranks(case: str, tmp_path: Path) -> None:
    """Eight bits stay eight bits, and two ranks give the tokens of one."""
    family, arch, changes = CASES[case]
    folder = write_checkpoint(family, tmp_path, **changes)
    file = convert(folder, arch, gguf.GGMLQuantizationType.Q8_0)
    alone = generate(make_engine(file, weights="dense"), REQUEST)
    with threaded_engine(file, 2, 1, weights="dense") as ranks:
        assert generate(ranks, REQUEST) == alone
    assert len(generate(make_engine(file), REQUEST)["r"]) == 20


def test_damaged_sizes_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint("nemotron-h-experts", tmp_path)
    for changed, message in (
        ({"ssm.inner_size": 71}, "not a size of"),
        ({"attention.head_count_kv": [2, 0]}, "for each of 4 layers"),
        ({"expert_gating_func": 1}, "expert_gating_func"),
        ({"nextn_predict_layers": 1}, "nextn_predict_layers"),
    ):
        with pytest.raises(CheckpointError, match=message):
            GGUFCheckpoint(convert(folder, "nemotron_h_moe", **changed))  # type: ignore[arg-type]
