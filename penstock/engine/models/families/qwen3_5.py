"""Qwen3.5: the layers of Qwen3-Next, with the projections of delta nets stored apart; dense, or with experts in all
layers. Of models that also take images, the decoder."""

from __future__ import annotations

from penstock.engine.models.families.family import ConfigFields, Family, GGUFFormat, HFConfig, layer_count
from penstock.engine.models.families.qwen3_next import (
    HYBRID_READS,
    hybrid_architecture,
    hybrid_fields,
    shared_moe,
)
from penstock.engine.models.families.tensor_names import TensorNames

NAMES = TensorNames(
    recurrent=("in_proj_qkv", "in_proj_z", "out_proj"),
    shared_expert="shared_expert.",
    expert_stacks=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)


def _fields(raw: HFConfig) -> ConfigFields:
    return hybrid_fields(raw, grouped=False)


def _moe_fields(raw: HFConfig) -> ConfigFields:
    return {**_fields(raw), "moe": shared_moe(raw, (True,) * layer_count(raw), normalize=True)}


QWEN3_5 = Family(
    model_type="qwen3_5_text",
    class_name="Qwen3_5ForCausalLM",
    fields=_fields,
    reads=HYBRID_READS,
    norm_offset=1.0,
    names=NAMES,
    gguf=GGUFFormat(architectures=()),
    multimodal_type="qwen3_5",
    architecture=hybrid_architecture,
)

QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    class_name="Qwen3_5MoeForCausalLM",
    fields=_moe_fields,
    reads=HYBRID_READS
    | {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"},
    norm_offset=1.0,
    names=NAMES,
    gguf=GGUFFormat(architectures=()),
    multimodal_type="qwen3_5_moe",
    architecture=hybrid_architecture,
)
