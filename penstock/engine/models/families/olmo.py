"""OLMo 1B and 7B: Llama with LayerNorms that have no weights; queries, keys and values may be clipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    flag,
    number,
)
from penstock.engine.models.families.layer_normed import LAYER_NORM_EPSILON, centred_architecture
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.errors import CheckpointError

_EPS = 1e-5
_CLAMP = "attention.clamp_kqv"


def clipped(raw: HFConfig) -> float | None:
    clip = None if raw.get("clip_qkv") is None else number(raw, "clip_qkv")
    if clip is not None and not 0 < clip < 1e30:
        raise CheckpointError(f"clip_qkv must be positive, or left out; found {clip}")
    return clip


def _fields(raw: HFConfig) -> ConfigFields:
    bias = flag(raw, "attention_bias")
    return {"rms_eps": _EPS, "layer_norms": True, "clip_qkv": clipped(raw), "qkv_bias": bias, "output_bias": bias}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    if abs(config["rms_norm_eps"] - _EPS) > 1e-9:
        raise CheckpointError(f"{LAYER_NORM_EPSILON} is {config['rms_norm_eps']}; that of olmo models is {_EPS}")
    return {"clip_qkv": keys.number(_CLAMP, 0.0) or None}


OLMO = Family(
    model_type="olmo",
    class_name="OlmoForCausalLM",
    fields=_fields,
    reads=frozenset({"attention_bias", "clip_qkv"}),
    limits={"hidden_act": SILU},
    names=TensorNames(mixer_norm="", feed_forward_norm="", final_norm=""),
    gguf=GGUFFormat(
        architectures=("olmo",),
        interleaved_rope=True,
        epsilon=LAYER_NORM_EPSILON,
        windowed=False,
        config=_from_gguf,
        reads=frozenset({_CLAMP}),
    ),
    architecture=centred_architecture,
)
