"""Minitron and Nemotron 4: LayerNorms whose weights are stored minus one, partly rotated heads, feed-forwards of
squared ReLUs without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    flag,
)
from penstock.engine.models.families.layer_normed import LAYER_NORM_EPSILON, centred_architecture, layer_normed
from penstock.engine.models.rope import read_rope

_ROTATED = 0.5
"""Share of a head that is rotated where a file does not say."""


def _fields(raw: HFConfig) -> ConfigFields:
    bias = flag(raw, "attention_bias")
    return {
        **layer_normed(raw, "norm_eps"),
        "activation": "relu2",
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": flag(raw, "mlp_bias"),
        "rope": read_rope({"partial_rotary_factor": _ROTATED, **raw}, partial=True),
    }


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    return {"norm_eps": config["rms_norm_eps"], "mlp_bias": config.get("mlp_bias", False)}


NEMOTRON = Family(
    model_type="nemotron",
    class_name="NemotronForCausalLM",
    fields=_fields,
    reads=frozenset({"attention_bias", "mlp_bias", "norm_eps"}),
    hidden_act="relu2",
    limits={"hidden_act": ("relu2",)},
    norm_offset=1.0,
    gguf=GGUFFormat(
        architectures=("nemotron",),
        epsilon=LAYER_NORM_EPSILON,
        whole_head_rotated=False,
        windowed=False,
        config=_from_gguf,
    ),
    architecture=centred_architecture,
)
