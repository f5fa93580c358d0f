"""OLMoE: OLMo 2's norms of whole query and key rows, Llama's norms before the parts, experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    flag,
    integer,
    layer_count,
    llama_fields,
)
from penstock.engine.models.families.olmo import clipped
from penstock.engine.models.moe_config import MoeConfig


def _fields(raw: HFConfig) -> ConfigFields:
    moe = MoeConfig(
        experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "intermediate_size"),
        normalize=flag(raw, "norm_topk_prob"),
        layers=(True,) * layer_count(raw),
    )
    return {**llama_fields(raw), "row_norms": True, "moe": moe, "clip_qkv": clipped(raw)}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    return {
        "intermediate_size": keys.whole("expert_feed_forward_length", 0) or config["intermediate_size"],
        "num_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "norm_topk_prob": False,
        "clip_qkv": keys.number("attention.clamp_kqv", 0.0) or None,
    }


OLMOE = Family(
    model_type="olmoe",
    class_name="OlmoeForCausalLM",
    fields=_fields,
    reads=frozenset(
        {"attention_bias", "clip_qkv", "num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob"}
    ),
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(
        architectures=("olmoe",),
        config=_from_gguf,
        reads=frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length", "attention.clamp_kqv"}),
    ),
)
