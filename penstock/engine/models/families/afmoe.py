"""Arcee Trinity (AFMoE): norms before and behind; a gate on the output of attention; windows with rotary embedding, and
neither in every fourth layer; experts by corrected sigmoids."""

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
    alternating_windows,
    count,
    flag,
    integer,
    layer_count,
    number,
)
from penstock.engine.models.families.gemma2 import layer_types
from penstock.engine.models.families.sigmoid_experts import SHARED_TENSORS, require_sigmoid
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig
from penstock.errors import CheckpointError

_PERIOD = 4


def _fields(raw: HFConfig) -> ConfigFields:
    layers, dense, ffn = layer_count(raw), count(raw, "num_dense_layers"), integer(raw, "moe_intermediate_size")
    bias, sparse = flag(raw, "attention_bias"), tuple(index >= dense for index in range(layers))
    windows = alternating_windows(raw, integer(raw, "global_attn_every_n_layers"))
    moe = MoeConfig(
        experts=integer(raw, "num_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=ffn,
        normalize=True,
        layers=sparse,
        scoring="sigmoid",
        correction_bias=True,
        scale=number(raw, "route_scale"),
        shared_ffn_size=ffn * count(raw, "num_shared_experts"),
    )
    scale = integer(raw, "hidden_size") ** 0.5 if flag(raw, "mup_enabled") else 1.0
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "qk_norm": True,
        "output_gate": True,
        "windows": windows,
        "unrotated": tuple(window is None for window in windows),
        "embedding_scale": scale,
        "virtual_scale": scale,
        "moe": moe if any(sparse) else None,
    }


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    if not config["sliding_window"]:
        raise CheckpointError(f"{keys.architecture}.attention.sliding_window is missing or 0; the file is damaged")
    require_sigmoid(keys)
    return {
        **layer_types(keys, config, _PERIOD),
        "mup_enabled": True,  # which no file says, and llama.cpp takes for granted
        "num_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length", 0),
        "num_shared_experts": keys.whole("expert_shared_count", 0),
        "num_dense_layers": keys.whole("leading_dense_block_count", 0),
        "route_scale": keys.number("expert_weights_scale", 0.0) or 1.0,
    }


AFMOE = Family(
    model_type="afmoe",
    class_name="AfmoeForCausalLM",
    fields=_fields,
    reads=frozenset({
        "attention_bias", "global_attn_every_n_layers", "moe_intermediate_size", "mup_enabled", "num_dense_layers",
        "num_experts", "num_experts_per_tok", "num_shared_experts", "route_scale", "sliding_window",
    }),
    limits={"hidden_act": SILU},
    names=TensorNames(
        mixer_out_norm="post_attention_layernorm",
        feed_forward_norm="pre_mlp_layernorm",
        feed_forward_out_norm="post_mlp_layernorm",
        output_gate="gate_proj",
        router="router.gate",
        correction_bias="expert_bias",
    ),
    gguf=GGUFFormat(
        architectures=("afmoe",),
        config=_from_gguf,
        reads=frozenset({
            "attention.sliding_window_pattern", "expert_count", "expert_feed_forward_length", "expert_gating_func",
            "expert_shared_count", "expert_used_count", "expert_weights_scale", "leading_dense_block_count",
        }),
        tensors={**SHARED_TENSORS, "attn_gate": "self_attn.gate_proj", "exp_probs_b.bias": "mlp.expert_bias"},
    ),
)  # fmt: skip
