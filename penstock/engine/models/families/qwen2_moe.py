"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts in all or some layers, and a gated one that every token visits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    Windows,
    flag,
    integer,
    layer_count,
    number,
    window_of,
    windows_by_type,
)
from penstock.engine.models.families.qwen2 import WINDOW_KEYS
from penstock.engine.models.families.qwen3_moe import sparse_layers
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig

_KEYS = WINDOW_KEYS | {
    "attention_bias", "qkv_bias", "decoder_sparse_step", "mlp_only_layers", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob",
}  # fmt: skip


def _windows(raw: HFConfig) -> Windows:
    """Every second layer below `max_window_layers`."""
    window = window_of(raw) if flag(raw, "use_sliding_window") else None
    full = number(raw, "max_window_layers")
    spaced = tuple(window if index % 2 == 0 and index < full else None for index in range(layer_count(raw)))
    return windows_by_type(raw, window) or spaced


def _fields(raw: HFConfig) -> ConfigFields:
    moe = MoeConfig(
        experts=integer(raw, "num_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "moe_intermediate_size"),
        normalize=flag(raw, "norm_topk_prob"),
        layers=sparse_layers(raw),
        shared_ffn_size=integer(raw, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return {"qkv_bias": flag(raw, "qkv_bias"), "moe": moe, "windows": _windows(raw)}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    ffn = keys.whole("expert_feed_forward_length", 0) or config["intermediate_size"]
    return {
        "qkv_bias": config["attention_bias"],
        "num_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "moe_intermediate_size": ffn,
        "shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length", 0)
        or config["intermediate_size"],
        "norm_topk_prob": False,
    }


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    fields=_fields,
    reads=_KEYS,
    names=TensorNames(shared_expert="shared_expert."),
    gguf=GGUFFormat(
        architectures=("qwen2moe",),
        config=_from_gguf,
        reads=frozenset({
            "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
        }),
        windowed=False,
        tensors={
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
    ),
)  # fmt: skip
