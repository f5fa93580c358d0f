"""GLM-4.5 and 4.6: experts chosen by corrected sigmoids beside a shared one; half of each head rotated.

The layers for multi-token prediction that checkpoints have behind the last layer are no part of the decoder:
`speculative.mtp` reads the first."""

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
    flag,
    integer,
    layer_count,
    number,
)
from penstock.engine.models.families.glm4 import glm_rope
from penstock.engine.models.families.sigmoid_experts import require_sigmoid
from penstock.engine.models.model_config import MoeConfig
from penstock.errors import CheckpointError

_KEYS = frozenset({
    "attention_bias", "first_k_dense_replace", "moe_intermediate_size", "n_group", "n_routed_experts",
    "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "num_local_experts", "num_mtp_layers",
    "num_nextn_predict_layers", "routed_scaling_factor", "topk_group", "use_qk_norm",
})  # fmt: skip


_GGUF = frozenset({
    "expert_count", "expert_feed_forward_length", "expert_gating_func", "expert_group_count", "expert_group_used_count",
    "expert_shared_count", "expert_used_count", "expert_weights_norm", "expert_weights_scale",
    "leading_dense_block_count", NEXTN_KEY,
})  # fmt: skip


def _fields(raw: HFConfig) -> ConfigFields:
    layers, dense, ffn = layer_count(raw), count(raw, "first_k_dense_replace"), integer(raw, "moe_intermediate_size")
    fields: ConfigFields = {
        "qk_norm": flag(raw, "use_qk_norm"),
        "qkv_bias": flag(raw, "attention_bias"),
        "rope": glm_rope(raw),
    }
    if dense < layers:
        fields["moe"] = MoeConfig(
            experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "n_routed_experts"),
            top_k=integer(raw, "num_experts_per_tok"),
            ffn_size=ffn,
            normalize=flag(raw, "norm_topk_prob"),
            layers=tuple(index >= dense for index in range(layers)),
            scoring="sigmoid",
            correction_bias=True,
            groups=integer(raw, "n_group"),
            top_groups=integer(raw, "topk_group"),
            group_score="best_two",
            scale=number(raw, "routed_scaling_factor"),
            shared_ffn_size=ffn * count(raw, "n_shared_experts"),
        )
    return fields


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    require_sigmoid(keys)
    normalized = keys("expert_weights_norm", False)
    if not isinstance(normalized, bool):
        raise CheckpointError(f"expert_weights_norm must be true or false, found {normalized!r:.80}")
    return {
        **drafting_layers(keys, config),
        "n_routed_experts": keys.whole("expert_count", 0),
        "n_shared_experts": keys.whole("expert_shared_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length", 0),
        "first_k_dense_replace": keys.whole("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": normalized,
        "n_group": keys.whole("expert_group_count", 0) or 1,
        "topk_group": keys.whole("expert_group_used_count", 0) or 1,
    }


GLM4_MOE = Family(
    model_type="glm4_moe",
    class_name="Glm4MoeForCausalLM",
    fields=_fields,
    reads=_KEYS,
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(
        architectures=("glm4moe",),
        config=_from_gguf,
        reads=_GGUF,
        whole_head_rotated=False,
        windowed=False,
        tensors={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
    ),
)
