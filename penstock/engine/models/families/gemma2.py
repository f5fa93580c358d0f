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
    is_array,
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
        "attention_softcap": cap(raw, "attn_logit_softcapping"),
        "logit_softcap": cap(raw, "final_logit_softcapping"),
        "windows": alternating_windows(raw, period),
    }


def cap(raw: HFConfig, key: str) -> float | None:
    if raw[key] is None:
        return None
    found = number(raw, key)
    if found <= 0:
        raise CheckpointError(f"{key} must be positive or null, found {found}")
    return found


def layer_types(keys: GGUFKeys, config: HFConfig, default_period: int) -> Mapping[str, Any]:
    """Which layers have the window: all but every n-th. Few GGUF files say so."""
    layers = config["num_hidden_layers"]
    if not config.get("sliding_window"):
        return {"layer_types": ["full_attention"] * layers}
    given: Any = keys.metadata.get(f"{keys.architecture}.attention.sliding_window_pattern")
    if is_array(given):
        if len(given) != layers:
            raise CheckpointError(f"attention.sliding_window_pattern has {len(given)} entries for {layers} layers")
        local = [bool(entry) for entry in given]
    else:
        # 0: all have it; 1: none has.
        period = keys.whole("attention.sliding_window_pattern", default_period)
        local = [not period or bool((layer + 1) % period) for layer in range(layers)]
    return {"layer_types": ["sliding_attention" if entry else "full_attention" for entry in local]}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    window = keys.whole("attention.sliding_window", 4096)
    if window == 0 or (keys("rope.scaling.type") == "none" and keys.number("rope.scaling.factor", 1.0) != 1.0):
        raise CheckpointError(
            "gemma2.attention.sliding_window: 0, or a rope.scaling.factor of type none, is not supported"
        )
    return {
        **gemma_from_gguf(keys, config, width_scaled_layers=46),
        **layer_types(keys, {**config, "sliding_window": window}, 2),
        "sliding_window": window,
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
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
    gguf=GGUFFormat(
        architectures=("gemma2",),
        config=_from_gguf,
        reads=frozenset({"attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window_pattern"}),
    ),
)
