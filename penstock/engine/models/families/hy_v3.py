"""Hunyuan 3 (Hy3): a norm on each head of queries and keys; experts by corrected sigmoids beside one that all tokens
visit."""

from __future__ import annotations

from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    count,
    integer,
    llama_fields,
    number,
)
from penstock.engine.models.families.sigmoid_experts import sparse_by_type
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.model_config import MoeConfig


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
    gguf=GGUFFormat(architectures=()),
)  # fmt: skip
