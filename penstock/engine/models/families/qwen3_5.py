"""Qwen3.5: the layers of Qwen3-Next, with the projections of delta nets stored apart; dense, or with experts in all
layers. Of models that also take images, the decoder."""

from __future__ import annotations

from typing import Any

from penstock.engine.models.families.family import (
    AXES,
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    layer_count,
)
from penstock.engine.models.families.qwen3_next import (
    GGUF_EXPERTS,
    GGUF_READS,
    GGUF_TENSORS,
    HYBRID_READS,
    experts_from_gguf,
    hybrid_architecture,
    hybrid_fields,
    hybrid_from_gguf,
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


def _moe_from_gguf(key: GGUFKeys, config: HFConfig) -> dict[str, Any]:
    return hybrid_from_gguf(key, config) | experts_from_gguf(key)


QWEN3_5 = Family(
    model_type="qwen3_5_text",
    class_name="Qwen3_5ForCausalLM",
    fields=_fields,
    reads=HYBRID_READS,
    norm_offset=1.0,
    names=NAMES,
    gguf=GGUFFormat(
        architectures=("qwen35",),
        config=hybrid_from_gguf,
        reads=GGUF_READS | AXES,
        whole_head_rotated=False,
        windowed=False,
        delta_nets="tiled",
        tensors=GGUF_TENSORS,
    ),
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
    gguf=GGUFFormat(
        architectures=("qwen35moe",),
        config=_moe_from_gguf,
        reads=GGUF_READS | GGUF_EXPERTS | AXES,
        whole_head_rotated=False,
        windowed=False,
        delta_nets="tiled",
        tensors=GGUF_TENSORS,
    ),
    architecture=hybrid_architecture,
)
