"""Command-R and Aya: LayerNorms, attention beside the feed-forward, neighbouring dimensions rotated, scaled logits."""

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
    number,
)
from penstock.engine.models.families.layer_normed import LAYER_NORM_EPSILON, centred_architecture
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.errors import CheckpointError

PARALLEL_NAMES = TensorNames(feed_forward_norm="input_layernorm")
"""One norm for both parts."""


def parallel_fields(raw: HFConfig) -> ConfigFields:
    bias = flag(raw, "attention_bias")
    return {
        "rms_eps": number(raw, "layer_norm_eps"),
        "logit_scale": number(raw, "logit_scale"),
        "parallel": True,
        "layer_norms": True,
        "interleaved_rope": True,
        "qkv_bias": bias,
        "output_bias": bias,
    }


def _fields(raw: HFConfig) -> ConfigFields:
    normed = flag(raw, "use_qk_norm")
    return {**parallel_fields(raw), "qk_norm": normed, "qk_layer_norm": normed}


def parallel_from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    if keys("logit_scale") is None:
        raise CheckpointError(f"{keys.architecture}.logit_scale is missing; the file is damaged")
    return {
        "layer_norm_eps": config["rms_norm_eps"],
        "logit_scale": keys.number("logit_scale", 1.0) or 1.0,
    }


COHERE = Family(
    model_type="cohere",
    class_name="CohereForCausalLM",
    fields=_fields,
    reads=frozenset({"attention_bias", "layer_norm_eps", "logit_scale", "use_qk_norm"}),
    limits={"hidden_act": SILU},
    names=PARALLEL_NAMES,
    gguf=GGUFFormat(
        architectures=("command-r",),
        epsilon=LAYER_NORM_EPSILON,
        config=parallel_from_gguf,
        reads=frozenset({"logit_scale"}),
        windowed=False,
    ),
    architecture=centred_architecture,
)
