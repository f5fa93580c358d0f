"""Gemma: GELU, scaled embeddings, norm weights stored minus one, a tied head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    GELU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    integer,
    llama_fields,
)

TANH = "gelu_pytorch_tanh"


def gemma_fields(raw: HFConfig) -> ConfigFields:
    return {
        **llama_fields(raw),
        "embedding_scale": math.sqrt(integer(raw, "hidden_size")),
    }


def gemma_from_gguf(keys: GGUFKeys, config: HFConfig, *, width_scaled_layers: int = 0) -> Mapping[str, Any]:
    """`width_scaled_layers`: the number of layers of the one model that scales attention by its width per head instead
    of the size of a head (27B, from Gemma 2 on); the file does not say so."""
    per_head = config["hidden_size"] // config["num_attention_heads"]
    by_width = config["num_hidden_layers"] == width_scaled_layers
    return {
        "hidden_act": TANH,
        "hidden_activation": TANH,
        "query_pre_attn_scalar": per_head if by_width else config["head_dim"],
    }


GEMMA = Family(
    model_type="gemma",
    class_name="GemmaForCausalLM",
    fields=gemma_fields,
    reads=frozenset({"attention_bias"}),
    limits={
        "hidden_act": (*GELU, "gelu"),  # early files say "gelu" and mean the tanh form
        "hidden_activation": (*GELU, "gelu", None),  # decided in earlier releases of the reference
    },
    hidden_act=TANH,
    norm_offset=1.0,
    gguf=GGUFFormat(architectures=("gemma",), config=gemma_from_gguf, windowed=False),
)
