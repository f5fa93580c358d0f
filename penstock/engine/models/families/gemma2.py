"""Gemma 2: Gemma with sandwich norms, soft caps on scores and logits, a sliding window in every second layer."""

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
    alternating_windows,
    integer,
    number,
)
from penstock.engine.models.families.gemma import TANH, gemma_fields, gemma_from_gguf
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.errors import CheckpointError

SANDWICH_NORMS = TensorNames(
    feed_forward_norm="pre_feedforward_layernorm",
    mixer_out_norm="post_attention_layernorm",
    feed_forward_out_norm="post_feedforward_layernorm",
)


GEMMA2_READS = frozenset({
    "attention_bias", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "sliding_window",
})  # fmt: skip
GEMMA2_LIMITS = {"hidden_activation": GELU, "hidden_act": (*GELU, "gelu", None)}
"""`hidden_act`, the older name, does not decide; a file in which the two disagree is refused."""


def gemma2_fields(raw: HFConfig, period: int = 2) -> ConfigFields:
    return {
        **gemma_fields(raw),
        "attention_scale": integer(raw, "query_pre_attn_scalar") ** -0.5,
        "attention_softcap": _cap(raw, "attn_logit_softcapping"),
        "logit_softcap": _cap(raw, "final_logit_softcapping"),
        "windows": alternating_windows(raw, period),
    }


def _cap(raw: HFConfig, key: str) -> float | None:
    if raw[key] is None:
        return None
    cap = number(raw, key)
    if cap <= 0:
        raise CheckpointError(f"{key} must be positive or null, found {cap}")
    return cap


def layer_types(config: HFConfig, period: int) -> Mapping[str, Any]:
    """GGUF files do not say which layers have the window."""
    if config.get("sliding_window") is None:
        return {}
    layers = range(1, config["num_hidden_layers"] + 1)
    return {"layer_types": ["sliding_attention" if layer % period else "full_attention" for layer in layers]}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    window = keys("attention.sliding_window", 4096)
    return {
        **gemma_from_gguf(keys, config, width_scaled_layers=46),
        **layer_types({**config, "sliding_window": window}, 2),
        "sliding_window": window,
        "attn_logit_softcapping": keys.decimal("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.decimal("final_logit_softcapping", 30.0),
    }


GEMMA2 = Family(
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    fields=gemma2_fields,
    reads=GEMMA2_READS,
    limits=GEMMA2_LIMITS,
    hidden_act=TANH,
    norm_offset=1.0,
    names=SANDWICH_NORMS,
    gguf=GGUFFormat(architectures=("gemma2",), config=_from_gguf),
)
