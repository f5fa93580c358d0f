"""K-EXAONE: EXAONE 4's attention with norms before the parts, and DeepSeek V3's experts.

The layer for multi-token prediction of published checkpoints is no part of the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.exaone4 import exaone_attention
from penstock.engine.models.families.family import (
    NEXTN_KEY,
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    count,
    drafting_layers,
    integer,
)
from penstock.engine.models.families.gemma2 import layer_types
from penstock.engine.models.families.sigmoid_experts import (
    CORRECTED_GGUF,
    CORRECTED_KEYS,
    SHARED_TENSORS,
    corrected_from_gguf,
    corrected_sigmoids,
    sparse_by_type,
)
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.errors import CheckpointError

_PERIOD = 4


def _fields(raw: HFConfig) -> ConfigFields:
    moe = corrected_sigmoids(
        raw,
        experts=integer(raw, "num_experts"),
        layers=sparse_by_type(raw, count(raw, "first_k_dense_replace")),
        shared=count(raw, "num_shared_experts"),
    )
    return {**exaone_attention(raw), "moe": moe}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    if not config["sliding_window"]:
        raise CheckpointError(f"{keys.architecture}.attention.sliding_window is missing or 0; the file is damaged")
    own = {**drafting_layers(keys, config), **corrected_from_gguf(keys)}
    shared = keys.whole("expert_shared_count", 0)
    width = keys.whole("expert_shared_feed_forward_length", 0)
    if width not in (0, shared * own["moe_intermediate_size"]):
        raise CheckpointError(
            f"expert_shared_feed_forward_length is {width}; {shared} shared experts make "
            f"{shared * own['moe_intermediate_size']}"
        )
    return {
        **layer_types(keys, {**config, **own}, _PERIOD),
        **own,
        "num_experts": keys.whole("expert_count", 0),
        "num_shared_experts": shared,
    }


EXAONE_MOE = Family(
    model_type="exaone_moe",
    class_name="ExaoneMoeForCausalLM",
    fields=_fields,
    reads=CORRECTED_KEYS
    | {
        "first_k_dense_replace", "mlp_layer_types", "num_experts", "num_shared_experts", "num_nextn_predict_layers",
        "sliding_window", "sliding_window_pattern",
    },
    limits={"hidden_act": SILU},
    names=TensorNames(correction_bias="e_score_correction_bias"),
    gguf=GGUFFormat(
        architectures=("exaone-moe",),
        config=_from_gguf,
        reads=CORRECTED_GGUF
        | {NEXTN_KEY, "attention.sliding_window_pattern", "expert_shared_feed_forward_length"},
        tensors={**SHARED_TENSORS, "exp_probs_b.bias": "mlp.e_score_correction_bias"},
    ),
)  # fmt: skip
