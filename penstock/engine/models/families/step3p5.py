"""Step 3.5 Flash, and the decoder of Step 3.7 Flash: windows with more query heads in three layers of four, a gate of
one number for each head, gates and inputs of feed-forwards bounded in the last layers, experts by corrected sigmoids
beside one that all tokens visit.

Published files have a key or an entry of a list for each property of each layer, also for the layers for multi-token
prediction behind the others, the first of which may draft. The reference reads some of them and takes the others for
granted: those are held to what it computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    HFConfig,
    Windows,
    count,
    flag,
    integer,
    layer_count,
    mapping,
    number,
    window_of,
    windows_by_type,
)
from penstock.engine.models.families.sigmoid_experts import sparse_by_type
from penstock.engine.models.families.step3p5_gguf import FORMAT
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig
from penstock.engine.models.rope import RopeConfig, read_rope
from penstock.errors import CheckpointError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_DENSE = 3
"""Layers without experts, where a file does not say which have some."""
_OTHER_HEADS = "attention_other_setting"
_LISTS = frozenset({"layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta",
                    "partial_rotary_factors"})  # fmt: skip
"""Keys with an entry for each layer, and perhaps for those for multi-token prediction."""
_ALIASES = {
    "num_key_value_heads": "num_attention_groups", "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k", "share_expert_dim": "share_expert_dims",
}  # fmt: skip
"""Published names of keys, which the reference prefers to its own."""
_PUBLISHED = (
    (".moe.router_bias", ".mlp.gate.e_score_correction_bias"),
    (".moe.gate.", ".mlp.gate."),
    (".moe.", ".mlp.experts."),
    (".share_expert.", ".mlp.shared_experts."),
    (".transformer.shared_head.", ".shared_head."),
)


def _fields(raw: HFConfig) -> ConfigFields:
    windows, bias = _windows(raw), flag(raw, "attention_bias")
    full, local = _ropes(raw, windows)
    scalar = raw["query_pre_attn_scalar"]
    scale = float(integer(raw, "head_dim")) if scalar is None else number(raw, "query_pre_attn_scalar")
    if scale <= 0:
        raise CheckpointError(f"query_pre_attn_scalar is {scale}; it must be positive")
    heads = _query_heads(raw, windows)
    fields: ConfigFields = {
        "num_heads": max(heads),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": flag(raw, "mlp_bias"),
        "qk_norm": True,
        "output_gate": True,
        "gates_by_head": True,
        "attention_scale": scale**-0.5,
        "windows": windows,
        "mtp_like": _drafting(raw, windows),
        "mtp_before_norm": True,
        "rope": full,
        "local_rope": local,
        "bounds": _bounds(raw, "swiglu_limits_shared"),
        "moe": _experts(raw),
    }
    if len({*heads}) > 1:
        fields["query_heads"] = heads
    return fields


def _drafting(raw: HFConfig, windows: Windows) -> int | None:
    """A layer of the kind of the first one for multi-token prediction."""
    kinds = raw["mtp_layer_types"] or [_FULL]
    local = isinstance(kinds, list | tuple) and kinds[0] == _SLIDING
    return next((index for index, window in enumerate(windows) if (window is not None) == local), None)


def _translated(raw: HFConfig) -> dict[str, Any]:
    """With the reference's names of keys, and in lists the entries of the decoder's layers alone."""
    raw = {**raw, **{own: raw[published] for own, published in _ALIASES.items() if raw.get(published) is not None}}
    layers = layer_count(raw)
    padded = layers + (count(raw, "num_nextn_predict_layers") if raw.get("num_nextn_predict_layers") else 0)
    cut = {key: raw[key][:layers] for key in _LISTS if isinstance(raw.get(key), list) and len(raw[key]) == padded}
    drafting = raw["layer_types"][layers:padded] if "layer_types" in cut else []
    return {**raw, **({"mtp_layer_types": drafting} if drafting else {}), **cut}


def _each(raw: HFConfig, key: str) -> Sequence[Any]:
    """A list with an entry for each layer."""
    value, layers = raw[key], layer_count(raw)
    if not isinstance(value, list | tuple) or len(value) < layers:
        raise CheckpointError(f"{key} must have an entry for each of {layers} layers, found {value!r:.80}")
    return value[:layers]


def _windows(raw: HFConfig) -> Windows:
    return windows_by_type(raw, window_of(raw)) or (None,) * layer_count(raw)


def _query_heads(raw: HFConfig, windows: Windows) -> tuple[int, ...]:
    """Of each layer. Files that the reference has written say so layer by layer."""
    heads, kv_heads = integer(raw, "num_attention_heads"), integer(raw, "num_key_value_heads")
    other = mapping(raw, _OTHER_HEADS)
    for key, same in (("num_attention_groups", kv_heads), ("head_dim", raw["head_dim"]), ("attention_type", _SLIDING)):
        if other.get(key, same) != same:
            raise CheckpointError(f"{_OTHER_HEADS}: {key} is {other[key]!r:.80}; supported: {same!r}")
    if raw["num_sliding_attention_heads"] is not None:
        local = integer(raw, "num_sliding_attention_heads")
    else:
        local = integer(other, "num_attention_heads", heads)
    if raw.get("per_layer_config") is None:
        found = tuple(heads if window is None else local for window in windows)
    else:
        found = _listed(raw, heads)
    for own in found:
        if own % kv_heads:
            raise CheckpointError(f"{own} heads over {kv_heads} KV heads cannot be run")
    return found


def _listed(raw: HFConfig, heads: int) -> tuple[int, ...]:
    given = {str(key): own for key, own in mapping(raw, "per_layer_config").items()}
    layers = layer_count(raw)
    for key, own in given.items():
        known = key.isdecimal() and str(int(key)) == key and int(key) < layers
        if not known or not isinstance(own, Mapping) or own.keys() - {"num_attention_heads"}:
            raise CheckpointError(
                f"per_layer_config must have num_attention_heads by number of layer, found {key!r:.20}: {own!r:.80}"
            )
    return tuple(integer(given.get(str(index), {}), "num_attention_heads", heads) for index in range(layers))


def _ropes(raw: HFConfig, windows: Windows) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that see everything, and of those with a window: from one entry for each kind, or from lists with one
    for each layer. `rope_scaling` is for the former alone."""
    given, kinds = mapping(raw, "rope_parameters"), [_FULL if window is None else _SLIDING for window in windows]
    if given:
        missing = [kind for kind in dict.fromkeys(kinds) if not isinstance(given.get(kind), Mapping)]
        if missing:
            raise CheckpointError(f"rope_parameters of step3p5 models must have an object for {missing[0]}")
        ropes = {kind: given.get(kind) for kind in (_FULL, _SLIDING)}
    else:
        ropes = {kind: _listed_rope(raw, kinds, kind) for kind in (_FULL, _SLIDING)}
    positions = {"max_position_embeddings": raw["max_position_embeddings"]}
    full, local = (
        read_rope(positions, own, partial=True) if kind in kinds else RopeConfig() for kind, own in ropes.items()
    )
    return full, local


