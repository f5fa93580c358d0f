"""Command A+: Command A with experts, beside one that all tokens visit; the first layers may be dense, and those have
rotary embedding though they see everything."""

from __future__ import annotations

from penstock.engine.models.families.cohere import PARALLEL_NAMES, parallel_fields
from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    Windows,
    count,
    flag,
    integer,
    layer_count,
    number,
    window_of,
    windows_by_type,
)
from penstock.engine.models.families.layer_normed import centred_architecture
from penstock.engine.models.families.sigmoid_experts import sparse_by_type
from penstock.engine.models.model_config import MoeConfig
from penstock.engine.models.rope import read_rope
from penstock.errors import CheckpointError


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
    gguf=GGUFFormat(architectures=()),
    architecture=centred_architecture,
)  # fmt: skip
