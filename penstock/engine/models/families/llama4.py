"""Llama 4 (Scout, Maverick; the text decoder of models that also take images): chunked attention in the layers with
rotary embedding, one expert of many beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.attention_config import QueryGrowth
from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    flag,
    integer,
    layer_count,
    number,
    windows_by_type,
)
from penstock.engine.models.families.sigmoid_experts import require_sigmoid
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig
from penstock.engine.models.rope import read_rope
from penstock.errors import CheckpointError

_KEYS = frozenset({
    "attention_bias", "attention_chunk_size", "attn_scale", "attn_temperature_tuning", "floor_scale",
    "interleave_moe_layer_step", "intermediate_size_mlp", "moe_layers", "no_rope_layer_interval", "no_rope_layers",
    "num_experts_per_tok", "num_local_experts", "use_qk_norm",
})  # fmt: skip


_GGUF = frozenset({
    "expert_count", "expert_feed_forward_length", "expert_gating_func", "expert_used_count",
    "interleave_moe_layer_step",
})  # fmt: skip
_WITHOUT_NORMS = 128
"""Experts of the model whose queries and keys are not normalized."""


def _fields(raw: HFConfig) -> ConfigFields:
    layers, bias, ffn = layer_count(raw), flag(raw, "attention_bias"), integer(raw, "intermediate_size")
    rotated, normed, rope = _rotated(raw, layers), flag(raw, "use_qk_norm"), read_rope(raw)
    if normed and rope.kind in ("yarn", "longrope"):
        # The norm stands behind the rotation in the reference: the same only where that keeps lengths.
        raise CheckpointError(f"use_qk_norm with rope scaling {rope.kind} is not supported by llama4_text models")
    tuned = raw.get("attn_temperature_tuning")
    if not isinstance(tuned, bool | int):
        raise CheckpointError(f"config key 'attn_temperature_tuning' must be true or false, found {tuned!r:.80}")
    moe = MoeConfig(
        experts=integer(raw, "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=ffn,
        normalize=False,
        layers=_with_experts(raw, layers),
        scoring="sigmoid",
        weight_inputs=True,
        shared_ffn_size=ffn,
    )
    fields: ConfigFields = {
        "chunked": True,
        "ffn_size": integer(raw, "intermediate_size_mlp"),
        "interleaved_rope": True,
        "output_bias": bias,
        "qkv_bias": bias,
        "query_growth": QueryGrowth(_floor(raw), number(raw, "attn_scale")) if tuned else None,
        "rope": rope,
        "unrotated": tuple(not entry for entry in rotated),
        "unweighted_qk_norm": normed,
        "windows": _chunks(raw, rotated),
    }
    if any(moe.layers):
        fields["moe"] = moe
    return fields


def _floor(raw: HFConfig) -> float:
    floor = number(raw, "floor_scale")
    if floor <= 0:
        raise CheckpointError(f"config key 'floor_scale' must be positive, found {floor:g}")
    return floor


def _rotated(raw: HFConfig, layers: int) -> tuple[bool, ...]:
    """`no_rope_layers` has a one for layers with rotary embedding."""
    given = raw.get("no_rope_layers")
    if not given:
        interval = integer(raw, "no_rope_layer_interval")
        return tuple(bool((index + 1) % interval) for index in range(layers))
    if not isinstance(given, list | tuple) or len(given) < layers or not all(isinstance(x, int) for x in given):
        raise CheckpointError(f"no_rope_layers must have a 0 or 1 for each of {layers} layers, found {given!r:.80}")
    return tuple(bool(entry) for entry in given[:layers])


def _chunks(raw: HFConfig, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = ["chunked_attention" if entry else "full_attention" for entry in rotated]
    chunk = None if raw.get("attention_chunk_size") is None else integer(raw, "attention_chunk_size")
    found = windows_by_type({**raw, "layer_types": kinds}, chunk, "chunked_attention")
    assert found is not None
    if chunk == 1 and chunk in found:
        raise CheckpointError("attention_chunk_size is 1; a chunk of one token is not supported")
    return found


def _with_experts(raw: HFConfig, layers: int) -> tuple[bool, ...]:
    given: Any = raw.get("moe_layers")
    if given is None:
        step = integer(raw, "interleave_moe_layer_step")
        given = range(step - 1, layers, step)
    elif not isinstance(given, list | tuple):
        raise CheckpointError(f"config key 'moe_layers' must be a list, found {given!r:.80}")
    return tuple(index in given for index in range(layers))


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    """Files say little: chunks, attention temperature and the layers without rotary embedding are those of published
    models, unless a window of 0 says that all layers see everything; Maverick, known by its 128 experts, has no norms
    of queries and keys."""
    require_sigmoid(keys)
    layers, experts = config["num_hidden_layers"], keys.whole("expert_count", 0)
    more: dict[str, Any] = {}
    if keys.metadata.get(f"{keys.architecture}.attention.sliding_window") is not None:
        if config["sliding_window"] is not None:
            raise CheckpointError(
                f"{keys.architecture}.attention.sliding_window is {config['sliding_window']}; supported: 0, or none"
            )
        more = {"no_rope_layers": [1] * layers, "layer_types": ["full_attention"] * layers}
        more["attn_temperature_tuning"] = False
    return {
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": keys.whole("expert_feed_forward_length", 0),
        "interleave_moe_layer_step": keys.whole("interleave_moe_layer_step", 0),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "use_qk_norm": experts != _WITHOUT_NORMS,
        **more,
    }


LLAMA4 = Family(
    model_type="llama4_text",
    class_name="Llama4ForCausalLM",
    fields=_fields,
    reads=_KEYS,
    limits={"hidden_act": SILU},
    names=TensorNames(
        mlp="feed_forward.",
        moe="feed_forward.",
        router="router",
        shared_expert="shared_expert.",
        stacked_experts=True,
    ),
    gguf=GGUFFormat(
        architectures=("llama4",),
        config=_from_gguf,
        reads=_GGUF,
        tensors={
            "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
            "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
            "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
        },
    ),
)
