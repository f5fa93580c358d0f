"""How each family of models differs from Llama, as data.

A family is one function: from the keys of a `config.json` to the fields of `ModelConfig` whose default it does not
take. The decoder knows no family; whatever is not expressed here (or read off the tensors by `build`) does not exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from penstock.engine.backends.interface import Activation
from penstock.engine.models.rope import RopeConfig, read_rope
from penstock.errors import CheckpointError

Raw = Mapping[str, Any]
Windows = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A feed-forward of many experts, of which each token visits a few."""

    experts: int
    top_k: int
    ffn_size: int
    normalize: bool
    """Whether the weights of a token's experts are scaled to sum to one."""
    layers: tuple[bool, ...]
    """Which layers have experts; the others are dense."""


class Variation(TypedDict, total=False):
    """Fields of `ModelConfig` that a family sets."""

    activation: Activation
    attention_scale: float
    attention_softcap: float | None
    embedding_scale: float
    local_rope: RopeConfig
    logit_softcap: float | None
    mlp_bias: bool
    moe: MoeConfig
    norm_shift: float
    output_bias: bool
    qk_norm: bool
    qkv_bias: bool
    rope: RopeConfig
    sandwich_norms: bool
    tied_embeddings: bool
    windows: Windows


def integer(raw: Raw, key: str, default: int | None = None) -> int:
    """A positive integer of the configuration."""
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"config key {key!r} must be a positive integer, found {value!r}")
    return value


def _llama(raw: Raw) -> Variation:
    bias = bool(raw.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bool(raw.get("mlp_bias", False))}


def _mistral(raw: Raw) -> Variation:
    window = raw.get("sliding_window")
    return {**_llama(raw), "windows": _by_type(raw, window) or (window,) * _layers(raw)}


def _qwen2(raw: Raw) -> Variation:
    return {"qkv_bias": True, "windows": _qwen_windows(raw)}


def _qwen3(raw: Raw) -> Variation:
    return {**_llama(raw), "qk_norm": True, "windows": _qwen_windows(raw)}


def _mixtral(raw: Raw) -> Variation:
    layers = (True,) * _layers(raw)
    experts, ffn = integer(raw, "num_local_experts"), integer(raw, "intermediate_size")
    return {**_mistral(raw), "moe": MoeConfig(experts, integer(raw, "num_experts_per_tok"), ffn, True, layers)}


def _qwen3_moe(raw: Raw) -> Variation:
    step, dense = integer(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    moe = MoeConfig(
        experts=integer(raw, "num_experts" if raw.get("num_experts") else "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "moe_intermediate_size"),
        normalize=bool(raw.get("norm_topk_prob", False)),
        layers=tuple(index not in dense and (index + 1) % step == 0 for index in range(_layers(raw))),
    )
    return {**_llama(raw), "qk_norm": True, "moe": moe, "windows": (window,) * _layers(raw)}


def _gemma(raw: Raw) -> Variation:
    return {
        **_llama(raw),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "embedding_scale": math.sqrt(integer(raw, "hidden_size")),
        "norm_shift": 1.0,
    }


def _gemma2(raw: Raw) -> Variation:
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 2
    windows = _by_type(raw, raw.get("sliding_window")) or _every(raw, int(pattern))
    return {
        **_gemma(raw),
        "sandwich_norms": True,
        "attention_scale": integer(raw, "query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": raw.get("attn_logit_softcapping", 50.0),
        "logit_softcap": raw.get("final_logit_softcapping", 30.0),
        "windows": windows,
    }


def _gemma3(raw: Raw) -> Variation:
    if raw.get("use_bidirectional_attention"):
        raise CheckpointError("this Gemma 3 is an encoder (use_bidirectional_attention); only decoders can be run")
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    ropes = raw.get("rope_parameters") or {}
    if "full_attention" not in ropes:  # files written before the two stood side by side
        theta = raw.get("rope_theta", 1_000_000.0)
        ropes = {"full_attention": {"rope_theta": theta, **(raw.get("rope_scaling") or {})}}
    local = ropes.get("sliding_attention") or {"rope_theta": raw.get("rope_local_base_freq", 10_000.0)}
    return {
        **_gemma2({"attn_logit_softcapping": None, "final_logit_softcapping": None, **raw}),
        "windows": _by_type(raw, raw.get("sliding_window")) or _every(raw, int(pattern)),
        "qk_norm": True,
        "rope": read_rope(raw, ropes["full_attention"]),
        "local_rope": read_rope(raw, local),
    }


def _phi3(raw: Raw) -> Variation:
    return {"windows": (raw.get("sliding_window"),) * _layers(raw)}


FAMILIES: dict[str, Callable[[Raw], Variation]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
}


def text_part(raw: Raw) -> Raw:
    """A Gemma 3 that also sees keeps its decoder's keys one level down; only the decoder is run."""
    inner = raw.get("text_config")
    return {"model_type": "gemma3_text", **inner} if raw.get("model_type") == "gemma3" and inner else raw


def variation(raw: Raw) -> Variation:
    """What the family of a configuration changes; a model we cannot run exactly is refused, never approximated."""
    family = str(raw.get("model_type", ""))
    if family not in FAMILIES:
        raise CheckpointError(
            f"model_type {family or '(missing)'!r} is not supported; supported families: {', '.join(FAMILIES)}"
        )
    found = FAMILIES[family](raw)
    expected = "gelu_pytorch_tanh" if family.startswith("gemma") else "silu"
    activation = raw.get("hidden_activation") or (expected if family == "gemma" else raw.get("hidden_act", expected))
    if activation != expected:
        raise CheckpointError(f"hidden_act {activation!r} is not supported for {family} models; only {expected!r} is")
    found["activation"] = "gelu_tanh" if expected.startswith("gelu") else "silu"
    return found


def _layers(raw: Raw) -> int:
    return integer(raw, "num_hidden_layers")


def _by_type(raw: Raw, window: int | None) -> Windows | None:
    kinds = raw.get("layer_types")
    return None if kinds is None else tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _every(raw: Raw, period: int) -> Windows:
    """Every `period`-th layer sees everything, the others a window."""
    window = raw.get("sliding_window")
    return tuple(None if (index + 1) % period == 0 else window for index in range(_layers(raw)))


def _qwen_windows(raw: Raw) -> Windows:
    window, layers = raw.get("sliding_window"), _layers(raw)
    if window is None or not (raw.get("use_sliding_window", False) or raw.get("layer_types")):
        return (None,) * layers
    full = integer(raw, "max_window_layers", layers)
    return _by_type(raw, window) or tuple(None if index < full else window for index in range(layers))
