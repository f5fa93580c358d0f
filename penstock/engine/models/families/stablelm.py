"""StableLM 3B and StableLM 2: Llama with LayerNorms and partly rotated heads; the 12B with attention and feed-forward
side by side, and a LayerNorm for every head of queries and keys."""

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
    flag,
    integer,
)
from penstock.engine.models.families.layer_normed import LAYER_NORM_EPSILON, centred_architecture, layer_normed
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.rope import read_rope
from penstock.errors import CheckpointError

_ROTATED = 0.25
"""Share of a head that is rotated where a file does not say."""


def _fields(raw: HFConfig) -> ConfigFields:
    heads, hidden = integer(raw, "num_attention_heads"), integer(raw, "hidden_size")
    if hidden % heads or raw.get("head_dim") not in (None, hidden // heads):
        raise CheckpointError(f"{heads} heads of stablelm models must make up hidden_size {hidden}")
    normed = flag(raw, "qk_layernorm")
    return {
        **layer_normed(raw),
        "qk_norm": normed,
        "qk_layer_norm": normed,
        "head_dim": hidden // heads,
        "parallel": flag(raw, "use_parallel_residual"),
        "qkv_bias": flag(raw, "use_qkv_bias"),
        "rope": read_rope({"partial_rotary_factor": _ROTATED, **raw}, partial=True),
    }


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    """Converters write `use_parallel_residual` also where it is not so; as in llama.cpp the second norm decides."""
    return {
        "layer_norm_eps": config["rms_norm_eps"],
        "use_qkv_bias": config["attention_bias"] or config["fused_bias"],
        "attention_bias": False,  # which such files call otherwise
        "use_parallel_residual": not config["feed_forward_norm"],
        "qk_layernorm": config["use_qk_norm"],
    }


STABLELM = Family(
    model_type="stablelm",
    class_name="StableLmForCausalLM",
    fields=_fields,
    reads=frozenset({"layer_norm_eps", "qk_layernorm", "use_parallel_residual", "use_qkv_bias"}),
    limits={"hidden_act": SILU},
    names=TensorNames(head_norms=("q_layernorm", "k_layernorm")),
    gguf=GGUFFormat(
        architectures=("stablelm",),
        epsilon=LAYER_NORM_EPSILON,
        whole_head_rotated=False,
        windowed=False,
        config=_from_gguf,
        reads=frozenset({"use_parallel_residual"}),
    ),
    architecture=centred_architecture,
)
