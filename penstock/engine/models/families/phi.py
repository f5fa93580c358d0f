"""Phi-1, Phi-1.5 and Phi-2: attention and feed-forward side by side behind one LayerNorm, biases everywhere, that of
the head included; partly rotated heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    GELU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    flag,
)
from penstock.engine.models.families.layer_normed import LAYER_NORM_EPSILON, centred_architecture, layer_normed
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.rope import read_rope

_ROTATED = 0.5
"""Share of a head that is rotated where a file does not say."""


def _fields(raw: HFConfig) -> ConfigFields:
    return {
        **layer_normed(raw),
        "activation": "plain_gelu_tanh",
        "parallel": True,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "biased_qk_norm": flag(raw, "qk_layernorm"),
        "rope": read_rope({"partial_rotary_factor": _ROTATED, **raw}, partial=True),
    }


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    return {"layer_norm_eps": config["rms_norm_eps"], "attention_bias": False, "mlp_bias": False, "qk_layernorm": False}


PHI = Family(
    model_type="phi",
    class_name="PhiForCausalLM",
    fields=_fields,
    reads=frozenset({"layer_norm_eps", "qk_layernorm"}),
    limits={"hidden_act": GELU, "tie_word_embeddings": (False,)},
    hidden_act="gelu_new",
    names=TensorNames(
        final_norm="final_layernorm",
        feed_forward_norm="input_layernorm",
        output="dense",
        head_norms=("q_layernorm", "k_layernorm"),
        gate_up=("gate_proj", "fc1"),
        down="fc2",
    ),
    gguf=GGUFFormat(
        architectures=("phi2",),
        epsilon=LAYER_NORM_EPSILON,
        whole_head_rotated=False,
        windowed=False,
        config=_from_gguf,
    ),
    architecture=centred_architecture,
)
