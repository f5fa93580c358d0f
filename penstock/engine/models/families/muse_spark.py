"""Muse Spark, the decoder of models that also take images and sound: Muse Glimmer with gates of the residual stream, a
norm of what each head gives, and experts by corrected sigmoids between two narrower projections, each with a norm
behind it."""

from __future__ import annotations

from penstock.engine.models.families.family import SILU, ConfigFields, Family, GGUFFormat, HFConfig, integer, number
from penstock.engine.models.families.muse_glimmer import MUSE_KEYS, muse_fields, muse_layers
from penstock.engine.models.families.sigmoid_experts import sparse_by_type
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.moe_config import MoeConfig
from penstock.errors import CheckpointError

_SMALL_TOTAL = 1e-15
_ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
"""Of files without rope parameters."""


def _fields(raw: HFConfig) -> ConfigFields:
    sparse, temperature = sparse_by_type(raw, 0), number(raw, "residual_gate_temperature")
    if not temperature:
        raise CheckpointError("residual_gate_temperature is 0; gates are divided by it")
    moe = MoeConfig(
        experts=integer(raw, "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        ffn_size=integer(raw, "moe_intermediate_size"),
        normalize=True,
        layers=sparse,
        scoring="sigmoid",
        correction_bias=True,
        scale=number(raw, "routed_scaling_factor"),
        total_eps=_SMALL_TOTAL,
        logit_scale=number(raw, "output_multiplier"),
        wide_router=True,
        latent=integer(raw, "moe_hidden_size"),
    )
    rope = raw.get("rope_parameters")
    return {
        **muse_fields({**raw, "rope_parameters": _ROPE if rope is None else rope}),
        "normed_outputs": True,
        "residual_temperature": temperature,
        "moe": moe if any(sparse) else None,
        "tied_embeddings": False,  # the reference has a head of its own, whatever tie_word_embeddings says
    }


MUSE_SPARK = Family(
    model_type="muse_spark_text",
    class_name="MuseSparkTextModel",
    fields=_fields,
    reads=MUSE_KEYS | {
        "mlp_layer_types", "moe_hidden_size", "moe_intermediate_size", "num_experts_per_tok", "num_local_experts",
        "residual_gate_temperature", "routed_scaling_factor",
    },
    limits={"hidden_act": SILU},
    norm_offset=1.0,
    final_norm_offset=0.0,
    names=TensorNames(
        feed_forward_norm="pre_feedforward_layernorm",
        output_gate="gate_proj",
        expert_stacks=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        expert_latents=("pre_expert_proj", "post_expert_proj"),
        expert_norms=("pre_expert_norm", "experts.post_expert_norm"),
    ),
    gguf=GGUFFormat(architectures=()),
    architecture=muse_layers,
)  # fmt: skip
