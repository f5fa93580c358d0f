"""GLM-4.5 and 4.6: experts chosen by corrected sigmoids beside a shared one; half of each head rotated.

The layers for multi-token prediction that checkpoints have behind the last layer are no part of the decoder:
`speculative.mtp` reads the first."""

from __future__ import annotations

from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    count,
    flag,
    integer,
    layer_count,
    number,
)
from penstock.engine.models.families.glm4 import glm_rope
from penstock.engine.models.model_config import MoeConfig

_KEYS = frozenset({
    "attention_bias", "first_k_dense_replace", "moe_intermediate_size", "n_group", "n_routed_experts",
    "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "num_local_experts", "num_mtp_layers",
    "num_nextn_predict_layers", "routed_scaling_factor", "topk_group", "use_qk_norm",
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


GLM4_MOE = Family(
    model_type="glm4_moe",
    class_name="Glm4MoeForCausalLM",
    fields=_fields,
    reads=_KEYS,
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(architectures=()),
)
