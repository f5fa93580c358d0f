"""Tiny gpt-oss checkpoints whose experts are in MXFP4, as they are published. No transformers needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock.engine.loading.mxfp4 import round_mxfp4

CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "num_local_experts": 6,
    "num_experts_per_tok": 4,
    "sliding_window": 40,
    "swiglu_limit": 3.0,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 256,
    },
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"],
    },
}  # fmt: skip


def write_mxfp4(folder: Path, seed: int = 5, **changes: Any) -> Path:
    """A reproducible random checkpoint, with `changes` to its configuration."""
    config = {**CONFIG, **changes}
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int, scale: float = 0.4) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    hidden, ffn, experts = (config[key] for key in ("hidden_size", "intermediate_size", "num_local_experts"))
    heads, kv_heads, dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    tensors = {
        "model.embed_tokens.weight": rand(config["vocab_size"], hidden),
        "lm_head.weight": rand(config["vocab_size"], hidden),
        "model.norm.weight": 1 + rand(hidden, scale=0.2),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = 1 + rand(hidden, scale=0.2)
        for name, out, inputs in (
            ("q_proj", heads * dim, hidden),
            ("k_proj", kv_heads * dim, hidden),
            ("v_proj", kv_heads * dim, hidden),
            ("o_proj", hidden, heads * dim),
        ):
            tensors[f"{at}self_attn.{name}.weight"] = rand(out, inputs)
            tensors[f"{at}self_attn.{name}.bias"] = rand(out)
        tensors[f"{at}self_attn.sinks"] = rand(heads, scale=2)
        tensors[f"{at}mlp.router.weight"] = rand(experts, hidden)
        tensors[f"{at}mlp.router.bias"] = rand(experts)
        for name, out, inputs in (("gate_up_proj", 2 * ffn, hidden), ("down_proj", hidden, ffn)):
            rounded = round_mxfp4(rand(experts * out, inputs))
            stack = f"{at}mlp.experts.{name}"
            tensors[f"{stack}_blocks"] = rounded.blocks.view(experts, out, inputs // 32, 16)
            tensors[f"{stack}_scales"] = rounded.scales.view(experts, out, inputs // 32)
            tensors[f"{stack}_bias"] = rand(experts, out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
