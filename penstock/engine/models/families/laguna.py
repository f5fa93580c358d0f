"""Laguna: numbers of query heads by layer, a softplus gate on what heads give, rotary embeddings of their own in layers
with a window, and experts by corrected sigmoids."""

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
    integer,
    is_array,
    layer_count,
    number,
    window_of,
    windows_by_type,
)
from penstock.engine.models.families.gemma2 import layer_types
from penstock.engine.models.families.sigmoid_experts import require_sigmoid, sparse_by_type
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.model_config import MoeConfig
from penstock.engine.models.rope import RopeConfig, read_rope
from penstock.errors import CheckpointError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES: Mapping[str, Mapping[str, Any]] = {
    _FULL: {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}
"""Of files without rope parameters."""
_PATTERN, _PERIOD = "attention.sliding_window_pattern", 4
"""In GGUF files; of those that do not say which layers have a window, every fourth has none, the first among them."""
_BY_HEAD = (True, "per-head")
_MEMORY_BIAS, _BIAS = "mlp.gate.e_score_correction_bias", "mlp.experts.e_score_correction_bias"
_MEMORY_SHARED, _SHARED = "mlp.shared_experts.", "mlp.shared_expert."


def _fields(raw: HFConfig) -> ConfigFields:
    layers, bias = layer_count(raw), flag(raw, "attention_bias")
    windows = windows_by_type(raw, window_of(raw)) or (None,) * layers
    kinds = [_FULL if window is None else _SLIDING for window in windows]
    ropes = {kind: _rope(raw, kind) for kind in dict.fromkeys(kinds)}
    heads, sparse = _query_heads(raw), sparse_by_type(raw, 1)
    fields: ConfigFields = {
        "num_heads": max(heads),
        "qkv_bias": bias,
        "output_bias": bias,
        "qk_norm": True,
        "output_gate": True,
        "gates_by_head": raw["gating"] in _BY_HEAD,
        "softplus_gates": True,
        "windows": windows,
        "rope": ropes.get(_FULL) or ropes[_SLIDING],
        "local_rope": ropes.get(_SLIDING) or ropes[_FULL],
        "moe": _experts(raw, sparse) if any(sparse) else None,
    }
    if len(set(heads)) > 1:
        fields["query_heads"] = heads
    return fields


def _query_heads(raw: HFConfig) -> tuple[int, ...]:
    layers, given = layer_count(raw), raw.get("num_attention_heads_per_layer")
    if given is None:
        return (integer(raw, "num_attention_heads"),) * layers
    if not isinstance(given, list | tuple) or len(given) != layers:
        raise CheckpointError(
            f"config key 'num_attention_heads_per_layer' must have a number for each of {layers} layers, "
            f"found {given!r:.80}"
        )
    heads = tuple(integer({"num_attention_heads_per_layer": one}, "num_attention_heads_per_layer") for one in given)
    kv_heads = integer(raw, "num_key_value_heads")
    for one in heads:
        if one % kv_heads:
            raise CheckpointError(f"num_attention_heads_per_layer: {one} heads over {kv_heads} KV heads cannot be run")
    return heads


def _rope(raw: HFConfig, kind: str) -> RopeConfig:
    ropes = _ROPES if raw.get("rope_parameters") is None else raw["rope_parameters"]
    if (
        raw.get("rope_scaling") is not None
        or not isinstance(ropes, Mapping)
        or not isinstance(ropes.get(kind), Mapping)
    ):
        raise CheckpointError(
            f"rope_parameters of laguna models must have an object for {kind}, and there must be no rope_scaling; "
            f"found {ropes!r:.80}"
        )
    whole = {"max_position_embeddings": raw["max_position_embeddings"]}
    rounded = {"truncate": ropes.get("truncate", True)}  # the reference looks for it one level up
    return read_rope(whole, {**ropes[kind], **rounded}, partial=True)


def _experts(raw: HFConfig, layers: tuple[bool, ...]) -> MoeConfig:
    cap = number(raw, "moe_router_logit_softcapping")
    return MoeConfig(
        experts=integer(raw, "num_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "moe_intermediate_size"),
        normalize=True,
        layers=layers,
        scoring="sigmoid",
        correction_bias=True,
        scale=number(raw, "moe_routed_scaling_factor"),
        logit_softcap=max(cap, 0.0),
        shared_ffn_size=integer(raw, "shared_expert_intermediate_size"),
    )


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    require_sigmoid(keys)
    layers, dim, theta = config["num_hidden_layers"], config["head_dim"], config["rope_theta"]
    dense = keys.whole("leading_dense_block_count", 0)
    kinds = layer_types(keys, config, 1)["layer_types"]
    if config["sliding_window"] and not is_array(keys.metadata.get(f"{keys.architecture}.{_PATTERN}")):
        period = keys.whole(_PATTERN, _PERIOD) or layers
        kinds = [_SLIDING if layer % period else _FULL for layer in range(layers)]
    heads = config["num_attention_heads_per_layer"]
    gates = {(rows == own, rows == own * dim) for rows, own in zip(config["gates"], heads, strict=True)}
    if gates not in ({(True, False)}, {(False, True)}):
        raise CheckpointError(
            "attn_gate of laguna files must have a row for each head, or for each number of all heads"
        )
    rotated = keys.whole("rope.dimension_count_swa", 0) or dim
    if rotated > dim or rotated % 2:
        raise CheckpointError(f"rope.dimension_count_swa is {rotated}; heads have {dim} dimensions")
    full = {**(config["rope_scaling"] or {"rope_type": "default"}), "rope_theta": theta}
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", theta)}
    return {
        "layer_types": kinds,
        "sliding_window": config["sliding_window"] or 512,
        "gating": "per-head" if gates == {(True, False)} else "per-element",
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)],
        "num_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length", 0),
        "shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length", 0)
        or keys.whole("expert_feed_forward_length", 0) * keys.whole("expert_shared_count", 1),
        "moe_routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
        "rope_scaling": None,
        "rope_parameters": {
            _FULL: {**full, "partial_rotary_factor": config.get("partial_rotary_factor", 1.0)},
            _SLIDING: {**local, "partial_rotary_factor": rotated / dim},
        },
    }


