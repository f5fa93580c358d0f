"""Ministral (2024): Mistral with a sliding window in the layers that `layer_types` names, or in all."""

from __future__ import annotations

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    layer_count,
    window_of,
    windows_by_type,
)


def _fields(raw: HFConfig) -> ConfigFields:
    window = window_of(raw)
    return {"windows": windows_by_type(raw, window) or (window,) * layer_count(raw)}


MINISTRAL = Family(
    model_type="ministral",
    class_name="MinistralForCausalLM",
    fields=_fields,
    reads=frozenset({"sliding_window"}),
    gguf=GGUFFormat(architectures=()),
)
