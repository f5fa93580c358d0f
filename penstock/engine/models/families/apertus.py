"""Apertus: a norm on each head of queries and keys, feed-forwards of xIELU without a gate."""

from __future__ import annotations

from penstock.engine.backends.activation import Xielu
from penstock.engine.models.families.family import ConfigFields, Family, GGUFFormat, HFConfig, flag
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.rope import read_rope

_ROPE = {
    "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
"""Of a file that says nothing."""


def _fields(raw: HFConfig) -> ConfigFields:
    bias = flag(raw, "attention_bias")
    fields: ConfigFields = {"activation": Xielu(), "qk_norm": True, "qkv_bias": bias, "output_bias": bias}
    if raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
        fields["rope"] = read_rope(raw, _ROPE)
    return fields


APERTUS = Family(
    model_type="apertus",
    class_name="ApertusForCausalLM",
    fields=_fields,
    reads=frozenset({"attention_bias"}),
    hidden_act="xielu",
    limits={"hidden_act": ("xielu",)},
    names=TensorNames(mixer_norm="attention_layernorm", feed_forward_norm="feedforward_layernorm"),
    gguf=GGUFFormat(
        architectures=("apertus",),
        windowed=False,
        numbers={
            "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
            "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
            "xielu.beta": ("mlp.act_fn.beta", ()),
            "xielu.eps": ("mlp.act_fn.eps", ()),
        },
    ),
)
