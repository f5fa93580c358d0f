"""A.X K2: DeepSeek V3.2's decoder with gates: of what attention gives, made where its queries are, and of what layers
read, behind the norms before attention and before experts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.engine.models.families.deepseek_sparse import SPARSE_KEYS, SPARSE_NAMES, sparse_fields
from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    count,
    integer,
    layer_count,
)
from penstock.engine.models.families.sigmoid_experts import sparse_by_type
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

_LATER = (
    (r"\.self_attn\.q_gate_proj\.", ".self_attn.q_b_proj."),
    (r"(_layernorm)\.mlp\.fc1\.", r"\1.W_down."),
    (r"(_layernorm)\.mlp\.fc2\.", r"\1.W_up."),
)
"""What transformers calls tensors in memory, and what they are called in files."""


def _architecture() -> Architecture:
    from penstock.engine.models.axk2 import AXK2_LIKE

    return AXK2_LIKE


def _own_name(name: str) -> str:
    for pattern, target in _LATER:
        name = re.sub(pattern, target, name)
    return name


def _sparse(raw: HFConfig) -> tuple[bool, ...]:
    """Older files say how many layers are dense, and every how many have experts."""
    if raw.get("mlp_layer_types") is not None:
        return sparse_by_type(raw, 0)
    dense = count(raw, "first_k_dense_replace") if "first_k_dense_replace" in raw else 1
    every = integer(raw, "moe_layer_freq", 1)
    return tuple(index >= dense and index % every == 0 for index in range(layer_count(raw)))


def _fields(raw: HFConfig) -> ConfigFields:
    grouped = raw.get("n_group") is not None
    if grouped != (raw.get("topk_group") is not None):
        raise CheckpointError("n_group and topk_group must be set together, or neither of them")
    groups = {} if grouped else {"n_group": 1, "topk_group": 1}
    fields = sparse_fields({**raw, **groups}, False, (True,) * layer_count(raw), _sparse(raw))
    moe = fields["moe"]
    if grouped and moe is not None:
        moe = replace(moe, outside=0.0)
    latent = replace(fields["latent"], gated_queries=True, gate_rank=integer(raw, "gated_norm_rank"))
    return {**fields, "latent": latent, "moe": moe}


AXK2 = Family(
    model_type="axk2",
    class_name="AXK2ForCausalLM",
    fields=_fields,
    reads=SPARSE_KEYS | {"gated_norm_rank", "moe_layer_freq"},
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(architectures=()),
    names=replace(SPARSE_NAMES, expert_stacks=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
    own_name=_own_name,
    architecture=_architecture,
)
