"""GLM-4 (0414) and GLM-Z1: norms after attention and feed-forward, half of each head rotated by neighbouring pairs."""

from __future__ import annotations

from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    flag,
)
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.rope import RopeConfig, read_rope

GLM_ROTATED = 0.5
"""Share of a head that is rotated where a file does not say."""


def glm_rope(raw: HFConfig) -> RopeConfig:
    return read_rope({"partial_rotary_factor": GLM_ROTATED, **raw}, partial=True)


def _fields(raw: HFConfig) -> ConfigFields:
    return {"qkv_bias": flag(raw, "attention_bias"), "interleaved_rope": True, "rope": glm_rope(raw)}


GLM4 = Family(
    model_type="glm4",
    class_name="Glm4ForCausalLM",
    fields=_fields,
    reads=frozenset({"attention_bias"}),
    limits={"hidden_act": SILU},
    names=TensorNames(
        mixer_out_norm="post_self_attn_layernorm",
        feed_forward_out_norm="post_mlp_layernorm",
        fused_qkv="",  # gate and up are one matrix, these three are not
        fused=True,
    ),
    gguf=GGUFFormat(architectures=("glm4",), whole_head_rotated=False, windowed=False),
)
