"""Qwen3: a norm on each head of queries and keys."""

from __future__ import annotations

from penstock.engine.models.families.family import AXES, ConfigFields, Family, GGUFFormat, HFConfig, llama_fields
from penstock.engine.models.families.qwen2 import WINDOW_KEYS, qwen_windows


def _fields(raw: HFConfig) -> ConfigFields:
    return {**llama_fields(raw), "qk_norm": True, "windows": qwen_windows(raw)}


QWEN3 = Family(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    fields=_fields,
    reads=WINDOW_KEYS | {"attention_bias"},
    gguf=GGUFFormat(architectures=("qwen3", "qwen3vl"), reads=AXES, windowed=False),
)