def _listed_rope(raw: HFConfig, kinds: Sequence[str], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "default"}
    for key, name in (("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
        if key == "rope_theta" and not isinstance(raw[key], list):
            found[name] = raw[key]
        elif raw.get(key):
            own = [value for value, other in zip(_each(raw, key), kinds, strict=True) if other == kind]
            if any(value != own[0] for value in own):
                raise CheckpointError(f"{key} must be the same in all layers with {kind}, found {raw[key]!r:.80}")
            found |= {name: own[0]} if own else {}
    scaling = mapping(raw, "rope_scaling") if kind == _FULL else {}
    if scaling and "rope_type" not in scaling:
        raise CheckpointError("rope_scaling of step3p5 models must have rope_type, without which it changes nothing")
    return {**found, **scaling}


def _bounds(raw: HFConfig, key: str) -> tuple[float, ...]:
    """Null and 0 are no bound; empty: nowhere."""
    if not raw.get(key):
        return ()
    found = []
    for value in _each(raw, key):
        limit = 0 if value is None else value
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 <= limit < 1e30:
            raise CheckpointError(f"{key} must have numbers from 0 on, or null, found {raw[key]!r:.80}")
        found.append(float(limit))
    return tuple(found) if any(found) else ()


def _experts(raw: HFConfig) -> MoeConfig | None:
    layers = _sparse(raw)
    if not any(layers):
        return None
    return MoeConfig(
        experts=integer(raw, "n_routed_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "moe_intermediate_size"),
        normalize=True,
        layers=layers,
        scoring="sigmoid",
        correction_bias=True,
        scale=number(raw, "moe_router_scaling_factor"),
        shared_ffn_size=integer(raw, "share_expert_dim"),
        bounds=_bounds(raw, "swiglu_limits"),
    )


def _sparse(raw: HFConfig) -> tuple[bool, ...]:
    """Which layers have experts: `moe_layers_enum` is a list of numbers, or a string of them with commas."""
    given = raw.get("moe_layers_enum")
    if raw.get("mlp_layer_types") is not None or given is None:
        return sparse_by_type(raw, _DENSE)
    entries = given.split(",") if isinstance(given, str) else given
    if not isinstance(entries, list | tuple) or not all(str(entry).strip().isdecimal() for entry in entries if entry):
        raise CheckpointError(f"moe_layers_enum must have numbers of layers, found {given!r:.80}")
    named = {int(entry) for entry in entries if str(entry).strip()}
    return tuple(index in named for index in range(layer_count(raw)))


def _own_name(name: str) -> str:
    """Published names are not those of the reference's modules."""
    for published, own in _PUBLISHED:
        if published in name:
            return name.replace(published, own)
    return name


STEP3P5 = Family(
    model_type="step3p5",
    class_name="Step3p5ForCausalLM",
    fields=_fields,
    translate=_translated,
    reads=_LISTS
    | {*_ALIASES, *_ALIASES.values()}
    | {
        _OTHER_HEADS, "attention_bias", "mlp_bias", "moe_intermediate_size", "moe_layers_enum",
        "moe_router_scaling_factor", "mtp_layer_types", "mtp_mlp_layer_types", "num_local_experts",
        "num_nextn_predict_layers", "num_sliding_attention_heads", "per_layer_config", "query_pre_attn_scalar",
        "sliding_window",
    },
    limits={
        "hidden_act": SILU,
        "att_impl_type": ("GQA",),
        "gating": (True, "per-head"),
        "moe_every_n_layer": (1,),
        "moe_layer_offset": (0,),
        "moe_router_activation": ("sigmoid",),
        "norm_expert_weight": (True,),
        "sink": (False,),
        "use_head_wise_attn_gate": (True,),
        "use_moe": (True,),
        "use_moe_router_bias": (True,),
        "use_qk_norm": (True,),
        "use_rope_layers": ([], None),
        "yarn_only_types": ([_FULL], None),
        "zero_centered": (True,),
    },
    norm_offset=1.0,
    names=TensorNames(output_gate="g_proj", expert_stacks=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
    gguf=FORMAT,
    own_name=_own_name,
)  # fmt: skip
