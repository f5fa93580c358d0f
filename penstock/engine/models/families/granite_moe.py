"""Granite 3 with experts, and Granite 4: Granite's multipliers, experts stored as one stack a layer, an expert that
every token visits; in Granite 4 without RoPE, dense where there are no experts, and with Mamba-2 layers in place of
most attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    flag,
    integer,
    layer_count,
    number,
)
from penstock.engine.models.families.granite import GGUF_SCALES, MULTIPLIERS, multiplied, multipliers_from_gguf
from penstock.engine.models.families.mamba import (
    MAMBA_KEYS,
    MAMBA_MATRICES,
    SSM_KEYS,
    hybrid_architecture,
    mamba_config,
    mamba_from_gguf,
    rotated_in_gguf,
)
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig
from penstock.errors import CheckpointError

GRANITE_MOE_NAMES = TensorNames(
    moe="",
    router="block_sparse_moe.router.layer",
    expert_stacks=("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
    shared_expert="shared_mlp.",
    mlp="shared_mlp.",
    fused_qkv="",  # gate and up are one matrix, these three are not
    fused_gate_up="input_linear",
    fused=True,
    down="output_linear",
)
"""The parts of stacks have names that no checkpoint has; see `loading.expert_stacks`."""
_EXPERTS = frozenset({"num_local_experts", "num_experts_per_tok"})
_MAMBA, _ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")
_GGUF = GGUF_SCALES | {
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
}  # fmt: skip
_GGUF_TENSORS = {
    "ffn_gate_shexp": "shared_mlp.gate_proj",
    "ffn_up_shexp": "shared_mlp.up_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}


def _experts(raw: HFConfig, shared: int) -> MoeConfig:
    return MoeConfig(
        experts=integer(raw, "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "intermediate_size"),
        normalize=True,
        layers=(True,) * layer_count(raw),
        shared_ffn_size=shared,
    )


def granite_moe_fields(raw: HFConfig) -> ConfigFields:
    bias = flag(raw, "attention_bias")
    shared = integer(raw, "shared_intermediate_size") if raw.get("shared_intermediate_size", 0) != 0 else 0
    return {"qkv_bias": bias, "output_bias": bias, **multiplied(raw), "moe": _experts(raw, shared)}


def _hybrid_fields(raw: HFConfig) -> ConfigFields:
    bias, layers = flag(raw, "attention_bias"), layer_count(raw)
    recurrent = _recurrent_layers(raw)
    positions = raw["position_embedding_type"]
    if positions not in (None, "rope", "nope"):
        raise CheckpointError(
            f"config.json: position_embedding_type is {positions!r:.80}, which granitemoehybrid models do not support; "
            "supported: 'rope', 'nope', None"
        )
    shared = integer(raw, "shared_intermediate_size")
    fields: ConfigFields = {
        "qkv_bias": bias,
        "output_bias": bias,
        **multiplied(raw),
        "unrotated": (positions != "rope",) * layers,
    }
    if any(recurrent):
        fields["mamba"] = mamba_config(raw, recurrent)
    if number(raw, "num_local_experts") == 0:
        return {**fields, "ffn_size": shared}
    return {**fields, "moe": _experts(raw, shared)}


def _recurrent_layers(raw: HFConfig) -> tuple[bool, ...]:
    layers, kinds = layer_count(raw), raw.get("layers_block_type") or raw["layer_types"]
    if kinds is None:
        return (True,) * layers
    known = (*_MAMBA, *_ATTENTION)
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or {*map(str, kinds)} - {*known}:
        raise CheckpointError(
            f"layer_types must name one of {', '.join(known)} for each of {layers} layers, found {kinds!r:.80}"
        )
    return tuple(kind in _MAMBA for kind in kinds)


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    return {
        **multipliers_from_gguf(keys, config),
        "num_local_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0) or 1,
        "intermediate_size": keys.whole("expert_feed_forward_length", 0) or config["intermediate_size"],
        "shared_intermediate_size": keys.whole("expert_shared_feed_forward_length", 0),
    }


def _hybrid_from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    """Layers without KV heads are Mamba's. Whether positions are rotated is in `rope.scaling.finetuned`."""
    found = _from_gguf(keys, config)
    kv_heads = keys.each("attention.head_count_kv", config["num_hidden_layers"])
    return {
        **found,
        **mamba_from_gguf(keys, config),
        "shared_intermediate_size": found["shared_intermediate_size"] or config["intermediate_size"],
        "layer_types": ["attention" if heads else "mamba" for heads in kv_heads],
        "position_embedding_type": "rope" if rotated_in_gguf(keys) else "nope",
    }


GRANITE_MOE = Family(
    model_type="granitemoe",
    class_name="GraniteMoeForCausalLM",
    fields=granite_moe_fields,
    reads=MULTIPLIERS | _EXPERTS | {"attention_bias"},
    names=GRANITE_MOE_NAMES,
    gguf=GGUFFormat(
        architectures=("granitemoe",),
        applies=lambda keys: not keys("expert_shared_feed_forward_length"),
        interleaved_rope=True,
        config=_from_gguf,
        reads=_GGUF,
    ),
)
GRANITE_MOE_SHARED = Family(
    model_type="granitemoeshared",
    class_name="GraniteMoeSharedForCausalLM",
    fields=granite_moe_fields,
    reads=MULTIPLIERS | _EXPERTS | {"attention_bias", "shared_intermediate_size"},
    names=GRANITE_MOE_NAMES,
    gguf=GGUFFormat(
        architectures=("granitemoe",),
        applies=lambda keys: bool(keys("expert_shared_feed_forward_length")),
        interleaved_rope=True,
        config=_from_gguf,
        reads=_GGUF,
        tensors=_GGUF_TENSORS,
    ),
)
GRANITE_MOE_HYBRID = Family(
    model_type="granitemoehybrid",
    class_name="GraniteMoeHybridForCausalLM",
    fields=_hybrid_fields,
    reads=MULTIPLIERS
    | _EXPERTS
    | MAMBA_KEYS
    | {"attention_bias", "shared_intermediate_size", "position_embedding_type", "layers_block_type"},
    names=replace(GRANITE_MOE_NAMES, recurrent=MAMBA_MATRICES),
    gguf=GGUFFormat(
        architectures=("granitehybrid",),
        interleaved_rope=True,
        mamba=True,
        config=_hybrid_from_gguf,
        reads=_GGUF | SSM_KEYS,
        tensors={
            **_GGUF_TENSORS,
            "ffn_gate": "shared_mlp.gate_proj",
            "ffn_up": "shared_mlp.up_proj",
            "ffn_down": "shared_mlp.output_linear",
        },
    ),
    architecture=hybrid_architecture,
)
