"""A model converted to GGUF, as converters do it, gives the tokens of the folder it came from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

from penstock.engine.loading.gguf_rope import llama3_factors
from penstock.engine.models.families import FAMILIES
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.loading.gguf_files import write_gguf
from tests.engine.loading.test_gguf_checkpoint import interleaved
from tests.engine.speculative.forced import eager_engine
from tests.engine.speculative.mtp_layers import write_mtp
from tests.engine.tiny import FAMILIES as TINY
from tests.engine.tiny import write_checkpoint

ARCHITECTURES = {
    "llama-gqa": "llama",
    "mistral-window": "llama",
    "qwen2-bias": "qwen2",
    "qwen3-qknorm": "qwen3",
    "gemma": "gemma",
    "mixtral": "llama",
    "qwen3-moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3-two-ropes": "gemma3",
    "gpt-oss": "gpt-oss",
    "phi3-longrope": "phi3",
    "phi3-half-rotated": "phi3",
    "cohere": "command-r",
    "cohere-qknorm": "command-r",
    "cohere2": "cohere2",
    "glm4": "glm4",
    "exaone4": "exaone4",
    "granite": "granite",
    "granite-moe": "granitemoe",
    "granite-moe-shared": "granitemoe",
    "qwen2-moe": "qwen2moe",
    "olmoe": "olmoe",
    "smollm3": "smollm3",
    "ministral3": "mistral3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "glm4-moe": "glm4moe",
    "glm4-moe-groups": "glm4moe",
    "llama4": "llama4",
    "seed-oss": "seed_oss",
    "ernie4.5": "ernie4_5",
    "ernie4.5-moe": "ernie4_5-moe",
    "hunyuan": "hunyuan-dense",
    "hunyuan-moe": "hunyuan-moe",
    "minimax-m2": "minimax-m2",
    "exaone-moe": "exaone-moe",
    "dots1": "dots1",
    "arcee": "arcee",
    "lfm2": "lfm2",
    "lfm2-biased": "lfm2",
    "lfm2-moe": "lfm2moe",
    "glm": "chatglm",
    "stablelm": "stablelm",
    "stablelm-head-norms": "stablelm",
    "starcoder2": "starcoder2",
    "olmo": "olmo",
    "phi": "phi2",
    "nemotron": "nemotron",
    "jais2": "jais2",
    "apertus": "apertus",
    "afmoe": "afmoe",
    "hy-v3": "hy_v3",
    "cohere2-moe": "cohere2moe",
    "mellum": "mellum",
    "laguna": "laguna",
    "laguna-elements": "laguna",
    "granite-swa": "granite_swa",
    "granite-moe-swa-shared": "granite_swa",
}
SLOW = {
    "laguna-elements",
    "apertus",
    "cohere2-moe",
    "mellum",
    "granite-swa",
    "granite-moe-swa-shared",
    "stablelm-head-norms",
    "olmo",
    "nemotron",
    "jais2",
    "lfm2-biased",
    "arcee",
    "exaone-moe",
    "hunyuan",
    "dots1",
    "ernie4.5",
    "minimax-m2",
    "seed-oss",
    "cohere-qknorm",
    "glm4-moe-groups",
    "granite-moe-shared",
    "mistral-window",
    "olmo3",
    "phi3-half-rotated",
}
ELSEWHERE = {
    "deepseek-v2-lite": "deepseek2",
    "deepseek-v3": "deepseek2",
    "qwen3-next": "qwen3next",
    "qwen3.5": "qwen35",
    "qwen3.5-moe": "qwen35moe",
    "granite4-hybrid": "granitehybrid",
    "bamba": "granitehybrid",
    "falcon-h1": "falcon-h1",
    "nemotron-h": "nemotron_h",
    "nemotron-h-experts": "nemotron_h_moe",
    "mamba2": "mamba2",
    "gemma4": "gemma4",
    "mistral4": "mistral4",
    "minicpm3": "minicpm3",
    "deepseek-v32": "deepseek32",
    "glm-dsa": "glm-dsa",
    "kimi-linear": "kimi-linear",
    "mimo-v2-flash": "mimo2",
    "step3.5": "step35",
}
"""In `test_gguf_deepseek`, `test_gguf_delta`, `test_gguf_gemma4`, `test_gguf_kimi`, `test_gguf_mamba`,
`test_gguf_mimo2` and `test_gguf_step35`."""
EXPLICIT: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "cohere2-moe": {},
    "mellum": {"mlp_layer_types": ["sparse"] * 3, "norm_topk_prob": True},
    "laguna": {"moe_router_logit_softcapping": 0.0},
    "laguna-elements": {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
    "granite-swa": {"layer_rope_theta": [0, 10000.0, 10000.0]},
    "granite-moe-swa-shared": {},
}
"""Families whose files say which layers have windows, and what their files cannot say otherwise."""
SHARED = {f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
OF_IMAGES = {"qwen2vl", "qwen3vl", "qwen3vlmoe"}
"""Decoders of families under other names, in `test_gguf_multimodal`."""
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "self_attn.dense": "attn_output",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.router.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
OUT_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
STACKS = {
    "block_sparse_moe.input_linear": ("ffn_gate_exps", "ffn_up_exps"),
    "block_sparse_moe.output_linear": ("ffn_down_exps",),
    "shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp"),
    "shared_mlp.output_linear": ("ffn_down_shexp",),
}
INTERLEAVED = ("olmo", "llama", "mistral3", "smollm3", "granite", "granitemoe", "granite_swa", "arcee")
LFM2_NAMES = {
    "operator_norm": "attn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp",
    "ffn_norm": "ffn_norm",
    **{f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
GLM_NAMES = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
OTHER_NAMES = {
    "gemma2": GEMMA_NAMES,
    "gemma3": GEMMA_NAMES,
    "olmo2": OUT_NORMS,
    "gpt-oss": OUT_NORMS,
    "exaone4": OUT_NORMS,
    "glm4": GLM_NAMES,
    "glm4moe": {
        "post_attention_layernorm": "post_attention_norm",
        **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    },
    "hunyuan-moe": {f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "exaone-moe": {f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "dots1": {f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "ernie4_5-moe": {f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "apertus": {"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
    "afmoe": {
        **OUT_NORMS,
        **SHARED,
        "pre_mlp_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "self_attn.gate_proj": "attn_gate",
    },
    "cohere2moe": SHARED,
    "laguna": {"self_attn.g_proj": "attn_gate"},
    "hy_v3": {f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "granite_swa": {"shared_mlp.input_linear": "ffn_up_shexp", "shared_mlp.output_linear": "ffn_down_shexp"},
    "lfm2": LFM2_NAMES,
    "lfm2moe": LFM2_NAMES,
    "llama4": {
        "feed_forward.router": "ffn_gate_inp",
        **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    },
}
LAYER_NORMS = {
    **dict.fromkeys(("command-r", "cohere2", "cohere2moe", "phi2", "stablelm", "jais2"), "layer_norm_eps"),
    "starcoder2": "norm_epsilon",
    "nemotron": "norm_eps",
    "olmo": "",
}
"""By architecture: what `config.json` calls the epsilon of its LayerNorms."""
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


NEXTN = {
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm", "shared_head.head": "nextn.shared_head_head",
    "embed_tokens": "nextn.embed_tokens",
}  # fmt: skip


def convert(
    folder: Path,
    arch: str,
    experts: gguf.GGMLQuantizationType | None = None,
    further: int = 0,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """`experts`: the type in which stacks of experts are stored. `further`: layers for multi-token prediction. `more`:
    keys of the architecture."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    names = NAMES | NEXTN | OTHER_NAMES.get(arch, {})
    tensors: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    numbers: dict[str, dict[int, float]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        top |= {"model.embedding_norm": "token_embd_norm", "model.final_layernorm": "output_norm"}
        stem, _, suffix = name.rpartition(".")
        if arch.startswith(("gemma", "nemotron")) and name.endswith("norm.weight"):
            tensor = tensor + 1
        if stem in top:
            tensors[f"{top[stem]}.{suffix}"] = tensor
            continue
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem)
        assert match is not None
        layer, part = match[1], match[2]
        if suffix in ("e_score_correction_bias", "expert_bias"):
            tensors[f"blk.{layer}.exp_probs_b{'' if arch == 'hy_v3' else '.bias'}"] = tensor.reshape(-1)
            continue
        if part in ("mlp.experts", "feed_forward.experts"):  # stacks; of gpt-oss with gate and up columns in turn
            kind = "bias" if suffix.endswith("_bias") else "weight"
            stack = tensor if kind == "bias" else tensor.swapaxes(1, 2)
            gate, up = (stack[:, ::2], stack[:, 1::2]) if arch == "gpt-oss" else np.split(stack, 2, axis=1)
            parts = {"down": stack} if suffix.startswith("down") else {"gate": gate, "up": up}
            tensors |= {f"blk.{layer}.ffn_{one}_exps.{kind}": np.ascontiguousarray(t) for one, t in parts.items()}
            continue
        if part == "mlp.act_fn":
            numbers.setdefault(f"xielu.{suffix}", {})[int(layer)] = float(tensor.reshape(()))
            continue
        if part == "block_sparse_moe.experts":
            tensors[f"blk.{layer}.ffn_{'gate_up' if suffix == 'gate_up_proj' else 'down'}_exps.weight"] = tensor
            continue
        if suffix == "sinks":
            tensors[f"blk.{layer}.attn_sinks.weight"] = tensor
            continue
        expert = re.fullmatch(r".*\.experts\.(\d+)\.(\w+)", part)
        if expert is not None:
            stacks.setdefault(f"blk.{layer}.ffn_{EXPERTS[expert[2]]}_exps.weight", {})[int(expert[1])] = tensor
            continue
        of_head = re.fullmatch(r"self_attn\.([qk])_layernorm\.norms\.(\d+)", part)
        if of_head is not None:
            stacks.setdefault(f"blk.{layer}.attn_{of_head[1]}_norm.weight", {})[int(of_head[2])] = tensor
            continue
        if part in STACKS and arch != "granite_swa":  # whose converter leaves gate and up together
            parts = np.split(tensor, 2, axis=-2) if len(STACKS[part]) == 2 else [tensor]
            tensors |= {f"blk.{layer}.{theirs}.weight": half for theirs, half in zip(STACKS[part], parts, strict=True)}
            continue
        if part == "conv.conv" and tensor.ndim == 3:
            tensor = tensor.squeeze(1)
        if part == "mlp.shared_expert_gate":
            tensor = tensor.reshape(-1)
        if arch in INTERLEAVED and part in ("self_attn.q_proj", "self_attn.k_proj"):
            tensor = interleaved(tensor, heads if part.endswith("q_proj") else kv_heads)
        tensors[f"blk.{layer}.{names[part]}.{suffix}"] = tensor
    tensors |= {name: np.stack([stack[i] for i in sorted(stack)]) for name, stack in stacks.items()}
    rope = config["rope_parameters"]
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
    }
    if arch in LAYER_NORMS:
        keys["attention.layer_norm_epsilon"] = config.get(LAYER_NORMS[arch], 1e-5)
    else:
        keys["attention.layer_norm_rms_epsilon"] = config.get("rms_norm_eps", config.get("norm_eps"))
    if config.get("head_dim"):
        keys |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        keys["attention.sliding_window"] = config["sliding_window"]
    count = config.get("num_local_experts") or config.get("num_experts")
    if count:
        keys |= {"expert_count": count, "expert_used_count": config.get("num_experts_per_tok", 0)}
    if "moe_intermediate_size" in config:
        keys["expert_feed_forward_length"] = config["moe_intermediate_size"]
    for width in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if width in config:
            keys["expert_shared_feed_forward_length"] = config[width]
    if "logit_scale" in config:
        keys["logit_scale"] = config["logit_scale"]
    if config.get("clip_qkv"):
        keys["attention.clamp_kqv"] = config["clip_qkv"]
    if "use_parallel_residual" in config:
        keys["use_parallel_residual"] = True  # as converters write it where a checkpoint does not say
    if arch == "gemma2":
        keys |= {f"{part}_logit_softcapping": config[f"{part}_logit_softcapping"] for part in ("attn", "final")}
    if arch in ("glm4moe", "exaone-moe", "dots1"):
        keys |= {
            "expert_count": config.get("n_routed_experts") or config["num_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_shared_count": config.get("n_shared_experts") or config["num_shared_experts"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_gating_func": 2,
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
        }
    if arch == "afmoe":
        keys |= {
            "leading_dense_block_count": config["num_dense_layers"],
            "expert_shared_count": config["num_shared_experts"],
            "expert_weights_norm": True,
            "expert_weights_scale": config["route_scale"],
        }
    if arch == "hy_v3":
        keys |= {
            "expert_shared_feed_forward_length": config["moe_intermediate_size"] * config["num_shared_experts"],
            "expert_gating_func": 2,
            "expert_weights_scale": config["router_scaling_factor"],
        }
    if arch == "cohere2moe":
        keys |= {
            "feed_forward_length": config["prefix_dense_intermediate_size"],
            "expert_feed_forward_length": config["intermediate_size"],
            "expert_shared_feed_forward_length": config["num_shared_experts"] * config["intermediate_size"],
            "expert_shared_count": config["num_shared_experts"],
            "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
            "expert_gating_func": 1,
            "expert_weights_norm": config["norm_topk_prob"],
            "rope.scaling.type": "none",
        }
    if arch == "granite_swa" and config.get("layer_rope_theta"):
        keys["attention.rope_pattern"] = [bool(theta) for theta in config["layer_rope_theta"]]
    if rope.get("rope_type") == "llama3":
        factors = llama3_factors(rope, rope["rope_theta"], config["head_dim"])
        tensors["rope_freqs.weight"] = np.array(factors, np.float32)
    if arch == "laguna":
        ropes = config["rope_parameters"]
        keys |= {
            "attention.head_count": config["num_attention_heads_per_layer"],
            "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": config["moe_routed_scaling_factor"],
            "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
        }
        for kind, key in (("full_attention", ""), ("sliding_attention", "_swa")):
            share = ropes[kind].get("partial_rotary_factor", 1.0)
            keys[f"rope.dimension_count{key}"] = int(config["head_dim"] * share)
    if arch in ("afmoe", "cohere2moe", "mellum", "granite_swa", "laguna"):
        keys["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    if arch == "exaone-moe":
        keys["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    if arch in ("glm4moe", "exaone-moe"):
        keys["nextn_predict_layers"] = further
        keys["block_count"] += further
    if arch == "ernie4_5-moe":
        keys |= {
            "expert_count": config["moe_num_experts"],
            "expert_used_count": config["moe_k"],
            "expert_shared_count": config["moe_num_shared_experts"],
            "expert_shared_feed_forward_length": config["moe_num_shared_experts"] * config["moe_intermediate_size"],
            "interleave_moe_layer_step": config["moe_layer_interval"],
            "leading_dense_block_count": config["moe_layer_start_index"],
        }
    if arch == "llama4":
        keys |= {
            "feed_forward_length": config["intermediate_size_mlp"],
            "expert_feed_forward_length": config["intermediate_size"],
            "interleave_moe_layer_step": config["interleave_moe_layer_step"],
        }
    if arch == "hunyuan-moe":
        keys |= {"expert_used_count": config["moe_topk"], "expert_shared_count": 1}
        keys |= {f"expert_{shared}feed_forward_length": config["intermediate_size"] for shared in ("", "shared_")}
    if arch == "minimax-m2":
        keys |= {"expert_feed_forward_length": config["intermediate_size"], "expert_gating_func": 2}
    if "alpha" in rope:
        dim = config["head_dim"]
        keys["rope.freq_base"] *= rope["alpha"] ** (dim / (dim - 2))
        keys |= {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}
    if arch in ("lfm2", "lfm2moe"):
        attended = [kind == "full_attention" for kind in config["layer_types"]]
        keys |= {"attention.head_count_kv": [kv_heads if own else 0 for own in attended]}
        keys |= {"shortconv.l_cache": config["conv_L_cache"], "vocab_size": config["vocab_size"]}
    if arch == "lfm2":
        keys["feed_forward_length"] = tensors["blk.0.ffn_gate.weight"].shape[0]
    if arch == "lfm2moe":
        keys |= {"leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2}
    if rope.get("partial_rotary_factor"):
        dim = config.get("head_dim") or config["hidden_size"] // heads
        keys["rope.dimension_count"] = int(dim * rope["partial_rotary_factor"])
    if arch.startswith("granite"):
        keys |= {f"{part}_scale": config[f"{part}_multiplier"] for part in ("embedding", "residual")}
        keys |= {"attention.scale": config["attention_multiplier"], "logit_scale": config["logits_scaling"]}
    if rope.get("full_attention", rope).get("rope_type") == "yarn":
        scaled = rope.get("full_attention", rope)
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": scaled["factor"]}
        keys["rope.scaling.original_context_length"] = scaled["original_max_position_embeddings"]
        if "llama_4_scaling_beta" in scaled:
            keys["attention.temperature_scale"] = scaled["llama_4_scaling_beta"]
            keys["rope.scaling.yarn_log_multiplier"] = scaled["mscale_all_dim"]
    if rope.get("rope_type") == "longrope":
        keys["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
        for length in ("short", "long"):
            tensors[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], np.float32)
    keys |= more or {}
    metadata = {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in keys.items()}}
    metadata |= {key: [each[layer] for layer in sorted(each)] for key, each in numbers.items()}
    if experts is None:
        return write_gguf(folder / "model.gguf", metadata, tensors)
    quantized = {name: experts for name in tensors if name.endswith("_exps.weight")}
    return write_gguf(folder / "model.gguf", metadata, tensors, quantized)


def test_every_family_is_converted() -> None:
    """So that a family cannot be registered without GGUF names that work."""
    architectures = ARCHITECTURES | ELSEWHERE
    tested = {getattr(transformers, TINY[family][0]).model_type for family in architectures}
    assert tested == {name for name, family in FAMILIES.items() if family.gguf.architectures}
    read = {name for family in FAMILIES.values() for name in family.gguf.architectures}
    assert {*architectures.values(), *OF_IMAGES} == read


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ARCHITECTURES]
)
def test_a_converted_model_gives_the_same_tokens(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the format does not say, converters leave to the reader: the usual scale and pattern of windows.
    name, overrides = TINY[family]
    usual = {"query_pre_attn_scalar": 32} if "query_pre_attn_scalar" in overrides else {}
    usual |= {"sliding_window_pattern": 6} if "sliding_window_pattern" in overrides else {}
    usual |= {"no_rope_layer_interval": 4, "num_hidden_layers": 4} if "no_rope_layer_interval" in overrides else {}
    usual |= {"mlp_only_layers": []} if "mlp_only_layers" in overrides else {}
    windows = "layer_types" in overrides and not family.startswith("lfm2") and family not in EXPLICIT
    usual |= {"num_hidden_layers": 5, "layer_types": None} if windows else {}
    usual |= {"no_rope_layers": None, "moe_layers": None, "num_hidden_layers": 5} if family == "llama4" else {}
    usual |= {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1} if family == "llama4" else {}
    usual |= {"interleave_moe_layer_step": 2} if family == "llama4" else {}
    usual |= {"routed_scaling_factor": 1.0} if family == "lfm2-moe" else {}
    usual |= EXPLICIT.get(family, {})
    usual |= {"swiglu_limit": 7.0} if "swiglu_limit" in overrides else {}
    monkeypatch.setitem(TINY, family, (name, {**overrides, **usual}))
    folder = write_checkpoint(family, tmp_path)
    prompt = [23 * i % 199 for i in range(150)]
    expected = generate(make_engine(folder), greedy("a", prompt, 16))
    assert generate(make_engine(convert(folder, ARCHITECTURES[family])), greedy("a", prompt, 16)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4-moe", "exaone-moe"])
def test_the_drafting_layer_of_a_converted_model(family: str, tmp_path: Path) -> None:
    """Counted with the others and named apart: it is no part of the decoder, and drafts with `speculation: mtp`."""
    folder = write_mtp(family, tmp_path)
    request = greedy("a", [23 * i % 199 for i in range(40)], 12)
    expected = generate(make_engine(folder), request)
    further = json.loads((folder / "config.json").read_text()).get("num_nextn_predict_layers") or 1
    file = convert(folder, ARCHITECTURES[family], further=further)
    assert generate(make_engine(file), request) == expected
    alone, engine = (eager_engine(source, speculation="mtp") for source in (folder, file))
    assert generate(engine, request) == generate(alone, request) == expected
    assert engine.load_snapshot().accepted_tokens == alone.load_snapshot().accepted_tokens
    assert engine.load_snapshot().draft_tokens > 5
