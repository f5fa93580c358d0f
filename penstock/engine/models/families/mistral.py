"""Mistral: Llama with a sliding window."""

from __future__ import annotations

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    layer_count,
    window_of,
)


def mistral_fields(raw: HFConfig) -> ConfigFields:
    return {"windows": (window_of(raw),) * layer_count(raw)}


def _applies(keys: GGUFKeys) -> bool:
    return keys.architecture == "mistral3" or bool(keys("attention.sliding_window"))


MISTRAL = Family(
    model_type="mistral",
    class_name="MistralForCausalLM",
    fields=mistral_fields,
    reads=frozenset({"sliding_window"}),
    gguf=GGUFFormat(architectures=("llama", "mistral3"), applies=_applies, interleaved_rope=True),
)
