"""Code World Model: Llama 3 with a window in three layers of four."""

from __future__ import annotations

from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    flag,
    layer_count,
    window_of,
    windows_by_type,
)
from penstock.engine.models.rope import read_rope

_PERIOD = 4
_USUAL: HFConfig = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The rope parameters of a file without any."""


def _fields(raw: HFConfig) -> ConfigFields:
    window = window_of(raw)
    spaced = tuple(window if index % _PERIOD else None for index in range(layer_count(raw)))
    given = raw.get("rope_scaling") or (_USUAL if raw.get("rope_parameters") is None else raw["rope_parameters"])
    return {
        "mlp_bias": flag(raw, "mlp_bias"),
        "windows": windows_by_type(raw, window) or spaced,
        "rope": read_rope(raw, given),
    }


CWM = Family(
    model_type="cwm",
    class_name="CwmForCausalLM",
    fields=_fields,
    reads=frozenset({"mlp_bias", "sliding_window"}),
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(architectures=()),
)
