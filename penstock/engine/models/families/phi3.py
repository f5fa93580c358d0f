"""Phi-3 and Phi-4-mini: query, key, value and gate, up stored as one matrix each; longrope; partly rotated heads."""

from __future__ import annotations

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    layer_count,
    window_of,
)
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.rope import read_rope


def _fields(raw: HFConfig) -> ConfigFields:
    rope = read_rope(raw, aliases=_EARLY_NAMES, partial=True)
    return {"windows": (window_of(raw),) * layer_count(raw), "rope": rope}


_EARLY_NAMES = {"su": "longrope", "yarn": "longrope"}
"""What early checkpoints call longrope."""

PHI3 = Family(
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    fields=_fields,
    reads=frozenset({"sliding_window"}),
    names=TensorNames(fused=True),
    gguf=GGUFFormat(architectures=("phi3",), whole_head_rotated=False),
)
