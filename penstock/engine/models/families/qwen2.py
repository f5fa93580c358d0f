"""Qwen2 and Qwen2.5: biases of query, key and value; sliding windows in the upper layers."""

from __future__ import annotations

from penstock.engine.models.families.family import (
    AXES,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    Windows,
    flag,
    layer_count,
    number,
    window_of,
    windows_by_type,
)

WINDOW_KEYS = frozenset({"sliding_window", "use_sliding_window", "max_window_layers"})


def qwen_windows(raw: HFConfig) -> Windows:
    window, full = window_of(raw) if flag(raw, "use_sliding_window") else None, number(raw, "max_window_layers")
    by_index = tuple(None if index < full else window for index in range(layer_count(raw)))
    return windows_by_type(raw, window) or by_index


def _fields(raw: HFConfig) -> ConfigFields:
    return {"qkv_bias": True, "windows": qwen_windows(raw)}


QWEN2 = Family(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    fields=_fields,
    reads=WINDOW_KEYS | {"attention_bias"},  # which GGUF files say; the biases are always there
    gguf=GGUFFormat(architectures=("qwen2", "qwen2vl"), reads=AXES, windowed=False),
)
