"""Hunyuan 4: GLM-5's attention to chosen tokens, with a gate and sinks, among residual streams that are not mixed with
each other; experts whose activation is bounded."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.engine.models.families.deepseek_sparse import SPARSE_KEYS, SPARSE_NAMES, own_indexers, sparse_fields
from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    integer,
    layer_count,
    number,
)
from penstock.engine.models.families.sigmoid_experts import sparse_by_type
from penstock.engine.models.model_config import StreamsConfig
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

_PUBLISHED = (
    (r"\.hc_pre\.hc_", ".hc_"),
    (r"\.learnable_sink_param", ".sinks"),
    (r"\.linear_gate", ".gate_proj"),
    (r"\.hc_attn_layer\.hc_", ".attn_hc."),
    (r"\.hc_mlp_layer\.hc_", ".ffn_hc."),
    (r"\.hc_head_(fn|base|scale)", r".hc_\1"),
)
_SHARED_EVERY = 4


def _architecture() -> Architecture:
    from penstock.engine.models.hy_v4 import HY_V4_LIKE

    return HY_V4_LIKE


def _own_name(name: str) -> str:
    for pattern, target in _PUBLISHED:
        name = re.sub(pattern, target, name)
    return name


def _fields(raw: HFConfig) -> ConfigFields:
    layers = layer_count(raw)
    own = tuple(index == 0 or (index - 1) % _SHARED_EVERY == 0 for index in range(layers))
    if raw.get("indexer_types") is not None:
        own = own_indexers(raw)
    integer(raw, "n_shared_experts")  # with none, tokens were not the reference's
    # Every head has its own keys and values, whatever the key says.
    heads = {"num_key_value_heads": integer(raw, "num_attention_heads")}
    fields = sparse_fields({**raw, **heads}, False, own, sparse_by_type(raw, 1))
    latent, moe, bound = fields["latent"], fields["moe"], number(raw, "swiglu_limit")
    if moe is not None and bound <= 0:
        # Gates beyond the bound are cut down to it, and so would all of them be.
        raise CheckpointError(f"swiglu_limit is {bound}; it must be positive")
    index = latent.index
    assert index is not None
    index = replace(index, rotates_last=True, norm_eps=number(raw, "rms_norm_eps"))
    return {
        **fields,
        "attention_sinks": True,
        "latent": replace(latent, index=index, interleaved=False),
        "moe": None if moe is None else replace(moe, clamp=bound),
        "output_gate": True,
        "streams": StreamsConfig(
            integer(raw, "hc_mult"), eps=number(raw, "hc_eps"), magnitude=number(raw, "hc_magnitude"), eps_added=True
        ),
    }


HY_V4 = Family(
    model_type="hy_v4",
    class_name="HYV4ForCausalLM",
    fields=_fields,
    reads=SPARSE_KEYS | {"indexer_types", "hc_mult", "hc_eps", "hc_magnitude", "swiglu_limit", "learnable_sink_init"},
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(architectures=()),
    names=replace(
        SPARSE_NAMES,
        output_gate="gate_proj",
        expert_stacks=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    own_name=_own_name,
    architecture=_architecture,
)
