"""GGUF files of Gemma 4 (`gemma4`), all sizes, as llama.cpp's converter writes them.

The sizes of heads with a window are in keys of their own, and so is their rotary base. That layers which see
everything rotate a part of each head is in a tensor: it divides the frequencies of the others by so much that nothing
is left. Layers that attend to what lower ones keep are at the top; published files carry their unread matrices of keys
and values too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from penstock.engine.models.families.family import GGUFFormat, GGUFKeys, HFConfig
from penstock.engine.models.families.gemma import TANH
from penstock.engine.models.families.gemma2 import layer_types
from penstock.errors import CheckpointError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_CAP = 30.0
"""Of logits, where a file does not say."""
_READS = frozenset({
    "attention.shared_kv_layers", "attention.sliding_window_pattern", "embedding_length_per_layer_input",
    "expert_count", "expert_feed_forward_length", "expert_used_count", "final_logit_softcapping",
})  # fmt: skip


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    layers, arch = config["num_hidden_layers"], keys.architecture
    if not config["sliding_window"]:
        raise CheckpointError(f"{arch}.attention.sliding_window is missing or 0; the file is damaged")
    if keys.metadata.get(f"{arch}.attention.sliding_window_pattern") is None:
        raise CheckpointError(f"{arch}.attention.sliding_window_pattern is missing; the file is damaged")
    kinds = layer_types(keys, config, 0)["layer_types"]
    shared, experts = keys.whole("attention.shared_kv_layers", 0), keys.whole("expert_count", 0)
    if shared >= layers:
        raise CheckpointError(f"attention.shared_kv_layers is {shared} of {layers} layers; the file is damaged")
    small = _window_head(keys)
    width, doubled = _widths(keys, layers, shared)
    return {
        "head_dim": small,
        "global_head_dim": config["head_dim"],
        **_kv_heads(keys, config, kinds),
        "layer_types": kinds,
        "hidden_activation": TANH,
        "query_pre_attn_scalar": 1,
        "intermediate_size": width,
        "use_double_wide_mlp": doubled,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": keys.whole("embedding_length_per_layer_input", 0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", _CAP) or None,
        "enable_moe_block": experts > 0,
        "num_experts": experts or None,
        "top_k_experts": keys.whole("expert_used_count", 0) or None,
        "moe_intermediate_size": keys.whole("expert_feed_forward_length", 0) or None,
        "rope_scaling": None,
        "rope_parameters": {
            _FULL: {**(config["rope_scaling"] or {"rope_type": "default"}), "rope_theta": config["rope_theta"]},
            _SLIDING: {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)},
        },
    }


def _window_head(keys: GGUFKeys) -> int:
    """The size of a head in layers with a window."""
    sizes = {name: keys.whole(f"attention.{name}_length_swa", 0) for name in ("key", "value")}
    rotated = keys.whole("rope.dimension_count_swa", 0) or sizes["key"]
    if not sizes["key"] or {*sizes.values(), rotated} != {sizes["key"]}:
        raise CheckpointError(
            f"attention.key_length_swa is {sizes['key']}, attention.value_length_swa {sizes['value']} and "
            f"rope.dimension_count_swa {rotated}; they must be given, and one number"
        )
    return sizes["key"]


def _widths(keys: GGUFKeys, layers: int, shared: int) -> tuple[int, bool]:
    """Of feed-forwards, and whether those of layers that share keys and values are twice as wide."""
    each = keys.each("feed_forward_length", layers)
    width, doubled = each[0], len({*each}) > 1
    if each != tuple(width * (1 + (doubled and layer >= layers - shared)) for layer in range(layers)):
        raise CheckpointError(
            f"{keys.architecture}.feed_forward_length is {each!r:.80}: those of the {shared} layers that share keys "
            "and values may be twice as wide, others must be alike"
        )
    return width, doubled


def _kv_heads(keys: GGUFKeys, config: HFConfig, kinds: list[str]) -> Mapping[str, int]:
    """Two numbers at most, one for each kind of layer."""
    each = keys.each("attention.head_count_kv", config["num_hidden_layers"])
    if not each[0]:
        return {}  # as many as of queries
    found = {kind: {own for own, other in zip(each, kinds, strict=True) if other == kind} for kind in kinds}
    full, local = (found.get(kind, {each[0]}) for kind in (_FULL, _SLIDING))
    if len(full) > 1 or len(local) > 1 or (full != local and not config["attention_k_eq_v"]):
        raise CheckpointError(
            f"{keys.architecture}.attention.head_count_kv is {each!r:.80}: layers of one kind must have as many, and "
            "only those whose values are their keys may have fewer than others"
        )
    return {"num_key_value_heads": local.pop(), "num_global_key_value_heads": full.pop()}


def _unread(config: HFConfig, layer: int) -> Collection[str]:
    shared = layer >= config["num_hidden_layers"] - config["num_kv_shared_layers"]
    return ("attn_k", "attn_v", "attn_k_norm") if shared else ()


FORMAT = GGUFFormat(
    architectures=("gemma4",),
    config=_from_gguf,
    reads=_READS,
    layer_sizes=True,
    window_heads=True,
    window_rope=True,
    unread=_unread,
    top={
        "per_layer_token_embd": "embed_tokens_per_layer",
        "per_layer_model_proj": "per_layer_model_projection",
        "per_layer_proj_norm": "per_layer_projection_norm",
    },
    tensors={
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
)
