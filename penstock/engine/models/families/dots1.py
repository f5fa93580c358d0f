"""dots.llm1: Qwen3's attention with DeepSeek V3's experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    Windows,
    count,
    integer,
    layer_count,
    llama_fields,
    number,
    window_of,
    windows_by_type,
)
from penstock.engine.models.families.sigmoid_experts import (
    CORRECTED_GGUF,
    CORRECTED_KEYS,
    SHARED_TENSORS,
    corrected_from_gguf,
    corrected_sigmoids,
)


def _windows(raw: HFConfig) -> Windows:
    window, full = window_of(raw), number(raw, "max_window_layers")
    by_index = tuple(None if index < full else window for index in range(layer_count(raw)))
    return windows_by_type(raw, window) or by_index


def _fields(raw: HFConfig) -> ConfigFields:
    dense = count(raw, "first_k_dense_replace")
    moe = corrected_sigmoids(
        raw,
        experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "n_routed_experts"),
        layers=tuple(index >= dense for index in range(layer_count(raw))),
        shared=count(raw, "n_shared_experts"),
    )
    return {**llama_fields(raw), "qk_norm": True, "windows": _windows(raw), "moe": moe}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    return {
        **corrected_from_gguf(keys),
        "n_routed_experts": keys.whole("expert_count", 0),
        "n_shared_experts": keys.whole("expert_shared_count", 0),
    }


DOTS1 = Family(
    model_type="dots1",
    class_name="Dots1ForCausalLM",
    fields=_fields,
    reads=CORRECTED_KEYS
    | {
        "attention_bias", "first_k_dense_replace", "max_window_layers", "n_routed_experts", "n_shared_experts",
        "num_local_experts", "sliding_window",
    },
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(
        architectures=("dots1",),
        config=_from_gguf,
        reads=CORRECTED_GGUF,
        windowed=False,
        tensors={**SHARED_TENSORS, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    ),
)  # fmt: skip
