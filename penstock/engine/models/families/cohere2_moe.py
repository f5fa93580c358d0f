"""Command A+: Command A with experts, beside one that all tokens visit; the first layers may be dense, and those have
rotary embedding though they see everything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.cohere import PARALLEL_NAMES, parallel_fields, parallel_from_gguf
from penstock.engine.models.families.family import (
    NEXTN_KEY,
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    Windows,
    count,
    drafting_layers,
    flag,
    integer,
    layer_count,
    number,
    window_of,
    windows_by_type,
)
from penstock.engine.models.families.gemma2 import layer_types
from penstock.engine.models.families.layer_normed import LAYER_NORM_EPSILON, centred_architecture
from penstock.engine.models.families.sigmoid_experts import SHARED_TENSORS, sparse_by_type
from penstock.engine.models.moe_config import MoeConfig
from penstock.engine.models.rope import read_rope
from penstock.errors import CheckpointError

_PERIOD = 4
_SCORING = {0: "sigmoid", 1: "softmax", 2: "sigmoid"}
"""Values of `expert_gating_func`."""


def _windows(raw: HFConfig, dense: int) -> Windows:
    """Dense layers and those with experts are counted apart."""
    window, layers = window_of(raw), layer_count(raw)
    before, behind = integer(raw, "prefix_dense_sliding_window_pattern"), integer(raw, "sliding_window_pattern")
    places = [(index + 1, before) if index < dense else (index - dense + 1, behind) for index in range(layers)]
    spaced = tuple(window if place % period else None for place, period in places)
    return windows_by_type(raw, window) or spaced


def _experts(raw: HFConfig, sparse: tuple[bool, ...]) -> MoeConfig:
    scoring, combined = raw["expert_selection_fn"], raw["shared_expert_combination_strategy"]
    if scoring not in ("softmax", "sigmoid") or combined not in ("sum", "average"):
        raise CheckpointError(
            f"expert_selection_fn is {scoring!r:.80}, shared_expert_combination_strategy {combined!r:.80}; supported: "
            "softmax and sigmoid, sum and average"
        )
    ffn, shared = integer(raw, "intermediate_size"), count(raw, "num_shared_experts")
    share = 0.5 if shared and combined == "average" else 1.0
    return MoeConfig(
        experts=integer(raw, "num_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=ffn,
        normalize=scoring == "softmax" or flag(raw, "norm_topk_prob"),
        layers=sparse,
        scoring="sigmoid" if scoring == "sigmoid" else "softmax",
        total_eps=0.0,
        scale=share,
        shared_ffn_size=ffn * shared,
        shared_scale=share,
    )


def _fields(raw: HFConfig) -> ConfigFields:
    # The reference's class has `rope_scaling` as a key of its own, and reads `rope_parameters` alone.
    rope = read_rope({key: value for key, value in raw.items() if key != "rope_scaling"})
    dense = count(raw, "first_k_dense_replace") if "first_k_dense_replace" in raw else 0
    sparse, windows = sparse_by_type(raw, dense), _windows(raw, dense)
    rotated = raw["prefix_dense_sliding_window_pattern"] == 1
    fields: ConfigFields = {**parallel_fields(raw), "layer_norms": raw.get("rms_norm_eps") is None}
    if raw.get("rms_norm_eps") is not None:
        fields["rms_eps"] = number(raw, "rms_norm_eps")
    width = raw.get("prefix_dense_intermediate_size")
    return {
        **fields,
        "rope": rope,
        "windows": windows,
        "unrotated": tuple(
            window is None and (experts or not rotated) for window, experts in zip(windows, sparse, strict=True)
        ),
        "ffn_size": integer(raw, "intermediate_size" if width is None else "prefix_dense_intermediate_size"),
        "moe": _experts(raw, sparse) if any(sparse) else None,
    }


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    layers, ffn = drafting_layers(keys, config), keys.whole("expert_feed_forward_length", 0)
    if not config["sliding_window"]:
        raise CheckpointError(f"{keys.architecture}.attention.sliding_window is missing or 0; the file is damaged")
    scoring, normalized = keys.whole("expert_gating_func", 0), keys("expert_weights_norm", False)
    if scoring not in _SCORING or not isinstance(normalized, bool):
        raise CheckpointError(
            f"{keys.architecture}.expert_gating_func is {scoring} and expert_weights_norm {normalized!r:.80}; "
            "supported: 1 (softmax) or 2 (sigmoid), true or false"
        )
    shared = keys.whole("expert_shared_count", 0)
    if keys.whole("expert_shared_feed_forward_length", ffn * shared) not in (0, ffn * shared):
        raise CheckpointError(
            f"{keys.architecture}.expert_shared_feed_forward_length must be {ffn * shared}, the width of {shared} "
            "experts"
        )
    rms = keys.number("attention.layer_norm_rms_epsilon", 0.0)
    return {
        **layers,
        **parallel_from_gguf(keys, config),
        **layer_types(keys, {**config, **layers}, _PERIOD),
        "rms_norm_eps": rms or None,
        "intermediate_size": ffn or config["intermediate_size"],
        "prefix_dense_intermediate_size": config["intermediate_size"],
        "prefix_dense_sliding_window_pattern": 1,  # llama.cpp rotates in all dense layers
        "first_k_dense_replace": keys.whole("leading_dense_block_count", 0),
        "num_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "num_shared_experts": shared,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": _SCORING[scoring],
        "norm_topk_prob": normalized,
    }


COHERE2_MOE = Family(
    model_type="cohere2_moe",
    class_name="Cohere2MoeForCausalLM",
    fields=_fields,
    reads=frozenset({
        "attention_bias", "expert_selection_fn", "first_k_dense_replace", "layer_norm_eps", "logit_scale",
        "mlp_layer_types", "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_shared_experts",
        "prefix_dense_intermediate_size", "prefix_dense_sliding_window_pattern", "rope_scaling",
        "shared_expert_combination_strategy", "sliding_window", "sliding_window_pattern",
    }),
    limits={"hidden_act": SILU},
    names=PARALLEL_NAMES,
    gguf=GGUFFormat(
        architectures=("cohere2moe",),
        config=_from_gguf,
        epsilon=LAYER_NORM_EPSILON,
        other_epsilon="attention.layer_norm_rms_epsilon",
        reads=frozenset({
            "attention.sliding_window_pattern", "expert_count", "expert_feed_forward_length", "expert_gating_func",
            "expert_shared_count", "expert_shared_feed_forward_length", "expert_used_count", "expert_weights_norm",
            "leading_dense_block_count", "logit_scale", NEXTN_KEY,
        }),
        tensors=SHARED_TENSORS,
    ),
    architecture=centred_architecture,
)  # fmt: skip
