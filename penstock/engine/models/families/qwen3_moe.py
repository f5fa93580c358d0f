"""Qwen3-MoE: Qwen3 with experts in all or some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    integer,
    layer_count,
    llama_fields,
)
from penstock.engine.models.model_config import MoeConfig


def _fields(raw: HFConfig) -> ConfigFields:
    layers = layer_count(raw)
    step, dense = integer(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    moe = MoeConfig(
        experts=integer(raw, "num_experts" if raw.get("num_experts") else "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "moe_intermediate_size"),
        normalize=bool(raw.get("norm_topk_prob", False)),
        layers=tuple(index not in dense and (index + 1) % step == 0 for index in range(layers)),
    )
    return {**llama_fields(raw), "qk_norm": True, "moe": moe, "windows": (window,) * layers}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    return {
        "num_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length", config["intermediate_size"]),
        "norm_topk_prob": True,
    }


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    fields=_fields,
    gguf=GGUFFormat(
        architectures=("qwen3moe",),
        config=_from_gguf,
        reads=frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"}),
        windowed=False,
    ),
)
