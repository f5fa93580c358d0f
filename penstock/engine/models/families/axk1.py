"""A.X K1: DeepSeek V3 with a norm behind experts."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.models.families.deepseek import (
    LATENT_KEYS,
    LATENT_NAMES,
    latent_architecture,
    latent_fields,
    optional_flag,
)
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
from penstock.engine.models.families.sigmoid_experts import CORRECTED_KEYS, corrected_sigmoids, sparse_by_type
from penstock.errors import CheckpointError


def _sparse(raw: HFConfig) -> tuple[bool, ...]:
    """Older files say how many layers are dense, and every how many have experts."""
    if raw.get("mlp_layer_types") is not None:
        return sparse_by_type(raw, 0)
    dense = count(raw, "first_k_dense_replace") if "first_k_dense_replace" in raw else 1
    every = integer(raw, "moe_layer_freq", 1)
    return tuple(index >= dense and index % every == 0 for index in range(layer_count(raw)))


def _fields(raw: HFConfig) -> ConfigFields:
    if raw.get("q_lora_rank") is None:
        raise CheckpointError("q_lora_rank of axk1 models must be given")
    moe = corrected_sigmoids(
        raw,
        experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "n_routed_experts"),
        layers=_sparse(raw),
        shared=count(raw, "n_shared_experts"),
    )
    return {**latent_fields(raw, interleaved=optional_flag(raw, "rope_interleave")), "moe": moe}


AXK1 = Family(
    model_type="axk1",
    class_name="AXK1ForCausalLM",
    fields=_fields,
    reads=LATENT_KEYS
    | CORRECTED_KEYS
    | {
        "first_k_dense_replace", "mlp_layer_types", "moe_layer_freq", "n_routed_experts", "n_shared_experts",
        "num_local_experts", "rope_interleave",
    },
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(architectures=()),
    names=replace(LATENT_NAMES, feed_forward_out_norm="post_mlp_layernorm"),
    architecture=latent_architecture,
)  # fmt: skip
