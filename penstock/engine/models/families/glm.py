"""GLM-4-9B and GLM-Edge: half of each head rotated, neighbouring dimensions; gate and up as one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    flag,
)
from penstock.engine.models.families.glm4 import glm_rope
from penstock.engine.models.families.tensor_names import TensorNames


def _fields(raw: HFConfig) -> ConfigFields:
    return {"qkv_bias": flag(raw, "attention_bias"), "interleaved_rope": True, "rope": glm_rope(raw)}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    """Query, key and value may be one matrix, with one bias."""
    return {"attention_bias": config["attention_bias"] or config["fused_bias"]}


GLM = Family(
    model_type="glm",
    class_name="GlmForCausalLM",
    fields=_fields,
    reads=frozenset({"attention_bias"}),
    limits={"hidden_act": SILU},
    names=TensorNames(fused_gate_up="gate_up_proj", fused=True),
    gguf=GGUFFormat(architectures=("chatglm",), whole_head_rotated=False, windowed=False, config=_from_gguf),
)
