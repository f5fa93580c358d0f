"""EXAONE 4: norms behind attention and feed-forward, head norms; where some layers have windows, the others know no
positions."""

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
    window_of,
)
from penstock.engine.models.families.gemma2 import layer_types
from penstock.engine.models.families.olmo2 import OUT_NORMS

_PERIOD = 4
_LARGEST_LAYERS, _LARGEST_WINDOW = 64, 4096


def exaone_attention(raw: HFConfig) -> ConfigFields:
    """Head norms; windows, and no rotary embedding in the other layers."""
    if window_of(raw) is None:
        return {"qk_norm": True}
    given = raw.get("layer_types") is not None
    windows = alternating_windows(raw, 1 if given else integer(raw, "sliding_window_pattern"))
    return {"qk_norm": True, "windows": windows, "unrotated": tuple(window is None for window in windows)}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    # Files of the largest model may leave the window out.
    default = _LARGEST_WINDOW if config["num_hidden_layers"] == _LARGEST_LAYERS else 0
    window = keys.whole("attention.sliding_window", default) or None
    return {**layer_types(keys, {**config, "sliding_window": window}, _PERIOD), "sliding_window": window}


EXAONE4 = Family(
    model_type="exaone4",
    class_name="Exaone4ForCausalLM",
    fields=exaone_attention,
    reads=frozenset({"sliding_window", "sliding_window_pattern"}),
    names=OUT_NORMS,
    gguf=GGUFFormat(
        architectures=("exaone4",), config=_from_gguf, reads=frozenset({"attention.sliding_window_pattern"})
    ),
)
