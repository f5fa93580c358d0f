"""OLMo 2: norms behind attention and feed-forward instead of before them; queries and keys normalized as whole rows."""

from __future__ import annotations

from penstock.engine.models.families.family import ConfigFields, Family, GGUFFormat, HFConfig, llama_fields
from penstock.engine.models.families.tensor_names import TensorNames

OUT_NORMS = TensorNames(
    mixer_norm="",
    feed_forward_norm="",
    mixer_out_norm="post_attention_layernorm",
    feed_forward_out_norm="post_feedforward_layernorm",
)


def olmo2_fields(raw: HFConfig) -> ConfigFields:
    return {**llama_fields(raw), "row_norms": True}


OLMO2 = Family(
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    fields=olmo2_fields,
    reads=frozenset({"attention_bias"}),
    names=OUT_NORMS,
    gguf=GGUFFormat(architectures=("olmo2",), applies=lambda keys: not keys("attention.sliding_window")),
)
