"""gpt-oss: attention sinks, windows in every second layer, experts with biases and a clamped gate, stored in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.backends.activation import ClampedSwiglu
from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    alternating_windows,
    flag,
    integer,
    layer_count,
    number,
)
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig
from penstock.engine.models.rope import read_rope
from penstock.errors import CheckpointError

_KEYS = frozenset({
    "attention_bias", "sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok", "swiglu_alpha",
    "swiglu_limit",
})  # fmt: skip
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What the reference takes where a file says nothing."""


def _fields(raw: HFConfig) -> ConfigFields:
    bias, alpha, limit = flag(raw, "attention_bias"), number(raw, "swiglu_alpha"), number(raw, "swiglu_limit")
    if not limit > 0:
        raise CheckpointError(f"config key 'swiglu_limit' must be positive, found {limit:g}")
    moe = MoeConfig(
        experts=integer(raw, "num_experts" if "num_experts" in raw else "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "intermediate_size"),
        normalize=True,  # the softmax over all, scaled to sum to one, is that over the chosen
        layers=(True,) * layer_count(raw),
        router_bias=True,
        expert_bias=True,
    )
    given = raw.get("rope_scaling") or raw.get("rope_parameters")
    return {
        "activation": ClampedSwiglu(alpha, limit),
        "attention_sinks": True,
        "moe": moe,
        "output_bias": bias,
        "qkv_bias": bias,
        "rope": read_rope(raw, None if given is not None else _ROPE),
        "windows": alternating_windows(raw, 2),
    }


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    """The format does not say whether yarn rounds the ends of its range: the family's files never do."""
    scaling = config.get("rope_scaling")
    if isinstance(scaling, Mapping) and scaling.get("rope_type") == "yarn":
        scaling = {**scaling, "truncate": False}
    return {
        "num_local_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "intermediate_size": keys.whole("expert_feed_forward_length", config["intermediate_size"]),
        "rope_parameters": scaling or {"rope_type": "default", "rope_theta": config["rope_theta"]},
        "rope_scaling": None,
    }


GPT_OSS = Family(
    model_type="gpt_oss",
    class_name="GptOssForCausalLM",
    fields=_fields,
    reads=_KEYS,
    names=TensorNames(router="router", stacked_experts=True, interleaved_gate_up=True),
    gguf=GGUFFormat(
        architectures=("gpt-oss",),
        config=_from_gguf,
        reads=frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"}),
        tensors={"attn_sinks.weight": "self_attn.sinks", "post_attention_norm": "post_attention_layernorm"},
    ),
)
