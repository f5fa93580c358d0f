"""Granite Swash: Granite with sliding windows in three layers of four, attention sinks, and a rotary base of its own in
each layer, which may have no rotary embedding; with experts too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    Windows,
    layer_count,
    llama_fields,
    window_of,
    windows_by_type,
)
from penstock.engine.models.families.granite import GGUF_SCALES, MULTIPLIERS, multiplied, multipliers_from_gguf
from penstock.engine.models.families.granite_moe import GRANITE_MOE_NAMES, granite_moe_fields
from penstock.engine.models.rope import NO_ROPE, RopeConfig, read_rope
from penstock.errors import CheckpointError

_PERIOD = 4
_KEYS = MULTIPLIERS | {"attention_bias", "layer_rope_theta", "sliding_window"}


def _windows(raw: HFConfig) -> Windows:
    window = window_of(raw)
    spaced = tuple(window if index % _PERIOD else None for index in range(layer_count(raw)))
    return windows_by_type(raw, window) or spaced


def _ropes(raw: HFConfig) -> tuple[RopeConfig, ...]:
    """A base of 0: no rotary embedding."""
    layers, usual, thetas = layer_count(raw), read_rope(raw), raw.get("layer_rope_theta")
    if thetas is None:
        return (usual,) * layers
    wrong = not isinstance(thetas, list | tuple) or len(thetas) != layers
    if wrong or any(isinstance(one, bool) or not isinstance(one, int | float) or not 0 <= one < 1e30 for one in thetas):
        raise CheckpointError(f"layer_rope_theta must have a number for each of {layers} layers, found {thetas!r:.80}")
    return tuple(replace(usual, theta=float(theta)) if theta else NO_ROPE for theta in thetas)


def _swa_fields(raw: HFConfig) -> ConfigFields:
    return {"windows": _windows(raw), "layer_ropes": _ropes(raw), "attention_sinks": True}


def _fields(raw: HFConfig) -> ConfigFields:
    return {**llama_fields(raw), **multiplied(raw), **_swa_fields(raw)}


def _moe_fields(raw: HFConfig) -> ConfigFields:
    return {**granite_moe_fields(raw), **_swa_fields(raw)}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    """Files have one rotary base; a layer may have no rotary embedding."""
    layers = config["num_hidden_layers"]
    windowed = keys.flags("attention.sliding_window_pattern", layers)
    if not config["sliding_window"] or windowed is None:
        raise CheckpointError(
            f"{keys.architecture}.attention.sliding_window or sliding_window_pattern is missing; the file is damaged"
        )
    rotated = keys.flags("attention.rope_pattern", layers) or (True,) * layers
    return {
        **multipliers_from_gguf(keys, config),
        "layer_types": ["sliding_attention" if own else "full_attention" for own in windowed],
        "layer_rope_theta": [config["rope_theta"] if own else 0 for own in rotated],
    }


def _moe_from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    return {
        **_from_gguf(keys, config),
        "num_local_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0) or 1,
        "shared_intermediate_size": keys.whole("expert_shared_feed_forward_length", 0),
    }


def _has_experts(keys: GGUFKeys) -> bool:
    return keys.whole("expert_count", 0) > 0


_FORMAT = GGUFFormat(
    architectures=("granite_swa",),
    interleaved_rope=True,
    config=_from_gguf,
    reads=GGUF_SCALES | {"attention.rope_pattern", "attention.sliding_window_pattern"},
    tensors={"attn_sinks.weight": "self_attn.sinks"},
)
GRANITE_SWA = Family(
    model_type="granite_swa",
    class_name="GraniteSWAForCausalLM",
    fields=_fields,
    reads=_KEYS | {"mlp_bias"},
    gguf=_FORMAT,
)
GRANITE_MOE_SWA = Family(
    model_type="granitemoe_swa",
    class_name="GraniteMoeSWAForCausalLM",
    fields=_moe_fields,
    reads=_KEYS | {"num_local_experts", "num_experts_per_tok", "shared_intermediate_size"},
    names=replace(
        GRANITE_MOE_NAMES,
        router="block_sparse_moe.router",
        expert_stacks=("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ),
    gguf=replace(
        _FORMAT,
        applies=_has_experts,
        config=_moe_from_gguf,
        reads=_FORMAT.reads | {"expert_count", "expert_used_count", "expert_shared_feed_forward_length"},
        tensors={
            **_FORMAT.tensors,
            "ffn_up_shexp": "shared_mlp.input_linear",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
    ),
)
