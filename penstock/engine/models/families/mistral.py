"""Mistral: Llama with a sliding window."""

from __future__ import annotations

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    layer_count,
    llama_fields,
    windows_by_type,
)


def mistral_fields(raw: HFConfig) -> ConfigFields:
    window = raw.get("sliding_window")
    return {**llama_fields(raw), "windows": windows_by_type(raw, window) or (window,) * layer_count(raw)}


def _applies(keys: GGUFKeys) -> bool:
    return keys.architecture == "mistral3" or bool(keys("attention.sliding_window"))


MISTRAL = Family(
    model_type="mistral",
    class_name="MistralForCausalLM",
    fields=mistral_fields,
    gguf=GGUFFormat(architectures=("llama", "mistral3"), applies=_applies, interleaved_rope=True),
)
