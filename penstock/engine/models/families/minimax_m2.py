"""MiniMax M2: experts chosen by corrected sigmoids; all queries of a token normalized together, and all its keys; a
part of each head rotated."""

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
    integer,
    layer_count,
)
from penstock.engine.models.families.sigmoid_experts import require_sigmoid
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig
from penstock.engine.models.rope import RopeConfig, read_rope


def _rope(raw: HFConfig) -> RopeConfig:
    """Published files say how many dimensions are rotated."""
    if raw.get("rotary_dim") is None or "partial_rotary_factor" in raw:
        return read_rope(raw, partial=True)
    share = integer(raw, "rotary_dim") / integer(raw, "head_dim")
    return read_rope({**raw, "partial_rotary_factor": share}, partial=True)


def _fields(raw: HFConfig) -> ConfigFields:
    moe = MoeConfig(
        experts=integer(raw, "num_experts" if "num_experts" in raw else "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "intermediate_size"),
        normalize=True,
        layers=(True,) * layer_count(raw),
        scoring="sigmoid",
        correction_bias=True,
    )
    return {"row_norms": True, "rope": _rope(raw), "moe": moe}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    require_sigmoid(keys)
    return {
        "intermediate_size": keys.whole("expert_feed_forward_length", 0) or config["intermediate_size"],
        "num_local_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
    }


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    class_name="MiniMaxM2ForCausalLM",
    fields=_fields,
    reads=frozenset({"num_experts", "num_experts_per_tok", "num_local_experts", "rotary_dim"}),
    limits={"hidden_act": SILU},
    names=TensorNames(
        moe="block_sparse_moe.",
        correction_bias="e_score_correction_bias",
        expert_gate_up=("w1", "w3"),
        expert_down="w2",
    ),
    gguf=GGUFFormat(
        architectures=("minimax-m2",),
        config=_from_gguf,
        reads=frozenset({"expert_count", "expert_feed_forward_length", "expert_gating_func", "expert_used_count"}),
        whole_head_rotated=False,
        windowed=False,
        tensors={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
    ),
)
