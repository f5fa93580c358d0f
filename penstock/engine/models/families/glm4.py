"""GLM-4 (0414) and GLM-Z1: norms after attention and feed-forward, half of each head rotated by neighbouring pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.engine.models.families.family import (
    AXES,
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    flag,
)
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.rope import RopeConfig, read_rope
from penstock.errors import CheckpointError

GLM_ROTATED = 0.5
"""Share of a head that is rotated where a file does not say."""


_HALVES = "rotary_halves_in_gguf"
"""Whether a file has the first dimensions of all rotated pairs before the second ones; of GGUF files alone."""


def glm_rope(raw: HFConfig) -> RopeConfig:
    return read_rope({"partial_rotary_factor": GLM_ROTATED, **raw}, partial=True)


def _fields(raw: HFConfig) -> ConfigFields:
    return {
        "qkv_bias": flag(raw, "attention_bias"),
        "interleaved_rope": not flag(raw, _HALVES),
        "rope": glm_rope(raw),
    }


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    """Files of models that take images (GLM-4.1V) have the rows of queries and keys in the order that llama.cpp's
    kernel for them needs."""
    given = keys.metadata.get(f"{keys.architecture}.rope.dimension_sections")
    if given is None:
        return {_HALVES: False}
    sections = np.asarray(given)
    if sections.ndim != 1 or sections.dtype.kind not in "iu":
        raise CheckpointError(f"rope.dimension_sections must be a list of whole numbers, found {given!r:.80}")
    return {_HALVES: bool(sections.any())}


GLM4 = Family(
    model_type="glm4",
    class_name="Glm4ForCausalLM",
    fields=_fields,
    reads=frozenset({"attention_bias", _HALVES}),
    limits={"hidden_act": SILU},
    names=TensorNames(
        mixer_out_norm="post_self_attn_layernorm",
        feed_forward_out_norm="post_mlp_layernorm",
        fused_qkv="",  # gate and up are one matrix, these three are not
        fused=True,
    ),
    gguf=GGUFFormat(architectures=("glm4",), config=_from_gguf, reads=AXES, whole_head_rotated=False, windowed=False),
)
