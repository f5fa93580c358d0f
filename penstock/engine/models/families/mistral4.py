"""Mistral Small 4: DeepSeek V3's attention with queries that grow with their position, and experts scored by softmax,
from the best groups, beside one that all tokens visit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.engine.models.attention_config import QueryGrowth
from penstock.engine.models.families.deepseek import (
    LATENT_KEYS,
    LATENT_NAMES,
    latent_architecture,
    latent_fields,
    optional_flag,
    routed_experts,
)
from penstock.engine.models.families.deepseek_gguf import (
    LATENT_GGUF,
    LATENT_TENSORS,
    groups_from_gguf,
    latent_from_gguf,
    normalizes,
)
from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    integer,
    mapping,
    number,
)
from penstock.errors import CheckpointError

_BETA, _LENGTH, _PART = "llama_4_scaling_beta", "original_max_position_embeddings", "partial_rotary_factor"
_USUAL: HFConfig = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    _LENGTH: 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    _BETA: 0.1,
}
"""The rope parameters of a file without any."""
_KEYS = LATENT_KEYS - {"num_nextn_predict_layers", "num_mtp_layers"} | {
    "first_k_dense_replace", "n_group", "topk_group", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "moe_intermediate_size", "moe_layer_freq", "norm_topk_prob", "routed_scaling_factor", "num_local_experts",
    "rope_interleave",
}  # fmt: skip


def _fields(raw: HFConfig) -> ConfigFields:
    size = integer(raw, "qk_nope_head_dim") + integer(raw, "qk_rope_head_dim")
    if raw.get("head_dim") not in (None, size):
        raise CheckpointError(f"head_dim is {raw['head_dim']!r:.80}; it must be {size}, or left out")
    given = mapping(raw, "rope_scaling") or mapping(raw, "rope_parameters") or _USUAL
    rope = _rope(given, size, integer(raw, "qk_rope_head_dim"))
    others = {key: value for key, value in raw.items() if key not in ("rope_scaling", "rope_parameters", _PART)}
    fields = latent_fields(
        {**others, "rope_parameters": rope, "head_dim": None}, interleaved=optional_flag(raw, "rope_interleave")
    )
    moe = routed_experts(
        raw,
        "num_local_experts",
        normalize=optional_flag(raw, "norm_topk_prob"),
        groups=integer(raw, "n_group"),
        top_groups=integer(raw, "topk_group"),
        group_score="best_two",
    )
    if moe is not None and moe.top_k > moe.top_groups * (moe.experts // moe.groups):
        raise CheckpointError(f"num_experts_per_tok is {moe.top_k}: the chosen groups have fewer experts")
    length = float(fields["rope"].original_max_positions)
    growth = QueryGrowth(length, number(given, _BETA), offset=0.0, everywhere=True)
    return {**fields, "moe": moe, "query_growth": growth}


def _rope(given: HFConfig, size: int, rotary: int) -> dict[str, Any]:
    """Of the rotated part of a head alone: the reference gives the part's share of a whole head."""
    if given.get(_BETA) is None or given.get(_LENGTH) is None:
        raise CheckpointError(f"the rope parameters of mistral4 models must have {_BETA} and {_LENGTH}")
    if given.get("rope_type", given.get("type", "default")) == "default":
        raise CheckpointError("the rope parameters of mistral4 models must have a rope_type other than default")
    part = given.get(_PART)
    if part is not None and int(size * number(given, _PART)) != rotary:
        raise CheckpointError(f"{_PART} is {part!r:.80}; of heads of {size} it must be the {rotary} that are rotated")
    left_out = (_BETA, _PART, "max_position_embeddings")
    return {key: value for key, value in given.items() if key not in left_out}


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> dict[str, Any]:
    """Few files say how queries grow; the model's makers let them grow as much as they usually do."""
    if keys.whole("expert_gating_func", 0) not in (0, 1):
        raise CheckpointError(f"{keys.architecture}.expert_gating_func is {keys('expert_gating_func')}; supported: 1")
    original = keys.whole("rope.scaling.original_context_length", 0) or config["max_position_embeddings"]
    if keys.whole("attention.temperature_length", 0) not in (0, original):
        raise CheckpointError(
            f"{keys.architecture}.attention.temperature_length is {keys('attention.temperature_length')}; supported: "
            f"the original length, {original}"
        )
    beta = keys.number("attention.temperature_scale", _USUAL[_BETA])
    found = {**latent_from_gguf(keys, config), **groups_from_gguf(keys)}
    return {
        **found,
        "head_dim": found["qk_nope_head_dim"] + found["qk_rope_head_dim"],
        "norm_topk_prob": normalizes(keys),
        "rope_interleave": True,
        "rope_scaling": {**(config["rope_scaling"] or {}), "rope_theta": config["rope_theta"], _BETA: beta},
    }


MISTRAL4 = Family(
    model_type="mistral4",
    class_name="Mistral4ForCausalLM",
    fields=_fields,
    reads=_KEYS,
    limits={"hidden_act": SILU},
    names=replace(LATENT_NAMES, expert_stacks=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
    gguf=GGUFFormat(
        architectures=("mistral4",),
        config=_from_gguf,
        reads=LATENT_GGUF | {"attention.temperature_length"},
        windowed=False,
        own_head_sizes=True,
        tensors=LATENT_TENSORS,
    ),
    architecture=latent_architecture,
)
