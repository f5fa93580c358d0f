"""ERNIE 4.5: neighbouring dimensions rotated. With experts: scored by softmax and chosen by corrected scores, beside
some that all tokens visit.

The layers for multi-token prediction of published checkpoints are no part of the decoder."""

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
    count,
    flag,
    integer,
    layer_count,
    number,
)
from penstock.engine.models.families.sigmoid_experts import SHARED_TENSORS
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig
from penstock.errors import CheckpointError

_LARGEST_BOUND = 1e-9
"""Of the sum that weights are divided by: softmax scores of chosen experts add up to more."""
_LAST = -1
"""In place of the last layer's index."""


def _has_biases(raw: HFConfig) -> bool:
    """Null is false, as in the reference."""
    return raw.get("use_bias") is not None and flag(raw, "use_bias")


def _fields(raw: HFConfig) -> ConfigFields:
    bias = _has_biases(raw)
    return {"interleaved_rope": True, "qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}


def _index(raw: HFConfig, key: str) -> int:
    value = raw[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"config key {key!r} must be the index of a layer, found {value!r:.80}")
    return value


def _experts(raw: HFConfig) -> MoeConfig | None:
    layers, step = layer_count(raw), integer(raw, "moe_layer_interval")
    first, last = _index(raw, "moe_layer_start_index"), _index(raw, "moe_layer_end_index")
    last = layers - 1 if last == _LAST else last
    bound = number(raw, "moe_norm_min")
    if bound > _LARGEST_BOUND:
        raise CheckpointError(f"moe_norm_min is {bound}, which is not supported; supported: at most {_LARGEST_BOUND}")
    chosen = tuple(first <= index <= last and (index + 1) % step == 0 for index in range(layers))
    if not any(chosen):
        return None
    ffn = integer(raw, "moe_intermediate_size")
    return MoeConfig(
        experts=integer(raw, "num_experts" if "num_experts" in raw else "moe_num_experts"),
        top_k=integer(raw, "num_experts_per_tok" if "num_experts_per_tok" in raw else "moe_k"),
        ffn_size=ffn,
        normalize=True,
        layers=chosen,
        correction_bias=True,
        shared_ffn_size=ffn * count(raw, "moe_num_shared_experts"),
    )


def _moe_fields(raw: HFConfig) -> ConfigFields:
    """Experts have no biases; all other linears, the head too, have some or none."""
    return {**_fields(raw), "head_bias": _has_biases(raw), "moe": _experts(raw)}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    ffn, shared = keys.whole("expert_feed_forward_length", 0), keys.whole("expert_shared_count", 0)
    width = keys.whole("expert_shared_feed_forward_length", 0)
    if width not in (0, ffn * shared):
        raise CheckpointError(
            f"expert_shared_feed_forward_length is {width}; {shared} shared experts of {ffn} make {ffn * shared}"
        )
    return {
        "moe_num_experts": keys.whole("expert_count", 0),
        "moe_k": keys.whole("expert_used_count", 0),
        "moe_intermediate_size": ffn,
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": keys.whole("leading_dense_block_count", 0),
        "moe_layer_interval": keys.whole("interleave_moe_layer_step", 0) or 1,
    }


ERNIE4_5 = Family(
    model_type="ernie4_5",
    class_name="Ernie4_5ForCausalLM",
    fields=_fields,
    reads=frozenset({"use_bias"}),
    gguf=GGUFFormat(architectures=("ernie4_5",), windowed=False),
)
ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    class_name="Ernie4_5_MoeForCausalLM",
    fields=_moe_fields,
    reads=frozenset({
        "moe_intermediate_size", "moe_k", "moe_layer_end_index", "moe_layer_interval", "moe_layer_start_index",
        "moe_norm_min", "moe_num_experts", "moe_num_shared_experts", "num_experts", "num_experts_per_tok",
        "use_bias",
    }),
    limits={"hidden_act": SILU},
    names=TensorNames(correction_bias="moe_statics.e_score_correction_bias"),
    gguf=GGUFFormat(
        architectures=("ernie4_5-moe",),
        config=_from_gguf,
        reads=frozenset({
            "expert_count", "expert_feed_forward_length", "expert_shared_count", "expert_shared_feed_forward_length",
            "expert_used_count", "interleave_moe_layer_step", "leading_dense_block_count",
        }),
        windowed=False,
        tensors={
            **SHARED_TENSORS,
            "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
        },
    ),
)  # fmt: skip
