"""Seed-OSS: biases of query, key and value that the output does not share."""

from __future__ import annotations

from penstock.engine.models.families.family import ConfigFields, Family, GGUFFormat, HFConfig, flag


def _fields(raw: HFConfig) -> ConfigFields:
    return {
        "qkv_bias": flag(raw, "attention_bias"),
        "output_bias": flag(raw, "attention_out_bias"),
        "mlp_bias": flag(raw, "mlp_bias"),
    }


SEED_OSS = Family(
    model_type="seed_oss",
    class_name="SeedOssForCausalLM",
    fields=_fields,
    reads=frozenset({"attention_bias", "attention_out_bias", "mlp_bias"}),
    gguf=GGUFFormat(
        architectures=("seed_oss",), windowed=False, tensors={"post_attention_norm": "post_attention_layernorm"}
    ),
)