def _own_name(name: str) -> str:
    return name.replace(_MEMORY_BIAS, _BIAS).replace(_MEMORY_SHARED, _SHARED)


LAGUNA = Family(
    model_type="laguna",
    class_name="LagunaForCausalLM",
    fields=_fields,
    reads=frozenset({
        "attention_bias", "mlp_layer_types", "moe_intermediate_size", "moe_routed_scaling_factor",
        "moe_router_logit_softcapping", "num_attention_heads_per_layer", "num_experts", "num_experts_per_tok",
        "shared_expert_intermediate_size", "sliding_window",
    }),
    limits={"hidden_act": SILU, "gating": (*_BY_HEAD, "per-element")},
    names=TensorNames(
        output_gate="g_proj", correction_bias="experts.e_score_correction_bias", shared_expert="shared_expert."
    ),
    gguf=GGUFFormat(
        architectures=("laguna",),
        config=_from_gguf,
        query_heads=True,
        window_rope=True,
        window_rotated=True,
        whole_head_rotated=False,
        reads=frozenset({
            _PATTERN, "expert_count", "expert_feed_forward_length", "expert_gating_func", "expert_shared_count",
            "expert_shared_feed_forward_length", "expert_used_count", "expert_weights_scale",
            "leading_dense_block_count",
        }),
        tensors={
            **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
            "attn_gate": "self_attn.g_proj",
            "exp_probs_b.bias": "mlp.experts.e_score_correction_bias",
        },
    ),
    own_name=_own_name,
)  # fmt: skip
