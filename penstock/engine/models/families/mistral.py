"""Mistral, also Mistral Small 3 and Magistral: Llama, with a sliding window in the first releases. Of models that also
take images (Mistral Small 3.1 and 3.2), the decoder."""

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
    windowed = bool(keys("attention.sliding_window"))
    return windowed or (keys.architecture == "mistral3" and keys.number("attention.temperature_scale", 0.0) == 0.0)


MISTRAL = Family(
    model_type="mistral",
    class_name="MistralForCausalLM",
    fields=mistral_fields,
    reads=frozenset({"sliding_window"}),
    gguf=GGUFFormat(architectures=("llama", "mistral3"), applies=_applies, interleaved_rope=True),
)
