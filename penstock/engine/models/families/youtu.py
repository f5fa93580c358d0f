"""Youtu-LLM: DeepSeek V3's attention over latents with dense feed-forwards."""

from __future__ import annotations

from penstock.engine.models.families.deepseek import (
    LATENT_KEYS,
    LATENT_NAMES,
    latent_architecture,
    latent_fields,
    optional_flag,
)
from penstock.engine.models.families.family import SILU, ConfigFields, Family, GGUFFormat, HFConfig


def _fields(raw: HFConfig) -> ConfigFields:
    return latent_fields(raw, interleaved=optional_flag(raw, "rope_interleave"))


YOUTU = Family(
    model_type="youtu",
    class_name="YoutuForCausalLM",
    fields=_fields,
    reads=LATENT_KEYS | {"rope_interleave"},
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(architectures=()),
    names=LATENT_NAMES,
    architecture=latent_architecture,
)
