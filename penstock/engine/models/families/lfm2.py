"""LFM2: gated short convolutions in place of most attention; in some models experts behind the first layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.engine.models.families.family import (
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
from penstock.engine.models.families.sigmoid_experts import require_sigmoid
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig
from penstock.engine.models.recurrence_config import ShortConvConfig
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

_CONV, _ATTENTION = "conv", "full_attention"
_TOTAL_EPS = 1e-6
_KEYS = frozenset({"conv_L_cache", "conv_bias", "norm_eps", "tie_embedding"})
_DENSE_KEYS = frozenset({
    "block_auto_adjust_ff_dim", "block_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of", "full_attn_idxs",
})  # fmt: skip
_MOE_KEYS = frozenset({
    "moe_intermediate_size", "norm_topk_prob", "num_dense_layers", "num_experts", "num_experts_per_tok",
    "routed_scaling_factor", "use_expert_bias",
})  # fmt: skip
_NAMES = TensorNames(
    final_norm="embedding_norm",
    mixer_norm="operator_norm",
    feed_forward_norm="ffn_norm",
    head_norms=("q_layernorm", "k_layernorm"),
    output="out_proj",
    mlp="feed_forward.",
    gate_up=("w1", "w3"),
    down="w2",
    moe="feed_forward.",
    correction_bias="expert_bias",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
    recurrent=("in_proj", "out_proj"),
)


def _architecture() -> Architecture:
    from penstock.engine.models.lfm2 import LFM2_LIKE

    return LFM2_LIKE


def _common(raw: HFConfig, recurrent: tuple[bool, ...]) -> ConfigFields:
    fields: ConfigFields = {"qk_norm": True, "rms_eps": number(raw, "norm_eps")}
    if "tie_embedding" in raw:  # the older name goes first, as in the reference
        fields["tied_embeddings"] = flag(raw, "tie_embedding")
    if any(recurrent):
        fields["short_conv"] = ShortConvConfig(
            layers=recurrent,
            channels=integer(raw, "hidden_size"),
            width=integer(raw, "conv_L_cache"),
            bias=flag(raw, "conv_bias"),
        )
    return fields


def _recurrent_layers(raw: HFConfig) -> tuple[bool, ...]:
    layers, kinds = layer_count(raw), raw["layer_types"]
    if not isinstance(kinds, list | tuple) or len(kinds) != layers or {*map(str, kinds)} - {_CONV, _ATTENTION}:
        raise CheckpointError(
            f"layer_types must name one of {_CONV}, {_ATTENTION} for each of {layers} layers, found {kinds!r:.80}"
        )
    return tuple(kind == _CONV for kind in kinds)


def _fields(raw: HFConfig) -> ConfigFields:
    recurrent = _attended(raw) if raw["layer_types"] is None else _recurrent_layers(raw)
    return {**_common(raw, recurrent), "ffn_size": _width(raw)}


def _attended(raw: HFConfig) -> tuple[bool, ...]:
    """From the older list of layers with attention; without one all have it."""
    attended, layers = raw["full_attn_idxs"], layer_count(raw)
    if attended is None:
        return (False,) * layers
    if not isinstance(attended, list | tuple):
        raise CheckpointError(f"config key 'full_attn_idxs' must be a list, found {attended!r:.80}")
    return tuple(index not in attended for index in range(layers))


def _width(raw: HFConfig) -> int:
    """Of the feed-forwards: two thirds of what the file says, times a factor, and then a multiple of a number."""
    width = integer(raw, "block_ff_dim" if "block_ff_dim" in raw else "intermediate_size")
    if not flag(raw, "block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    if raw["block_ffn_dim_multiplier"] is not None:
        multiple = integer(raw, "block_multiple_of")
        width = -(-int(number(raw, "block_ffn_dim_multiplier") * width) // multiple) * multiple
    if width < 1:
        raise CheckpointError("intermediate_size and block_ffn_dim_multiplier leave feed-forwards no width")
    return width


def _moe_fields(raw: HFConfig) -> ConfigFields:
    layers, dense = layer_count(raw), count(raw, "num_dense_layers")
    fields = _common(raw, _recurrent_layers(raw))
    if dense < layers:
        fields["moe"] = MoeConfig(
            experts=integer(raw, "num_experts"),
            top_k=integer(raw, "num_experts_per_tok"),
            ffn_size=integer(raw, "moe_intermediate_size"),
            normalize=flag(raw, "norm_topk_prob"),
            layers=tuple(index >= dense for index in range(layers)),
            scoring="sigmoid",
            correction_bias=flag(raw, "use_expert_bias"),
            scale=number(raw, "routed_scaling_factor"),
            total_eps=_TOTAL_EPS,
        )
    return fields


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    """Layers without KV heads are convolutions."""
    kv_heads = keys.each("attention.head_count_kv", config["num_hidden_layers"])
    return {
        "layer_types": [_ATTENTION if heads else _CONV for heads in kv_heads],
        "conv_L_cache": keys.whole("shortconv.l_cache", 0),
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
    }


def _moe_from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    require_sigmoid(keys)
    return {
        **_from_gguf(keys, config),
        "num_experts": keys.whole("expert_count", 0),
        "num_experts_per_tok": keys.whole("expert_used_count", 0),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length", 0),
        "num_dense_layers": keys.whole("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
    }


_TENSORS = {f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")}
LFM2 = Family(
    model_type="lfm2",
    class_name="Lfm2ForCausalLM",
    fields=_fields,
    reads=_KEYS | _DENSE_KEYS,
    limits={},
    names=_NAMES,
    gguf=GGUFFormat(
        architectures=("lfm2",),
        short_conv=True,
        final_norm="token_embd_norm",
        windowed=False,
        config=_from_gguf,
        reads=frozenset({"shortconv.l_cache"}),
        tensors=_TENSORS,
    ),
    architecture=_architecture,
)
LFM2_MOE = Family(
    model_type="lfm2_moe",
    class_name="Lfm2MoeForCausalLM",
    fields=_moe_fields,
    reads=_KEYS | _MOE_KEYS,
    limits={},
    names=_NAMES,
    gguf=GGUFFormat(
        architectures=("lfm2moe",),
        short_conv=True,
        final_norm="token_embd_norm",
        windowed=False,
        config=_moe_from_gguf,
        reads=frozenset({
            "shortconv.l_cache", "expert_count", "expert_used_count", "expert_feed_forward_length",
            "expert_gating_func", "expert_weights_scale", "leading_dense_block_count",
        }),
        tensors={**_TENSORS, "exp_probs_b.bias": "feed_forward.expert_bias"},
    ),
    architecture=_architecture,
)  # fmt: skip
