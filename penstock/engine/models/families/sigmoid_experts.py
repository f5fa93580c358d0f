"""Experts that are chosen by corrected sigmoids, perhaps from the best groups of them, beside one that all tokens
visit: DeepSeek V3's router, which many families have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import GGUFKeys, HFConfig, flag, integer, layer_count, number
from penstock.engine.models.moe_config import MoeConfig
from penstock.errors import CheckpointError

_LEFT_OUT, _SIGMOID = 0, 2

CORRECTED_KEYS = frozenset({
    "moe_intermediate_size", "n_group", "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor", "topk_group",
})  # fmt: skip
"""What `corrected_sigmoids` reads."""
CORRECTED_GGUF = frozenset({
    "expert_count", "expert_feed_forward_length", "expert_gating_func", "expert_group_count", "expert_group_used_count",
    "expert_shared_count", "expert_used_count", "expert_weights_norm", "expert_weights_scale",
    "leading_dense_block_count",
})  # fmt: skip
SHARED_TENSORS: Mapping[str, str] = {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
"""In GGUF files; see `GGUFFormat.tensors`."""


def corrected_sigmoids(raw: HFConfig, experts: int, layers: tuple[bool, ...], shared: int) -> MoeConfig | None:
    """`layers`: which have experts. `shared`: how many experts every token visits; they are one of their width."""
    if not any(layers):
        return None
    ffn = integer(raw, "moe_intermediate_size")
    return MoeConfig(
        experts=experts,
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=ffn,
        normalize=flag(raw, "norm_topk_prob"),
        layers=layers,
        scoring="sigmoid",
        correction_bias=True,
        groups=integer(raw, "n_group"),
        top_groups=integer(raw, "topk_group"),
        group_score="best_two",
        scale=number(raw, "routed_scaling_factor"),
        shared_ffn_size=ffn * shared,
    )


def sparse_by_type(raw: HFConfig, dense: int) -> tuple[bool, ...]:
    """Which layers have experts: what `mlp_layer_types` says, or all but the first `dense`."""
    layers, given = layer_count(raw), raw.get("mlp_layer_types")
    if given is None:
        return tuple(index >= dense for index in range(layers))
    if not isinstance(given, list | tuple) or len(given) != layers or {*map(str, given)} - {"dense", "sparse"}:
        raise CheckpointError(
            f"config key 'mlp_layer_types' must name dense or sparse for each of {layers} layers, found {given!r:.80}"
        )
    return tuple(kind == "sparse" for kind in given)


def require_sigmoid(keys: GGUFKeys) -> None:
    """Refuse a file of an architecture that scores by sigmoids and says otherwise."""
    found = keys.whole("expert_gating_func", _LEFT_OUT)
    if found not in (_LEFT_OUT, _SIGMOID):
        raise CheckpointError(f"{keys.architecture}.expert_gating_func is {found}; supported: {_SIGMOID} (sigmoid)")


def corrected_from_gguf(keys: GGUFKeys) -> dict[str, Any]:
    """The keys that `corrected_sigmoids` reads, and how many layers before those with experts are dense."""
    require_sigmoid(keys)
    normalized = keys("expert_weights_norm", False)
    if not isinstance(normalized, bool):
        raise CheckpointError(f"expert_weights_norm must be true or false, found {normalized!r:.80}")
    return {
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length", 0),
        "first_k_dense_replace": keys.whole("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": normalized,
        "n_group": keys.whole("expert_group_count", 0) or 1,
        "topk_group": keys.whole("expert_group_used_count", 0) or 1,
    }
