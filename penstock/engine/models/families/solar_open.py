"""Solar Open: DeepSeek V3's experts in every layer, over Llama's attention. GGUF files say that they are GLM-4.5's."""

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
)
from penstock.engine.models.families.sigmoid_experts import CORRECTED_KEYS, corrected_sigmoids


def _fields(raw: HFConfig) -> ConfigFields:
    moe = corrected_sigmoids(
        raw,
        experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "n_routed_experts"),
        layers=(True,) * layer_count(raw),
        shared=count(raw, "n_shared_experts"),
    )
    return {"qkv_bias": flag(raw, "attention_bias"), "moe": moe}


SOLAR_OPEN = Family(
    model_type="solar_open",
    class_name="SolarOpenForCausalLM",
    fields=_fields,
    reads=CORRECTED_KEYS | {"attention_bias", "n_routed_experts", "n_shared_experts", "num_local_experts"},
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(architectures=()),
)
