"""Helium 1: Llama whose rotations pair neighbouring dimensions."""

from __future__ import annotations

from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    flag,
    integer,
)
from penstock.errors import CheckpointError


def _fields(raw: HFConfig) -> ConfigFields:
    heads, dim, hidden = integer(raw, "num_attention_heads"), integer(raw, "head_dim"), integer(raw, "hidden_size")
    if heads * dim != hidden:
        raise CheckpointError(f"{heads} heads of size {dim} must make up hidden_size {hidden} in helium models")
    return {
        "interleaved_rope": True,
        "qkv_bias": flag(raw, "attention_bias"),
        "mlp_bias": flag(raw, "mlp_bias"),
    }


HELIUM = Family(
    model_type="helium",
    class_name="HeliumForCausalLM",
    fields=_fields,
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(architectures=()),
)
