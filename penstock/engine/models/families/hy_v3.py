"""Hunyuan 3 (Hy3): a norm on each head of queries and keys; experts by corrected sigmoids beside one that all tokens
visit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    NEXTN_KEY,
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    count,
    drafting_layers,
    integer,
    llama_fields,
    number,
)
from penstock.engine.models.families.sigmoid_experts import require_sigmoid, sparse_by_type
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig
from penstock.errors import CheckpointError


def _fields(raw: HFConfig) -> ConfigFields:
    sparse, ffn = sparse_by_type(raw, 1), integer(raw, "moe_intermediate_size")
    moe = MoeConfig(
        experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=ffn,
        normalize=True,
        layers=sparse,
        scoring="sigmoid",
        correction_bias=True,
        scale=number(raw, "router_scaling_factor"),
        # With none, the reference has one of the dense layers' width.
        shared_ffn_size=ffn * count(raw, "num_shared_experts") or integer(raw, "intermediate_size"),
    )
    return {**llama_fields(raw), "qk_norm": True, "moe": moe if any(sparse) else None}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    require_sigmoid(keys)
    layers, ffn = drafting_layers(keys, config), keys.whole("expert_feed_forward_length", 0)
    shared = keys.whole("expert_shared_feed_forward_length", 0) or ffn
    if not ffn or shared % ffn:
        raise CheckpointError(
            f"{keys.architecture}.expert_shared_feed_forward_length is {shared}; it must be a multiple of "
            f"expert_feed_forward_length, {ffn}"
        )
    routed = config["routed_layers"][: layers["num_hidden_layers"]]
    return {
        **layers,
        "mlp_layer_types": ["sparse" if own else "dense" for own in routed],
        "num_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "moe_intermediate_size": ffn,
        "num_shared_experts": shared // ffn,
        "router_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
    }


HY_V3 = Family(
    model_type="hy_v3",
    class_name="HYV3ForCausalLM",
    fields=_fields,
    reads=frozenset({
        "attention_bias", "mlp_bias", "mlp_layer_types", "moe_intermediate_size", "num_experts", "num_experts_per_tok",
        "num_local_experts", "num_shared_experts", "router_scaling_factor", "enable_moe_fp32_combine",
    }),
    limits={"hidden_act": SILU},
    names=TensorNames(router="router.gate", correction_bias="expert_bias", shared_expert="shared_mlp."),
    gguf=GGUFFormat(
        architectures=("hy_v3",),
        config=_from_gguf,
        reads=frozenset({
            "expert_count", "expert_feed_forward_length", "expert_gating_func", "expert_shared_feed_forward_length",
            "expert_used_count", "expert_weights_scale", NEXTN_KEY,
        }),
        windowed=False,
        tensors={
            **{f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
            "exp_probs_b": "mlp.expert_bias",
            "exp_probs_b.bias": "mlp.expert_bias",
        },
    ),
)  # fmt: skip
