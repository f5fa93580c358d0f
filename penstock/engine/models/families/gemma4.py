"""Gemma 4: heads of another size and number in layers that see everything, normalized values, a factor behind every
layer; dense, with experts beside a dense feed-forward, or small, with shared keys and values and a vector of each token
for every layer. Of models that also take images and sounds, the decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.engine.models.families.family import (
    GELU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    Windows,
    count,
    flag,
    integer,
    layer_count,
    mapping,
    window_of,
    windows_by_type,
)
from penstock.engine.models.families.gemma import TANH, gemma_fields
from penstock.engine.models.families.gemma2 import SANDWICH_NORMS, cap
from penstock.engine.models.families.gemma4_gguf import FORMAT
from penstock.engine.models.model_config import TokenInputs
from penstock.engine.models.moe_config import MoeConfig
from penstock.engine.models.rope import RopeConfig, read_rope
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

_FULL, _SLIDING, _PERIOD = "full_attention", "sliding_attention", 6
_GLOBAL_HEAD_DIM = 512
_ROPES: Mapping[str, Mapping[str, Any]] = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_READS = frozenset({
    "attention_bias", "attention_k_eq_v", "final_logit_softcapping", "global_head_dim", "num_global_key_value_heads",
    "num_kv_shared_layers", "per_layer_config", "sliding_window", "use_double_wide_mlp",
})  # fmt: skip
_TEXT_READS = frozenset({
    "enable_moe_block", "hidden_size_per_layer_input", "moe_intermediate_size", "num_experts", "top_k_experts",
    "vocab_size_per_layer_input",
})  # fmt: skip
_NAMES = dataclasses.replace(
    SANDWICH_NORMS,
    moe="",
    router="router.proj",
    expert_gains="router.per_expert_scale",
    shared_expert="mlp.",
    expert_stacks=("experts.gate_up_proj", "experts.down_proj"),
)


def gemma4_architecture() -> Architecture:
    from penstock.engine.models.gemma4 import GEMMA4_LIKE

    return GEMMA4_LIKE


def _fields(raw: HFConfig) -> ConfigFields:
    layers, windows = layer_count(raw), _windows(raw)
    full, local = (_rope(raw, kind) for kind in (_FULL, _SLIDING))
    sources = _sources(raw, windows)
    fields: ConfigFields = {
        **gemma_fields(raw),
        "attention_scale": 1.0,
        "logit_softcap": cap(raw, "final_logit_softcapping"),
        "windows": windows,
        "qk_norm": True,
        "normed_values": True,
        "keys_as_values": flag(raw, "attention_k_eq_v"),
        "layer_heads": _heads(raw, windows),
        "rope": full,
        "local_rope": local,
    }
    if sources != tuple(range(layers)):
        fields["key_sources"] = sources
        if flag(raw, "use_double_wide_mlp"):
            width = integer(raw, "intermediate_size")
            fields["ffn_sizes"] = tuple(width * (1 + (at != source)) for at, source in enumerate(sources))
    return fields


def _text_fields(raw: HFConfig) -> ConfigFields:
    fields, size = _fields(raw), count(raw, "hidden_size_per_layer_input")
    if size:
        vocab = integer(raw, "vocab_size_per_layer_input")
        if vocab < integer(raw, "vocab_size"):
            raise CheckpointError(
                f"vocab_size_per_layer_input is {vocab}, below the vocabulary: tokens beyond it cannot be looked up"
            )
        fields["token_inputs"] = TokenInputs(size, vocab, layer_count(raw))
    if flag(raw, "enable_moe_block"):
        if "ffn_sizes" in fields:
            raise CheckpointError("use_double_wide_mlp is true, which is not supported beside experts")
        fields["moe"] = MoeConfig(
            experts=integer(raw, "num_experts"),
            top_k=integer(raw, "top_k_experts"),
            ffn_size=integer(raw, "moe_intermediate_size"),
            normalize=True,
            layers=(True,) * layer_count(raw),
            shared_ffn_size=integer(raw, "intermediate_size"),
            expert_gains=True,
        )
    return fields


def _windows(raw: HFConfig) -> Windows:
    window, layers = window_of(raw), layer_count(raw)
    found = windows_by_type(raw, window)
    if found is None:
        found = tuple(None if (index + 1) % _PERIOD == 0 or index + 1 == layers else window for index in range(layers))
    if found[-1] is not None:
        raise CheckpointError("layer_types: the last layer of gemma4 models must be full_attention")
    return found


def _rope(raw: HFConfig, kind: str) -> RopeConfig:
    """One entry for each kind of layer; the keys of older families beside them are not read."""
    ropes = _ROPES if raw.get("rope_parameters") is None else mapping(raw, "rope_parameters")
    if not isinstance(ropes.get(kind), Mapping):
        raise CheckpointError(f"rope_parameters of gemma4 models must have an object for {kind}, found {ropes!r:.80}")
    return read_rope({"max_position_embeddings": raw["max_position_embeddings"]}, ropes[kind], proportional=True)


def _heads(raw: HFConfig, windows: Windows) -> tuple[tuple[int, int], ...]:
    """Published files give those of the layers that see everything by keys of their own, files that the reference has
    written layer by layer."""
    heads, dim = integer(raw, "num_attention_heads"), integer(raw, "head_dim")
    kv_heads = integer(raw, "num_key_value_heads")
    if "per_layer_config" in raw:
        found = _listed(raw, kv_heads, dim)
    else:
        wide = integer(raw, "global_head_dim", _GLOBAL_HEAD_DIM)
        few = integer(raw, "num_global_key_value_heads", kv_heads) if flag(raw, "attention_k_eq_v") else kv_heads
        found = tuple((kv_heads, dim) if window is not None else (few, wide) for window in windows)
    for kinds in ({shape for shape, window in zip(found, windows, strict=True) if window is None},
                  {shape for shape, window in zip(found, windows, strict=True) if window is not None}):  # fmt: skip
        if len(kinds) > 1:
            raise CheckpointError("per_layer_config: layers of one kind that differ are not supported")
    for kv, size in found:
        if heads % kv or size % 2 or size > 1 << 16:
            raise CheckpointError(f"{heads} heads over {kv} KV heads of size {size} cannot be run")
    return found


def _listed(raw: HFConfig, kv_heads: int, dim: int) -> tuple[tuple[int, int], ...]:
    given = mapping(raw, "per_layer_config")
    layers = layer_count(raw)
    known = {str(index) for index in range(layers)}
    found = []
    for key, own in given.items():
        if str(key) not in known or not isinstance(own, Mapping) or own.keys() - {"head_dim", "num_key_value_heads"}:
            raise CheckpointError(
                f"per_layer_config must have head_dim and num_key_value_heads by number of layer, found "
                f"{key!r:.20}: {own!r:.80}"
            )
    by_layer = {str(key): own for key, own in given.items()}
    for index in range(layers):
        own = by_layer.get(str(index), {})
        found.append((integer(own, "num_key_value_heads", kv_heads), integer(own, "head_dim", dim)))
    return tuple(found)


def _sources(raw: HFConfig, windows: Windows) -> tuple[int, ...]:
    """The upper layers attend to what the last of the others of their kind keeps."""
    layers = len(windows)
    first = layers - count(raw, "num_kv_shared_layers")
    found = list(range(layers))
    for index in range(max(0, first), layers):
        own = [below for below in range(max(0, first)) if (windows[below] is None) == (windows[index] is None)]
        if not own:
            raise CheckpointError(
                f"num_kv_shared_layers is {layers - first}: layer {index} has no layer of its kind to share with"
            )
        found[index] = own[-1]
    return tuple(found)


GEMMA4 = Family(
    model_type="gemma4_text",
    class_name="Gemma4ForCausalLM",
    fields=_text_fields,
    reads=_READS | _TEXT_READS,
    limits={"hidden_activation": GELU, "use_bidirectional_attention": (None, "vision")},
    hidden_act=TANH,
    names=_NAMES,
    gguf=FORMAT,
    architecture=gemma4_architecture,
)
GEMMA4_UNIFIED = dataclasses.replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    class_name="Gemma4UnifiedForCausalLM",
    fields=_fields,
    reads=_READS,
    gguf=GGUFFormat(architectures=()),
)
"""Of models that read images and sounds without an encoder; their decoders are dense."""
