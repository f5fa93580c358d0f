"""GLM-4.7-Flash: DeepSeek V3's attention over latents and experts, with dense layers named one by one. Its GGUF files
are read as DeepSeek V3's, which they say they are."""

from __future__ import annotations

from penstock.engine.models.families.deepseek import (
    LATENT_KEYS,
    LATENT_NAMES,
    latent_architecture,
    latent_fields,
    optional_flag,
)
from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    count,
    integer,
)
from penstock.engine.models.families.sigmoid_experts import CORRECTED_KEYS, corrected_sigmoids, sparse_by_type


def _fields(raw: HFConfig) -> ConfigFields:
    moe = corrected_sigmoids(
        raw,
        experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "n_routed_experts"),
        layers=sparse_by_type(raw, 1),
        shared=count(raw, "n_shared_experts"),
    )
    return {**latent_fields(raw, interleaved=optional_flag(raw, "rope_interleave")), "moe": moe}


GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    class_name="Glm4MoeLiteForCausalLM",
    fields=_fields,
    reads=LATENT_KEYS
    | CORRECTED_KEYS
    | {"n_routed_experts", "n_shared_experts", "num_local_experts", "rope_interleave", "mlp_layer_types"},
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(architectures=()),
    names=LATENT_NAMES,
    architecture=latent_architecture,
)
