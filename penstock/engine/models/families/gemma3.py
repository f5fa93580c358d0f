"""Gemma 3: Gemma 2 without caps, with head norms, and a window and rotary base of their own in five layers of six. Of
models that also take images, the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    integer,
)
from penstock.engine.models.families.gemma import TANH, gemma_from_gguf
from penstock.engine.models.families.gemma2 import (
    GEMMA2_LIMITS,
    GEMMA2_READS,
    SANDWICH_NORMS,
    gemma2_fields,
    layer_types,
)
from penstock.engine.models.families.two_ropes import two_ropes

_PERIOD = 6


def _fields(raw: HFConfig) -> ConfigFields:
    period = integer(raw, "sliding_window_pattern", _PERIOD)
    full, local = two_ropes(raw, raw["rope_local_base_freq"])
    return {**gemma2_fields(raw, period), "qk_norm": True, "rope": full, "local_rope": local}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    return {
        **gemma_from_gguf(keys, config, width_scaled_layers=62),
        **layer_types(keys, config, _PERIOD),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
    }


GEMMA3 = Family(
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    fields=_fields,
    reads=GEMMA2_READS | {"sliding_window_pattern", "rope_local_base_freq"},
    limits={**GEMMA2_LIMITS, "attn_logit_softcapping": (None,)},  # which the reference has a key for, but does not use
    hidden_act=TANH,
    norm_offset=1.0,
    names=SANDWICH_NORMS,
    gguf=GGUFFormat(
        architectures=("gemma3",),
        config=_from_gguf,
        window_rope=True,
        reads=frozenset({"final_logit_softcapping", "attention.sliding_window_pattern"}),
    ),
)
