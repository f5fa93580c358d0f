"""Mixtral: Mistral with experts in every layer: softmax over all, the best two, scaled to sum to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    integer,
    layer_count,
)
from penstock.engine.models.families.mistral import mistral_fields
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig


def _fields(raw: HFConfig) -> ConfigFields:
    moe = MoeConfig(
        experts=integer(raw, "num_experts" if "num_experts" in raw else "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "intermediate_size"),
        normalize=True,
        layers=(True,) * layer_count(raw),
    )
    return {**mistral_fields(raw), "moe": moe}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    return {
        "num_local_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
    }


MIXTRAL = Family(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    fields=_fields,
    reads=frozenset({"sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok"}),
    names=TensorNames(moe="block_sparse_moe.", expert_gate_up=("w1", "w3"), expert_down="w2"),
    gguf=GGUFFormat(
        architectures=("llama", "mistral3"),
        applies=lambda keys: bool(keys("expert_count")),
        interleaved_rope=True,
        config=_from_gguf,
        reads=frozenset({"expert_count", "expert_used_count"}),
    ),
)
