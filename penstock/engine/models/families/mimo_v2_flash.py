"""MiMo-V2-Flash: windows with sinks and twice as many KV heads in most layers, heads of values smaller than those of
keys, a third of each head rotated, and DeepSeek V3's experts without a shared one.

Published files have a key for each of these; the reference reads few of them and takes for granted what the published
model has. So those keys are held to what the reference computes. The layers for multi-token prediction of published
checkpoints (`model.mtp.layers`), of which the reference says nothing, are no part of the decoder: dense layers with a
window, the first of which `speculative.mtp` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    NEXTN_KEY,
    SILU,
    WINDOW_PATTERN,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    Windows,
    drafting_layers,
    flag,
    integer,
    layer_count,
    local_layers,
    number,
    window_of,
    windows_by_type,
)
from penstock.engine.models.families.sigmoid_experts import (
    CORRECTED_KEYS,
    corrected_sigmoids,
    require_sigmoid,
    sparse_by_type,
)
from penstock.engine.models.families.tensor_names import LLAMA_NAMES
from penstock.engine.models.rope import RopeConfig, read_rope
from penstock.errors import CheckpointError

_FULL, _SLIDING, _PERIOD = "full_attention", "sliding_attention", 6
_SHARE = 0.334
"""Of each head, rotated where a file does not say how much."""
_ROPES: Mapping[str, Mapping[str, Any]] = {
    kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": _SHARE}
    for kind, theta in ((_FULL, 5_000_000.0), (_SLIDING, 10_000.0))
}
"""Of files without rope parameters."""
_LEFT_OUT_THETA = 10_000.0
"""`rope_theta` of a file without it, which says nothing."""
_MORE_KV_HEADS = 2
"""Layers with a window have so many times the KV heads of others."""
_PUBLISHED = frozenset({
    "hybrid_layer_pattern", "layernorm_epsilon", "moe_layer_freq", "partial_rotary_factor", "rope_theta",
    "swa_head_dim", "swa_num_attention_heads", "swa_num_key_value_heads", "swa_rope_theta", "swa_v_head_dim",
})  # fmt: skip
_VALUE_SCALE = "attention.value_scale"
"""A key of GGUF files."""
_STORED_SINKS, _SINKS = "self_attn.attention_sink_bias", "self_attn.sinks"
_DRAFTING_NORM = "pre_mlp_layernorm"
"""The norm before the feed-forward, in layers for multi-token prediction."""


def _fields(raw: HFConfig) -> ConfigFields:
    windows, dim = _windows(raw), integer(raw, "head_dim")
    kv_heads, heads = integer(raw, "num_key_value_heads"), integer(raw, "num_attention_heads")
    windowed = kv_heads * _MORE_KV_HEADS
    if any(windows) and heads % windowed:
        raise CheckpointError(f"{heads} heads over {windowed} KV heads of layers with a window cannot be run")
    value = integer(raw, "v_head_dim")
    if value > dim:
        raise CheckpointError(f"v_head_dim is {value}, above head_dim {dim}, which mimo_v2_flash models do not support")
    scale = 1.0 if raw.get("attention_value_scale") is None else number(raw, "attention_value_scale")
    sparse = sparse_by_type(raw, 1)
    full, local = (_rope(raw, kind) for kind in (_FULL, _SLIDING))
    _check_published(raw, windows, sparse, full, local)
    return {
        "qkv_bias": flag(raw, "attention_bias"),
        "windows": windows,
        "layer_heads": tuple((kv_heads if window is None else windowed, dim) for window in windows),
        # Heads, window and rotary embedding of the layers for multi-token prediction.
        "mtp_like": next((index for index, window in enumerate(windows) if window is not None), None),
        "mtp_before_norm": True,
        "value_dim": value if value < dim else 0,
        "value_scale": scale,
        "attention_sinks": any(windows),
        "window_sinks": True,
        "rope": full,
        "local_rope": local,
        "moe": corrected_sigmoids(
            {
                **raw,
                "routed_scaling_factor": 1.0 if raw["routed_scaling_factor"] is None else raw["routed_scaling_factor"],
            },
            experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "n_routed_experts"),
            layers=sparse,
            shared=0,
        ),
    }


def _windows(raw: HFConfig) -> Windows:
    """`sliding_window_size` counts the tokens before one, `sliding_window` that one too."""
    window = window_of(raw)
    if raw.get("sliding_window_size") is not None:
        window = integer(raw, "sliding_window_size") + 1
    spaced = (None if not index or (index + 1) % _PERIOD == 0 else window for index in range(layer_count(raw)))
    return windows_by_type(raw, window) or tuple(spaced)


def _rope(raw: HFConfig, kind: str) -> RopeConfig:
    ropes = _ROPES if raw.get("rope_parameters") is None else raw["rope_parameters"]
    if (
        raw.get("rope_scaling") is not None
        or not isinstance(ropes, Mapping)
        or not isinstance(ropes.get(kind), Mapping)
    ):
        raise CheckpointError(
            f"rope_parameters of mimo_v2_flash models must have an object for {kind}, and there must be no "
            f"rope_scaling; found {ropes!r:.80}"
        )
    return read_rope({"max_position_embeddings": raw["max_position_embeddings"]}, ropes[kind], partial=True)


def _check_published(
    raw: HFConfig, windows: Windows, sparse: tuple[bool, ...], full: RopeConfig, local: RopeConfig
) -> None:
    """CheckpointError for a key that says otherwise than what the reference, which does not read it, computes."""
    computed: dict[str, Any] = {
        "hybrid_layer_pattern": [int(window is not None) for window in windows],
        "moe_layer_freq": [int(own) for own in sparse],
        "layernorm_epsilon": raw["rms_norm_eps"],
        "swa_num_attention_heads": raw["num_attention_heads"],
        "swa_num_key_value_heads": raw["num_key_value_heads"] * _MORE_KV_HEADS,
        "swa_head_dim": raw["head_dim"],
        "swa_v_head_dim": raw["v_head_dim"],
        "swa_rope_theta": local.theta,
        "partial_rotary_factor": full.rotated,
    }
    if raw["rope_theta"] != _LEFT_OUT_THETA:
        computed["rope_theta"] = full.theta
    for key, value in computed.items():
        given = raw.get(key)
        if given is not None and given != value:
            raise CheckpointError(
                f"config.json: {key} is {given!r:.80}; transformers does not read it and computes with {value!r:.80}, "
                "which is what is supported"
            )


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    """llama.cpp neither scales what experts give nor leaves their weights as they are, and adds no bias."""
    require_sigmoid(keys)
    own, local = drafting_layers(keys, config), local_layers(keys, config)
    layers = own["num_hidden_layers"]
    if config["attention_bias"]:
        raise CheckpointError(
            f"{keys.architecture} files with attn_q.bias are not supported: llama.cpp does not add it"
        )
    keys.whole("feed_forward_length", 0)  # the same in all layers
    full = {"rope_type": "default", **(config["rope_scaling"] or {}), "rope_theta": config["rope_theta"]}
    ropes = {
        _FULL: full,
        _SLIDING: {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", _LEFT_OUT_THETA)},
    }
    share = {"partial_rotary_factor": config.get("partial_rotary_factor", 1.0)}
    return {
        **own,
        "num_key_value_heads": _kv_heads(keys, config, local[:layers]),
        "v_head_dim": keys.whole("attention.value_length", 0) or config["hidden_size"] // config["num_attention_heads"],
        "attention_value_scale": keys.number(_VALUE_SCALE, 0.0) or 1.0,
        "layer_types": [_SLIDING if windowed else _FULL for windowed in local[:layers]],
        "mlp_layer_types": ["sparse" if routed else "dense" for routed in config["routed_layers"][:layers]],
        "n_routed_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length", 0),
        "n_group": keys.whole("expert_group_count", 0) or 1,
        "topk_group": keys.whole("expert_group_used_count", 0) or 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "rope_scaling": None,
        "rope_parameters": {kind: {**rope, **share} for kind, rope in ropes.items()},
    }


def _kv_heads(keys: GGUFKeys, config: HFConfig, local: tuple[bool, ...]) -> int:
    """Of layers that see everything."""
    given = keys.each("attention.head_count_kv", config["num_hidden_layers"])
    each = [own or config["num_attention_heads"] for own in given[: len(local)]]
    kv_heads, left = divmod(each[0], _MORE_KV_HEADS if local[0] else 1)
    expected = [kv_heads * (_MORE_KV_HEADS if windowed else 1) for windowed in local]
    if left or each != expected:
        raise CheckpointError(
            f"{keys.architecture}.attention.head_count_kv is {each!r:.80}; supported: layers with a window "
            f"({WINDOW_PATTERN}) have {_MORE_KV_HEADS} times the KV heads of others"
        )
    return kv_heads


def _fused_rows(config: HFConfig, layer: int) -> tuple[int, ...]:
    # Layers for multi-token prediction, behind the others, have a window.
    windowed = layer >= len(config["layer_types"]) or config["layer_types"][layer] == _SLIDING
    kv_heads = config["num_key_value_heads"] * (_MORE_KV_HEADS if windowed else 1)
    dim = config["head_dim"]
    return config["num_attention_heads"] * dim, kv_heads * dim, kv_heads * config["v_head_dim"]


def _own_name(name: str) -> str:
    return name.replace(_STORED_SINKS, _SINKS).replace(_DRAFTING_NORM, LLAMA_NAMES.feed_forward_norm)


MIMO_V2_FLASH = Family(
    model_type="mimo_v2_flash",
    class_name="MiMoV2FlashForCausalLM",
    fields=_fields,
    reads=CORRECTED_KEYS
    | _PUBLISHED
    | {
        "attention_bias", "attention_chunk_size", "attention_value_scale", "mlp_layer_types", "n_routed_experts",
        "num_local_experts", "num_nextn_predict_layers", "sliding_window", "sliding_window_size", "v_head_dim",
    },
    limits={
        "hidden_act": SILU,
        "add_full_attention_sink_bias": (False,),
        "add_swa_attention_sink_bias": (True,),
        "n_shared_experts": (None, 0),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    gguf=GGUFFormat(
        architectures=("mimo2",),
        config=_from_gguf,
        layer_sizes=True,
        value_heads=True,
        fused_rows=_fused_rows,
        window_rope=True,
        whole_head_rotated=False,
        reads=frozenset({
            NEXTN_KEY, WINDOW_PATTERN, _VALUE_SCALE, "expert_count", "expert_feed_forward_length", "expert_gating_func",
            "expert_group_count", "expert_group_used_count", "expert_used_count",
        }),
        tensors={
            "attn_sinks.weight": "self_attn.sinks",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            "layer_output_norm": "final_layernorm",
        },
    ),
    own_name=_own_name,
)  # fmt: skip
