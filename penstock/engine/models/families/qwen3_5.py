"""Qwen3.5: the layers of Qwen3-Next, with the projections of delta nets stored apart and a dense feed-forward. Of models
that also take images, the decoder."""

from __future__ import annotations

from penstock.engine.models.families.family import ConfigFields, Family, GGUFFormat, HFConfig
from penstock.engine.models.families.qwen3_next import HYBRID_READS, hybrid_architecture, hybrid_fields
from penstock.engine.models.families.tensor_names import TensorNames

NAMES = TensorNames(recurrent=("in_proj_qkv", "in_proj_z", "out_proj"))


def _fields(raw: HFConfig) -> ConfigFields:
    return hybrid_fields(raw, grouped=False)


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
