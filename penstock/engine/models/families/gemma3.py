"""Gemma 3: Gemma 2 without caps, with head norms, and a window and rotary base of their own in five layers of six. Of
models that also take images, the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import ConfigFields, Family, GGUFFormat, GGUFKeys, HFConfig
from penstock.engine.models.families.gemma import GELU, gemma_from_gguf
from penstock.engine.models.families.gemma2 import SANDWICH_NORMS, gemma2_fields, layer_types
from penstock.engine.models.rope import read_rope
from penstock.errors import CheckpointError

_PERIOD = 6


def _fields(raw: HFConfig) -> ConfigFields:
    if raw.get("use_bidirectional_attention"):
        raise CheckpointError("this Gemma 3 is an encoder (use_bidirectional_attention); only decoders can be run")
    ropes = raw.get("rope_parameters") or {}
    if "full_attention" not in ropes:  # files written before there was one entry for each kind of layer
        theta = raw.get("rope_theta", 1_000_000.0)
        ropes = {"full_attention": {"rope_theta": theta, **(raw.get("rope_scaling") or {})}}
    local = ropes.get("sliding_attention") or {"rope_theta": raw.get("rope_local_base_freq", 10_000.0)}
    return {
        **gemma2_fields({"attn_logit_softcapping": None, "final_logit_softcapping": None, **raw}, _PERIOD),
        "qk_norm": True,
        "rope": read_rope(raw, ropes["full_attention"]),
        "local_rope": read_rope(raw, local),
    }


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    return {
        **gemma_from_gguf(keys, config, width_scaled_layers=62),
        **layer_types(keys, config, _PERIOD),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
    }


GEMMA3 = Family(
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    fields=_fields,
    hidden_act=GELU,
    norm_offset=1.0,
    names=SANDWICH_NORMS,
    gguf=GGUFFormat(
        architectures=("gemma3",),
        config=_from_gguf,
        reads=frozenset({"final_logit_softcapping", "attention.sliding_window_pattern"}),
    ),
    multimodal_type="gemma3",
)
