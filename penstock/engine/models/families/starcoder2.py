"""StarCoder 2: LayerNorms, biases everywhere, feed-forwards without a gate, a sliding window."""

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
    layer_count,
    window_of,
)
from penstock.engine.models.families.layer_normed import LAYER_NORM_EPSILON, centred_architecture, layer_normed
from penstock.engine.models.families.tensor_names import TensorNames


def _fields(raw: HFConfig) -> ConfigFields:
    bias = flag(raw, "use_bias")
    return {
        **layer_normed(raw, "norm_epsilon"),
        "activation": "plain_gelu_tanh",
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "windows": (window_of(raw),) * layer_count(raw),
    }


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    bias = config["attention_bias"] or config["fused_bias"]
    # What others call these biases, such files do not.
    return {"norm_epsilon": config["rms_norm_eps"], "use_bias": bias, "attention_bias": False, "mlp_bias": False}


STARCODER2 = Family(
    model_type="starcoder2",
    class_name="Starcoder2ForCausalLM",
    fields=_fields,
    reads=frozenset({"norm_epsilon", "sliding_window", "use_bias"}),
    limits={"hidden_act": GELU},
    hidden_act="gelu_pytorch_tanh",
    names=TensorNames(gate_up=("gate_proj", "c_fc"), down="c_proj"),
    gguf=GGUFFormat(architectures=("starcoder2",), epsilon=LAYER_NORM_EPSILON, config=_from_gguf),
    architecture=centred_architecture,
)
