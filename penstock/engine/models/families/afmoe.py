"""Arcee Trinity (AFMoE): norms before and behind; a gate on the output of attention; windows with rotary embedding, and
neither in every fourth layer; experts by corrected sigmoids."""

from __future__ import annotations

from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    alternating_windows,
    count,
    flag,
    integer,
    layer_count,
    number,
)
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.model_config import MoeConfig


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
    gguf=GGUFFormat(architectures=()),
)  # fmt: skip
