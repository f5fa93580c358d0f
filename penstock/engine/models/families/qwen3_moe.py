"""Qwen3-MoE: Qwen3 with experts in all or some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    AXES,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    flag,
    integer,
    layer_count,
    llama_fields,
    window_of,
)
from penstock.engine.models.moe_config import MoeConfig
from penstock.errors import CheckpointError

_KEYS = frozenset({
    "attention_bias", "sliding_window", "use_sliding_window", "decoder_sparse_step", "mlp_only_layers", "num_experts",
    "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
})  # fmt: skip


def sparse_layers(raw: HFConfig) -> tuple[bool, ...]:
    """Which layers have experts."""
    step, dense = integer(raw, "decoder_sparse_step"), raw["mlp_only_layers"] or ()
    if not isinstance(dense, list | tuple):
        raise CheckpointError(f"config key 'mlp_only_layers' must be a list, found {dense!r:.80}")
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(layer_count(raw)))


def _fields(raw: HFConfig) -> ConfigFields:
    layers = layer_count(raw)
    window = window_of(raw) if flag(raw, "use_sliding_window") else None
    moe = MoeConfig(
        experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "moe_intermediate_size"),
        normalize=flag(raw, "norm_topk_prob"),
        layers=sparse_layers(raw),
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
    reads=_KEYS,
    gguf=GGUFFormat(
        architectures=("qwen3moe", "qwen3vlmoe"),
        config=_from_gguf,
        reads=AXES | {"expert_count", "expert_used_count", "expert_feed_forward_length"},
        windowed=False,
    ),
)
