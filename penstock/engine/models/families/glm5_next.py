"""GLM-5-Next (GLM-5.3-Flash): delta nets with a decay for every channel (KDA), whose decays may have a bound, in most
layers; in the others attention over latents without rotary embedding, to tokens that an indexer chooses in pools; both
among several residual streams; experts by corrected sigmoids, whose gates have a limit.

Layers share what an indexer chose only with the layer right before them, as in the reference. The layer for multi-token
prediction behind the last one is no part of the decoder: it has attention, an indexer and experts around a single
residual stream, and `speculative.mtp` reads it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.engine.backends.activation import ClampedSilu
from penstock.engine.models.attention_config import IndexConfig, LatentConfig
from penstock.engine.models.families.deepseek import LATENT_KEYS
from penstock.engine.models.families.deepseek_sparse import SHARING_KEYS, SPARSE_NAMES, indexer_kinds
from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    flag,
    integer,
    layer_count,
    mapping,
    number,
)
from penstock.engine.models.families.kimi_linear import forget_gate_name
from penstock.engine.models.families.qwen3_next import recurrent_by_type
from penstock.engine.models.families.sigmoid_experts import CORRECTED_KEYS, corrected_sigmoids, sparse_by_type
from penstock.engine.models.model_config import StreamsConfig
from penstock.engine.models.recurrence_config import DeltaConfig
from penstock.engine.models.rope import NO_ROPE
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

_PERIOD = 4
_DENSE = 3
"""Layers without experts, where the configuration does not name them."""
_ATTENDING = ("indexed_attention", "full_attention")
_SAFE_BOUND = -5.0
_OF_DELTA_NETS = {
    "linear_head_dim": "head_dim", "linear_num_heads": "num_heads", "linear_conv_kernel_dim": "short_conv_kernel_size",
    "linear_lower_bound": "gate_lower_bound",
}  # fmt: skip
"""The keys of the class, and those of `linear_attn_config`, which go first."""
_STREAMS = re.compile(r"\.hc_(attn|ffn)_(fn|base|scale)$")


def _architecture() -> Architecture:
    from penstock.engine.models.glm5_next import GLM5_NEXT_LIKE

    return GLM5_NEXT_LIKE


def _drafting() -> Architecture:
    from penstock.engine.models.glm5_next import GLM5_NEXT_DRAFTING

    return GLM5_NEXT_DRAFTING


def _own_name(name: str) -> str:
    """Names of published files, and those of the reference in memory."""
    return _STREAMS.sub(r".\1_hc.\2", forget_gate_name(name))


def _recurrent(raw: HFConfig) -> tuple[bool, ...]:
    if raw.get("layer_types") is not None:
        return recurrent_by_type(raw, _ATTENDING)
    return tuple(index % _PERIOD != _PERIOD - 1 for index in range(layer_count(raw)))


def _delta_nets(raw: HFConfig, layers: tuple[bool, ...]) -> DeltaConfig | None:
    described = raw.get("linear_attn_config") is not None
    inner = mapping(raw, "linear_attn_config") if described else {}
    own = {**raw, **{key: inner[name] for key, name in _OF_DELTA_NETS.items() if name in inner}}
    if own["linear_lower_bound"] is None and described and inner.get("safe_gate", True):
        own["linear_lower_bound"] = _SAFE_BOUND
    lowest = 0.0 if own["linear_lower_bound"] is None else number(own, "linear_lower_bound")
    if own["linear_lower_bound"] is not None and lowest >= 0:
        raise CheckpointError(f"linear_lower_bound is {lowest:g}; it must be negative, or null where there is no bound")
    heads, dim = integer(own, "linear_num_heads"), integer(own, "linear_head_dim")
    conv = integer(own, "linear_conv_kernel_dim")
    if not any(layers):
        return None
    return DeltaConfig(
        layers=layers,
        k_heads=heads,
        v_heads=heads,
        k_dim=dim,
        v_dim=dim,
        conv=conv,
        grouped=False,
        by_channel=True,
        lowest=lowest,
        flat_rates=True,
    )


def _index(raw: HFConfig, recurrent: tuple[bool, ...]) -> IndexConfig:
    rate, most = integer(raw, "index_kpool"), integer(raw, "index_topk")
    if most % rate:
        raise CheckpointError(f"index_topk is {most}, which index_kpool, {rate}, does not divide")
    if rate > 1 and not flag(raw, "index_kpool_always_select_tail"):
        raise CheckpointError(
            "index_kpool_always_select_tail is false, so that the first tokens of a text attend to nothing, not even "
            "to themselves; only true is supported with pools of several tokens"
        )
    if integer(raw, "index_head_dim") == 1:
        raise CheckpointError("index_head_dim is 1: behind their norm all index keys are the same")
    own = tuple(full and not other for full, other in zip(indexer_kinds(raw), recurrent, strict=True))
    for layer, other in enumerate(recurrent):
        if not (own[layer] or other or (layer and own[layer - 1])):
            raise CheckpointError(
                f"indexer_types: layer {layer} attends to what another one chose; supported: what the layer right "
                "before it chose with an indexer of its own"
            )
    return IndexConfig(
        heads=integer(raw, "index_n_heads"),
        dim=integer(raw, "index_head_dim"),
        most=most,
        interleaved=False,
        layers=own,
        rate=rate,
    )


def _translate(raw: HFConfig) -> dict[str, Any]:
    """The size of a head follows from others, whatever the key says."""
    return {**raw, "head_dim": raw["qk_nope_head_dim"]}


def _fields(raw: HFConfig) -> ConfigFields:
    heads, plain, recurrent = integer(raw, "num_attention_heads"), integer(raw, "qk_nope_head_dim"), _recurrent(raw)
    if raw.get("num_key_value_heads") not in (None, heads):
        raise CheckpointError("num_key_value_heads must be num_attention_heads: all heads share one latent")
    limit, bias = number(raw, "swiglu_limit"), flag(raw, "attention_bias")
    if not limit > 0:
        raise CheckpointError(f"swiglu_limit is {limit:g}; it must be positive")
    fields: ConfigFields = {
        "activation": ClampedSilu(limit),
        "attention_scale": float(plain**-0.5),
        "head_dim": plain,
        "latent": LatentConfig(
            query_rank=integer(raw, "q_lora_rank"),
            rank=integer(raw, "kv_lora_rank"),
            plain=plain,
            rotary=0,
            value=integer(raw, "v_head_dim"),
            interleaved=False,
            norm_eps=number(raw, "rms_norm_eps"),
            input_bias=bias,
            index=_index(raw, recurrent),
        ),
        "moe": corrected_sigmoids(
            raw,
            experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "n_routed_experts"),
            layers=sparse_by_type(raw, _DENSE),
            shared=integer(raw, "n_shared_experts"),
        ),
        "num_kv_heads": 1,
        "output_bias": bias,
        "rope": NO_ROPE,
        "streams": StreamsConfig(
            integer(raw, "hc_mult"), integer(raw, "hc_sinkhorn_iters"), number(raw, "hc_eps"), averaged=True
        ),
    }
    delta = _delta_nets(raw, recurrent)
    return fields if delta is None else {**fields, "delta": delta}


GLM5_NEXT = Family(
    model_type="glm5_next_text",
    class_name="Glm5NextForCausalLM",
    fields=_fields,
    translate=_translate,
    reads=(LATENT_KEYS - {"qk_rope_head_dim"})
    | CORRECTED_KEYS
    | SHARING_KEYS
    | _OF_DELTA_NETS.keys()
    | {
        "hc_eps", "hc_mult", "hc_sinkhorn_iters", "index_head_dim", "index_kpool", "index_kpool_always_select_tail",
        "index_n_heads", "index_topk", "linear_attn_config", "mlp_layer_types", "n_routed_experts", "n_shared_experts",
        "num_local_experts", "swiglu_limit",
    },
    limits={"hidden_act": SILU, "qk_rope_head_dim": (0,)},
    gguf=GGUFFormat(architectures=()),
    names=replace(SPARSE_NAMES, expert_stacks=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
    own_name=_own_name,
    architecture=_architecture,
    drafting=_drafting,
)  # fmt: skip
