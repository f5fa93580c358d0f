"""Qwen2 and Qwen2.5: biases of query, key and value; sliding windows in the upper layers."""

from __future__ import annotations

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    Windows,
    integer,
    layer_count,
    windows_by_type,
)


def qwen_windows(raw: HFConfig) -> Windows:
    window, layers = raw.get("sliding_window"), layer_count(raw)
    if window is None or not (raw.get("use_sliding_window", False) or raw.get("layer_types")):
        return (None,) * layers
    full = integer(raw, "max_window_layers", layers)
    return windows_by_type(raw, window) or tuple(None if index < full else window for index in range(layers))


def _fields(raw: HFConfig) -> ConfigFields:
    return {"qkv_bias": True, "windows": qwen_windows(raw)}


QWEN2 = Family(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    fields=_fields,
    gguf=GGUFFormat(architectures=("qwen2",), windowed=False),
)
