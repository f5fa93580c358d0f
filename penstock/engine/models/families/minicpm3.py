"""MiniCPM 3: DeepSeek V2's attention over latents, dense feed-forwards, and Granite's multipliers by other names."""

from __future__ import annotations

from penstock.engine.models.families.deepseek import LATENT_KEYS, LATENT_NAMES, latent_architecture, latent_fields
from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    flag,
    integer,
    layer_count,
    number,
)
from penstock.engine.models.families.granite import multiplied


def _fields(raw: HFConfig) -> ConfigFields:
    layers, hidden = layer_count(raw), integer(raw, "hidden_size")
    values = integer(raw, "v_head_dim", hidden // integer(raw, "num_attention_heads"))
    depth = 1.0 if raw.get("scale_depth") is None else number(raw, "scale_depth") / layers**0.5
    base = hidden if raw.get("dim_model_base") is None else number(raw, "dim_model_base")
    scales = multiplied(
        {
            **raw,
            "embedding_multiplier": raw["scale_emb"],
            "residual_multiplier": depth,
            "logits_scaling": hidden / base if base else 0.0,
            "attention_multiplier": 1.0,
        }
    )
    latents = latent_fields({**raw, "v_head_dim": values}, interleaved=False)
    return {**scales, **latents, "mlp_bias": flag(raw, "mlp_bias")}


MINICPM3 = Family(
    model_type="minicpm3",
    class_name="MiniCPM3ForCausalLM",
    fields=_fields,
    reads=LATENT_KEYS | {"dim_model_base", "mlp_bias", "scale_depth", "scale_emb"},
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(architectures=()),
    names=LATENT_NAMES,
    architecture=latent_architecture,
)
