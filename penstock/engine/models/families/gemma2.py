"""Gemma 2: Gemma with sandwich norms, soft caps on scores and logits, a sliding window in every second layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    alternating_windows,
    integer,
)
from penstock.engine.models.families.gemma import GELU, gemma_fields, gemma_from_gguf
from penstock.engine.models.families.tensor_names import TensorNames

SANDWICH_NORMS = TensorNames(
    feed_forward_norm="pre_feedforward_layernorm",
    mixer_out_norm="post_attention_layernorm",
    feed_forward_out_norm="post_feedforward_layernorm",
)


def gemma2_fields(raw: HFConfig, default_period: int = 2) -> ConfigFields:
    return {
        **gemma_fields(raw),
        "attention_scale": integer(raw, "query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": raw.get("attn_logit_softcapping", 50.0),
        "logit_softcap": raw.get("final_logit_softcapping", 30.0),
        "windows": alternating_windows(raw, default_period),
    }


def layer_types(config: HFConfig, period: int) -> Mapping[str, Any]:
    """GGUF files do not say which layers have the window."""
    if "sliding_window" not in config:
        return {}
    layers = range(1, config["num_hidden_layers"] + 1)
    return {"layer_types": ["sliding_attention" if layer % period else "full_attention" for layer in layers]}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    return {
        **gemma_from_gguf(keys, config, width_scaled_layers=46),
        **layer_types(config, 2),
        "attn_logit_softcapping": keys.decimal("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.decimal("final_logit_softcapping", 30.0),
    }


GEMMA2 = Family(
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    fields=gemma2_fields,
    hidden_act=GELU,
    norm_offset=1.0,
    names=SANDWICH_NORMS,
    gguf=GGUFFormat(architectures=("gemma2",), config=_from_gguf),
)
