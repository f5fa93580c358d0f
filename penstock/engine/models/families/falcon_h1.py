"""Falcon-H1: attention and Mamba-2 side by side in every layer, and factors of nearly everything that is projected.

Factors that commute with what is behind them become part of it: those of keys and of what attention reads part of its
scale, those of what Mamba layers read and project part of their convolutions, gates and time steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.engine.models.families.bamba import NAMES
from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    flag,
    integer,
    layer_count,
    llama_fields,
    number,
)
from penstock.engine.models.families.mamba import (
    MAMBA_KEYS,
    SSM_KEYS,
    hybrid_architecture,
    mamba_config,
    mamba_from_gguf,
)
from penstock.engine.models.recurrence_config import BesideAttention
from penstock.errors import CheckpointError

_MULTIPLIERS = frozenset({
    "embedding_multiplier", "lm_head_multiplier", "mlp_multipliers", "key_multiplier", "attention_in_multiplier",
    "attention_out_multiplier", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier",
})  # fmt: skip


def _numbers(raw: HFConfig, key: str, count: int) -> tuple[float, ...]:
    given = raw[key]
    if given is None:
        return (1.0,) * count
    if not isinstance(given, list | tuple) or len(given) != count:
        raise CheckpointError(f"config key {key!r} must be a list of {count} numbers, found {given!r:.80}")
    return tuple(number({key: each}, key) for each in given)


def _fields(raw: HFConfig) -> ConfigFields:
    fields = llama_fields(raw)
    heads, hidden = integer(raw, "num_attention_heads"), integer(raw, "hidden_size")
    scale = integer(raw, "head_dim", hidden // heads) ** -0.5 * number(raw, "key_multiplier")
    scales = BesideAttention(
        number(raw, "attention_in_multiplier"),
        number(raw, "attention_out_multiplier"),
        number(raw, "ssm_in_multiplier"),
        number(raw, "ssm_out_multiplier"),
    )
    if not fields["qkv_bias"]:
        scale *= scales.attention_in**2
        scales = replace(scales, attention_in=1.0, attention_out=scales.attention_out * scales.attention_in)
    width = raw["mamba_d_ssm"]
    mamba = mamba_config(raw, (True,) * layer_count(raw), None if width is None else integer(raw, "mamba_d_ssm"))
    gate, x, b, c, dt = _numbers(raw, "ssm_multipliers", 5)
    if not mamba.in_bias:
        within, scales = scales.mamba_in, replace(scales, mamba_in=1.0)
        gate, x, b, c, dt = (within * each for each in (gate, x, b, c, dt))
    gate_factor, factor = _numbers(raw, "mlp_multipliers", 2)
    return {
        **fields,
        "attention_scale": scale,
        "embedding_scale": number(raw, "embedding_multiplier"),
        "virtual_scale": None,
        "logit_scale": number(raw, "lm_head_multiplier"),
        "mlp_scales": (gate_factor, factor),
        "mamba": replace(
            mamba,
            out_bias=flag(raw, "projectors_bias"),
            norm_groups=mamba.groups if flag(raw, "mamba_rms_norm") else 0,
            gate_first=not flag(raw, "mamba_norm_before_gate"),
            scales=(gate, x, b, c, dt),
            beside=scales,
        ),
    }


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    """All factors are part of the matrices; norms come behind gates, as in all published models."""
    sizes = mamba_from_gguf(keys, {**config, "hidden_size": 1})
    return {
        **{name: size for name, size in sizes.items() if name != "mamba_expand"},
        "mamba_d_ssm": keys.whole("ssm.inner_size", 0),
        "mamba_norm_before_gate": False,
        **dict.fromkeys(_MULTIPLIERS, 1.0),
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
    }


FALCON_H1 = Family(
    model_type="falcon_h1",
    class_name="FalconH1ForCausalLM",
    fields=_fields,
    reads=MAMBA_KEYS
    | _MULTIPLIERS
    | {
        "attention_bias", "mlp_bias", "projectors_bias", "mamba_d_ssm", "mamba_norm_before_gate", "mamba_rms_norm",
        "num_logits_to_keep",
    },
    names=NAMES,
    gguf=GGUFFormat(architectures=("falcon-h1",), mamba=True, config=_from_gguf, reads=SSM_KEYS),
    architecture=hybrid_architecture,
)  # fmt: skip
