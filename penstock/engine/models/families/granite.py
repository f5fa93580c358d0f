"""Granite 3: Llama with multipliers of embeddings, attention scores, what layers add, and logits.

The residual stream is kept divided by the residual multiplier m: h + m f(norm(h)) is m times h/m + f(norm(h)), and a
norm does not see the factor but for its epsilon, which becomes eps / m². So layers are Llama's, and nothing is
multiplied while they run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    llama_fields,
    number,
)
from penstock.errors import CheckpointError

MULTIPLIERS = frozenset({"embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"})
GGUF_SCALES = frozenset({"embedding_scale", "residual_scale", "logit_scale"})


def multiplied(raw: HFConfig) -> ConfigFields:
    """The four multipliers."""
    residual, logits = number(raw, "residual_multiplier"), number(raw, "logits_scaling")
    if not 1e-6 < residual < 1e6:
        raise CheckpointError(f"residual_multiplier must be positive, found {residual}")
    if logits == 0:
        raise CheckpointError("logits_scaling is 0, by which logits cannot be divided")
    return {
        "embedding_scale": number(raw, "embedding_multiplier") / residual,
        "virtual_scale": number(raw, "embedding_multiplier") / residual,
        "rms_eps": number(raw, "rms_norm_eps") / residual**2,
        "attention_scale": number(raw, "attention_multiplier"),
        "logit_scale": 1 / logits,
    }


def multipliers_from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    """A scale of 0 says nothing, as in llama.cpp."""
    return {
        "embedding_multiplier": keys.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": keys.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": keys.number("logit_scale", 0.0) or 1.0,
        "attention_multiplier": keys.number("attention.scale", 0.0) or config["head_dim"] ** -0.5,
    }


def _fields(raw: HFConfig) -> ConfigFields:
    return {**llama_fields(raw), **multiplied(raw)}


GRANITE = Family(
    model_type="granite",
    class_name="GraniteForCausalLM",
    fields=_fields,
    reads=MULTIPLIERS | {"attention_bias", "mlp_bias"},
    gguf=GGUFFormat(architectures=("granite",), interleaved_rope=True, config=multipliers_from_gguf, reads=GGUF_SCALES),
)
