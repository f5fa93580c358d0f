"""GGUF files of Step 3.5 (`step35`), as llama.cpp's converter writes them.

Layers that see everything rotate half of the dimensions that a file gives, those with a window all of them. Norm
weights are stored as they are applied. What llama.cpp computes is followed where a key is missing: without
`expert_weights_norm` it leaves the weights of experts as they are, and without `rope.freq_base_swa` the base of layers
with a window is 10,000.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    NEXTN_KEY,
    WINDOW_PATTERN,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    drafting_layers,
    is_array,
    local_layers,
    short_decimal,
)
from penstock.engine.models.families.sigmoid_experts import SHARED_TENSORS, require_sigmoid
from penstock.errors import CheckpointError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_LOCAL_THETA = 10_000.0
_NO_BOUND = 1e-6
"""Bounds up to this are none."""
_READS = frozenset({
    NEXTN_KEY, WINDOW_PATTERN, "expert_count", "expert_feed_forward_length", "expert_gating_func",
    "expert_shared_feed_forward_length", "expert_used_count", "expert_weights_norm", "expert_weights_scale",
    "leading_dense_block_count", "swiglu_clamp_exp", "swiglu_clamp_shexp",
})  # fmt: skip


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    require_sigmoid(keys)
    own, stored = drafting_layers(keys, config), config["num_hidden_layers"]
    layers = own["num_hidden_layers"]
    if config["attention_bias"]:
        raise CheckpointError(
            f"{keys.architecture} files with attn_q.bias are not supported: llama.cpp does not add it"
        )
    kinds = [_SLIDING if windowed else _FULL for windowed in local_layers(keys, config)]
    heads = config["num_attention_heads_per_layer"]
    return {
        **own,
        "layer_types": kinds[:layers],
        "mtp_layer_types": kinds[layers:] or None,
        "per_layer_config": {str(layer): {"num_attention_heads": heads[layer]} for layer in range(layers)},
        "mlp_bias": False,  # what has some is refused by its tensors
        "mlp_layer_types": _routed(keys, config, layers),
        "n_routed_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length", 0),
        "share_expert_dim": keys.whole("expert_shared_feed_forward_length", 0),
        "moe_router_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
        "swiglu_limits": _bounds(keys, "swiglu_clamp_exp", stored)[:layers],
        "swiglu_limits_shared": _bounds(keys, "swiglu_clamp_shexp", stored)[:layers],
        "rope_scaling": None,
        "rope_parameters": _ropes(keys, config),
    }


def _routed(keys: GGUFKeys, config: HFConfig, layers: int) -> list[str]:
    """Which layers have experts. The converter writes `leading_dense_block_count` 0 where it does not know."""
    routed = config["routed_layers"][:layers]
    dense, found = keys.whole("leading_dense_block_count", 0), [*routed, True].index(True)
    if dense not in (0, found):
        raise CheckpointError(
            f"leading_dense_block_count is {dense}; {found} layers come before the first with experts"
        )
    if keys("expert_weights_norm", not any(routed)) is not True:
        raise CheckpointError(f"{keys.architecture}.expert_weights_norm is not true, which is not supported")
    return ["sparse" if own else "dense" for own in routed]


def _ropes(keys: GGUFKeys, config: HFConfig) -> dict[str, Any]:
    dim = config["head_dim"]
    whole = keys.whole("rope.dimension_count", 0) or dim
    rotated = keys.whole("rope.dimension_count_swa", 0) or whole
    if rotated > dim or rotated % 2 or whole % 4:
        raise CheckpointError(
            f"rope.dimension_count is {whole} and rope.dimension_count_swa {rotated}; heads have {dim} dimensions"
        )
    scaling = config["rope_scaling"] or {}
    return {
        _FULL: {"rope_type": "default", **scaling, "rope_theta": config["rope_theta"], **_share(whole // 2, dim)},
        _SLIDING: {
            "rope_type": "default",
            "rope_theta": keys.number("rope.freq_base_swa", _LOCAL_THETA),
            **_share(rotated, dim),
        },
    }


def _share(rotated: int, dim: int) -> dict[str, float]:
    share = rotated / dim
    return {"partial_rotary_factor": share if int(dim * share) == rotated else (rotated + 0.5) / dim}


def _bounds(keys: GGUFKeys, name: str, layers: int) -> list[float]:
    """One for each layer, or one for all."""
    value: Any = keys.metadata.get(f"{keys.architecture}.{name}")
    given = value.tolist() if is_array(value) else [keys.number(name, 0.0)] * layers
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) and 0 <= one < 1e30 for one in given)
    if len(given) != layers or not numbers:
        raise CheckpointError(
            f"GGUF key {keys.architecture}.{name} must have a number from 0 on for each of {layers} layers"
        )
    return [short_decimal(one) if one > _NO_BOUND else 0.0 for one in given]


FORMAT = GGUFFormat(
    architectures=("step35",),
    config=_from_gguf,
    reads=_READS,
    query_heads=True,
    window_rope=True,
    window_rotated=True,
    whole_head_rotated=False,
    tensors={
        **SHARED_TENSORS,
        "attn_gate": "self_attn.g_proj",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
)
