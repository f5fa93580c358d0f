"""Command-R7B, Command A, Aya 3: Command-R with windows; the layers that see everything know no positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.cohere import (
    PARALLEL_NAMES,
    parallel_fields,
    parallel_from_gguf,
)
from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    alternating_windows,
    integer,
)
from penstock.engine.models.families.gemma2 import layer_types
from penstock.engine.models.families.layer_normed import LAYER_NORM_EPSILON, centred_architecture
from penstock.errors import CheckpointError

_PERIOD = 4


def _fields(raw: HFConfig) -> ConfigFields:
    windows = alternating_windows(raw, integer(raw, "sliding_window_pattern", _PERIOD))
    return {**parallel_fields(raw), "windows": windows, "unrotated": tuple(window is None for window in windows)}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    if not config["sliding_window"]:
        raise CheckpointError(f"{keys.architecture}.attention.sliding_window is missing or 0; the file is damaged")
    return {**parallel_from_gguf(keys, config), **layer_types(keys, config, _PERIOD)}


COHERE2 = Family(
    model_type="cohere2",
    class_name="Cohere2ForCausalLM",
    fields=_fields,
    reads=frozenset(
        {
            "attention_bias",
            "layer_norm_eps",
            "logit_scale",
            "sliding_window",
            "sliding_window_pattern",
        }
    ),
    limits={"hidden_act": SILU},
    names=PARALLEL_NAMES,
    gguf=GGUFFormat(
        architectures=("cohere2",),
        config=_from_gguf,
        epsilon=LAYER_NORM_EPSILON,
        reads=frozenset({"logit_scale", "attention.sliding_window_pattern"}),
    ),
    architecture=centred_architecture,
)
