"""Ministral 3: Mistral with yarn, and queries that grow with their position beyond the original length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.attention_config import QueryGrowth
from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    layer_count,
    mapping,
    number,
    window_of,
)
from penstock.engine.models.rope import read_rope
from penstock.errors import CheckpointError

_BETA = "llama_4_scaling_beta"
_USUAL: HFConfig = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    _BETA: 0.1,
}
"""The rope parameters of a file without any."""


def _fields(raw: HFConfig) -> ConfigFields:
    given = mapping(raw, "rope_scaling") or mapping(raw, "rope_parameters") or _USUAL
    rope = read_rope(raw, {key: value for key, value in given.items() if key not in (_BETA, "max_position_embeddings")})
    length = raw.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    if given.get(_BETA) is None or length is None:
        raise CheckpointError(
            f"the rope parameters of ministral3 models must have {_BETA} and original_max_position_embeddings"
        )
    growth = QueryGrowth(float(rope.original_max_positions), number(given, _BETA), offset=0.0, everywhere=True)
    return {"windows": (window_of(raw),) * layer_count(raw), "rope": rope, "query_growth": growth}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    rope = config["rope_scaling"] or {"rope_type": "default"}
    original = keys.whole("rope.scaling.original_context_length", 0) or config["max_position_embeddings"]
    length = keys.whole("attention.temperature_length", 0) or original
    if length != original:
        raise CheckpointError(
            f"{keys.architecture}.attention.temperature_length is {length}; supported: the original length, {original}"
        )
    grown = {_BETA: keys.number("attention.temperature_scale", 0.0), "original_max_position_embeddings": original}
    return {"rope_scaling": {**rope, **grown}}


MINISTRAL3 = Family(
    model_type="ministral3",
    class_name="Ministral3ForCausalLM",
    fields=_fields,
    reads=frozenset({"sliding_window"}),
    gguf=GGUFFormat(
        architectures=("mistral3",),
        applies=lambda keys: keys.number("attention.temperature_scale", 0.0) != 0.0,
        interleaved_rope=True,
        config=_from_gguf,
        reads=frozenset({"attention.temperature_length"}),
    ),
)
