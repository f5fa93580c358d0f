"""Mellum 2: Qwen3-MoE with windows, and rotary embeddings of their own in the layers that have one."""

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
    layer_count,
    mapping,
    window_of,
    windows_by_type,
)
from penstock.engine.models.families.gemma2 import layer_types
from penstock.engine.models.families.sigmoid_experts import sparse_by_type
from penstock.engine.models.moe_config import MoeConfig
from penstock.engine.models.rope import read_rope
from penstock.errors import CheckpointError

_FULL, _LOCAL = "full_attention", "sliding_attention"
_PERIOD = 4
_THETAS = {_FULL: 500_000.0, _LOCAL: 10_000.0}
"""Bases of a file without rope parameters."""


def _fields(raw: HFConfig) -> ConfigFields:
    ropes = mapping(raw, "rope_parameters")
    if raw.get("rope_parameters") is None:
        ropes = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in _THETAS.items()}
    missing = [kind for kind in _THETAS if not mapping(ropes, kind)]
    if missing or raw.get("rope_scaling") is not None:
        raise CheckpointError(
            f"rope_parameters of mellum models must have an entry for each of {', '.join(_THETAS)}, and no "
            f"rope_scaling; found {ropes!r:.80}"
        )
    whole = {key: raw[key] for key in ("max_position_embeddings",) if key in raw}
    rounded = {"truncate": ropes.get("truncate", True)}  # the reference looks for it one level up
    full, local = (read_rope(whole, {**mapping(ropes, kind), **rounded}) for kind in (_FULL, _LOCAL))
    bias, layers = flag(raw, "attention_bias"), layer_count(raw)
    sparse = sparse_by_type(raw, 0)
    moe = MoeConfig(
        experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "moe_intermediate_size"),
        normalize=flag(raw, "norm_topk_prob"),
        layers=sparse,
    )
    return {
        "qk_norm": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "windows": windows_by_type(raw, window_of(raw)) or (None,) * layers,
        "rope": full,
        "local_rope": local,
        "moe": moe if any(sparse) else None,
    }


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    theta = config["rope_theta"]
    return {
        **layer_types(keys, config, _PERIOD),
        "num_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length", 0),
        "norm_topk_prob": True,
        "rope_scaling": None,
        "rope_parameters": {
            _FULL: {**(config["rope_scaling"] or {"rope_type": "default"}), "rope_theta": theta},
            _LOCAL: {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", theta)},
        },
    }


MELLUM = Family(
    model_type="mellum",
    class_name="MellumForCausalLM",
    fields=_fields,
    reads=frozenset({
        "attention_bias", "mlp_layer_types", "moe_intermediate_size", "norm_topk_prob", "num_experts",
        "num_experts_per_tok", "num_local_experts", "num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types",
        "mtp_mlp_layer_types", "sliding_window",
    }),
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(
        architectures=("mellum",),
        config=_from_gguf,
        window_rope=True,
        reads=frozenset({
            "attention.sliding_window_pattern", "expert_count", "expert_feed_forward_length", "expert_used_count",
        }),
    ),
)  # fmt: skip
