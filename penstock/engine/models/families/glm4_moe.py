"""GLM-4.5 and 4.6: experts chosen by corrected sigmoids beside a shared one; half of each head rotated.

The layers for multi-token prediction that checkpoints have behind the last layer are no part of the decoder:
`speculative.mtp` reads the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    AXES,
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
)
from penstock.engine.models.families.glm4 import glm_rope
from penstock.engine.models.families.sigmoid_experts import (
    CORRECTED_GGUF,
    CORRECTED_KEYS,
    SHARED_TENSORS,
    corrected_from_gguf,
    corrected_sigmoids,
)

_KEYS = CORRECTED_KEYS | {
    "attention_bias", "first_k_dense_replace", "n_routed_experts", "n_shared_experts", "num_local_experts",
    "num_mtp_layers", "num_nextn_predict_layers", "use_qk_norm",
}  # fmt: skip


def _fields(raw: HFConfig) -> ConfigFields:
    layers, dense = layer_count(raw), count(raw, "first_k_dense_replace")
    moe = corrected_sigmoids(
        raw,
        experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "n_routed_experts"),
        layers=tuple(index >= dense for index in range(layers)),
        shared=count(raw, "n_shared_experts"),
    )
    return {
        "qk_norm": flag(raw, "use_qk_norm"),
        "qkv_bias": flag(raw, "attention_bias"),
        "rope": glm_rope(raw),
        "moe": moe,
    }


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    return {
        **drafting_layers(keys, config),
        **corrected_from_gguf(keys),
        "n_routed_experts": keys.whole("expert_count", 0),
        "n_shared_experts": keys.whole("expert_shared_count", 0),
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
        reads=CORRECTED_GGUF | AXES | {NEXTN_KEY},
        whole_head_rotated=False,
        windowed=False,
        tensors={
            "post_attention_norm": "post_attention_layernorm",
            **SHARED_TENSORS,
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
    ),
)
