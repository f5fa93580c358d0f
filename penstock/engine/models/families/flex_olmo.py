"""FlexOlmo: OLMo 2 with experts in every layer."""

from __future__ import annotations

from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    flag,
    integer,
    layer_count,
)
from penstock.engine.models.families.olmo2 import OUT_NORMS, olmo2_fields
from penstock.engine.models.moe_config import MoeConfig


def _fields(raw: HFConfig) -> ConfigFields:
    moe = MoeConfig(
        experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "intermediate_size"),
        normalize=flag(raw, "norm_topk_prob"),
        layers=(True,) * layer_count(raw),
    )
    return {**olmo2_fields(raw), "moe": moe}


FLEX_OLMO = Family(
    model_type="flex_olmo",
    class_name="FlexOlmoForCausalLM",
    fields=_fields,
    reads=frozenset({"attention_bias", "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_local_experts"}),
    limits={"hidden_act": SILU},
    names=OUT_NORMS,
    gguf=GGUFFormat(architectures=()),
)
