"""MiniMax M3, the decoder of models that also take images: blocks of the context are chosen for every KV head, experts
by corrected sigmoids with gpt-oss' gate, norm weights stored minus one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.engine.backends.activation import ClampedSwiglu
from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    count,
    integer,
    layer_count,
    mapping,
    number,
)
from penstock.engine.models.families.sigmoid_experts import sparse_by_type
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.model_config import MoeConfig, SparseBlockConfig
from penstock.engine.models.rope import RopeConfig, read_rope
from penstock.errors import CheckpointError

_FULL, _SPARSE = "full_attention", "minimax_m3_sparse"
_OLDER: Mapping[str, str] = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""What the keys of the indexer are called in `sparse_attention_config`, which goes first."""
_KEYS = frozenset({
    "dense_intermediate_size", "hidden_act", "mlp_layer_types", "moe_layer_freq", "num_experts", "num_experts_per_tok",
    "num_local_experts", "rotary_dim", "routed_scaling_factor", "shared_intermediate_size", "sparse_attention_config",
    "swiglu_alpha", "swiglu_limit", *_OLDER,
})  # fmt: skip
_PUBLISHED = (
    (re.compile(r"\.block_sparse_moe\.e_score_correction_bias"), ".mlp.gate.e_score_correction_bias"),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"\.self_attn\.index_([qk]_(?:proj|norm))\."), r".self_attn.indexer.\1."),
)
"""Names of published files, and those of the reference, which adapters have."""


def _fields(raw: HFConfig) -> ConfigFields:
    limit, rope = number(raw, "swiglu_limit"), read_rope(raw, partial=True)
    if not limit > 0:
        raise CheckpointError(f"config key 'swiglu_limit' must be positive, found {limit:g}")
    given = mapping(raw, "sparse_attention_config")
    layers, routed = _layers(raw, given), _routed(raw)
    fields: ConfigFields = {
        "activation": ClampedSwiglu(number(raw, "swiglu_alpha"), limit),
        "ffn_size": integer(raw, "dense_intermediate_size"),
        "qk_norm": True,
        "rope": rope,
        "moe": _experts(raw, routed) if any(routed) else None,
        "windows": (None,) * layer_count(raw),
    }
    if any(layers):
        known = {**raw, **{key: given[older] for key, older in _OLDER.items() if older in given}}
        fields["sparse_blocks"] = _blocks(known, layers, rope)
    return fields


def _layers(raw: HFConfig, given: HFConfig) -> tuple[bool, ...]:
    """Which layers choose blocks."""
    layers, kinds = layer_count(raw), raw.get("layer_types")
    if kinds is None and "sparse_attention_freq" in given:
        return _flags(given, "sparse_attention_freq", layers)
    if kinds is None:
        return (False,) * layers
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or {*map(str, kinds)} - {_FULL, _SPARSE}:
        raise CheckpointError(
            f"layer_types must name {_FULL} or {_SPARSE} for each of {layers} layers, found {kinds!r:.80}"
        )
    return tuple(kind == _SPARSE for kind in kinds)


def _routed(raw: HFConfig) -> tuple[bool, ...]:
    if raw.get("mlp_layer_types") is None and raw.get("moe_layer_freq") is not None:
        return _flags(raw, "moe_layer_freq", layer_count(raw))
    return sparse_by_type(raw, 0)


def _flags(raw: HFConfig, key: str, layers: int) -> tuple[bool, ...]:
    given = raw[key]
    if not isinstance(given, list | tuple) or len(given) != layers or any(one not in (0, 1) for one in given):
        raise CheckpointError(f"config key {key!r} must be 0 or 1 for each of {layers} layers, found {given!r:.80}")
    return tuple(map(bool, given))


def _experts(raw: HFConfig, layers: tuple[bool, ...]) -> MoeConfig:
    return MoeConfig(
        experts=integer(raw, "num_experts" if "num_experts" in raw else "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "intermediate_size"),
        normalize=True,
        layers=layers,
        scoring="sigmoid",
        correction_bias=True,
        scale=number(raw, "routed_scaling_factor"),
        shared_ffn_size=integer(raw, "shared_intermediate_size"),
    )


def _blocks(raw: HFConfig, layers: tuple[bool, ...], rope: RopeConfig) -> SparseBlockConfig:
    heads, dim, rate, most = (
        integer(raw, f"index_{key}") for key in ("n_heads", "head_dim", "block_size", "topk_blocks")
    )
    kv_heads, local = integer(raw, "num_key_value_heads"), count(raw, "index_local_blocks")
    if kv_heads % heads:
        raise CheckpointError(f"index_n_heads is {heads}: they cannot choose for {kv_heads} KV heads evenly")
    if local > most:
        raise CheckpointError(f"index_local_blocks is {local}, above index_topk_blocks, {most}")
    rotary = int(integer(raw, "head_dim") * rope.rotated)
    if rotary > dim:
        raise CheckpointError(f"{rotary} dimensions of heads are rotated; index_head_dim is {dim}")
    return SparseBlockConfig(layers, heads, dim, rate, most, local)


def _own_name(name: str) -> str:
    for published, own in _PUBLISHED:
        name = published.sub(own, name)
    return name


MINIMAX_M3 = Family(
    model_type="minimax_m3_vl_text",
    class_name="MiniMaxM3VLForCausalLM",
    fields=_fields,
    reads=_KEYS,
    limits={},
    norm_offset=1.0,
    names=TensorNames(
        expert_gate_up=("w1", "w3"),
        expert_down="w2",
        expert_stacks=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    gguf=GGUFFormat(architectures=()),
    own_name=_own_name,
)
