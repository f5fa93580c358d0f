"""OLMo 3: OLMo 2 with a sliding window in three layers of four, and RoPE scaling in the others only."""

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
)
from penstock.engine.models.families.gemma2 import layer_types
from penstock.engine.models.families.olmo2 import OUT_NORMS, olmo2_fields
from penstock.engine.models.families.two_ropes import two_ropes

_PERIOD = 4
_THETA = 500_000.0
"""The base of windowed layers whatever `rope_theta` says, unless they have an entry of their own."""


def _fields(raw: HFConfig) -> ConfigFields:
    full, local = two_ropes(raw, _THETA)
    return {
        **olmo2_fields(raw),
        "windows": alternating_windows(raw, _PERIOD),
        "rope": full,
        "local_rope": local,
    }


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    own = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return {
        **layer_types(keys, config, _PERIOD),
        "rope_parameters": {"sliding_attention": own},
    }


OLMO3 = Family(
    model_type="olmo3",
    class_name="Olmo3ForCausalLM",
    fields=_fields,
    reads=frozenset({"attention_bias", "sliding_window"}),
    names=OUT_NORMS,
    gguf=GGUFFormat(
        architectures=("olmo2",),
        applies=lambda keys: bool(keys("attention.sliding_window")),
        config=_from_gguf,
        reads=frozenset({"attention.sliding_window_pattern"}),
    ),
)
