"""Jais 2: Llama with LayerNorms, biases everywhere, and feed-forwards of squared ReLUs without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import ConfigFields, Family, GGUFFormat, GGUFKeys, HFConfig, llama_fields
from penstock.engine.models.families.layer_normed import LAYER_NORM_EPSILON, centred_architecture, layer_normed


def _fields(raw: HFConfig) -> ConfigFields:
    return {**llama_fields(raw), **layer_normed(raw), "activation": "relu2"}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    return {"layer_norm_eps": config["rms_norm_eps"], "mlp_bias": config.get("mlp_bias", False)}


JAIS2 = Family(
    model_type="jais2",
    class_name="Jais2ForCausalLM",
    fields=_fields,
    reads=frozenset({"attention_bias", "layer_norm_eps", "mlp_bias"}),
    hidden_act="relu2",
    limits={"hidden_act": ("relu2",)},
    gguf=GGUFFormat(
        architectures=("jais2",),
        epsilon=LAYER_NORM_EPSILON,
        windowed=False,
        config=_from_gguf,
    ),
    architecture=centred_architecture,
)
