"""SmolLM3: Llama without RoPE in every fourth layer."""

from __future__ import annotations

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    flag,
    integer,
    layer_count,
    llama_fields,
    window_of,
    windows_by_type,
)
from penstock.errors import CheckpointError


def _unrotated(raw: HFConfig) -> tuple[bool, ...]:
    layers, given = layer_count(raw), raw["no_rope_layers"]
    if given is None:
        every = integer(raw, "no_rope_layer_interval")
        return tuple((index + 1) % every == 0 for index in range(layers))
    if not isinstance(given, list | tuple) or len(given) < layers or not all(isinstance(one, int) for one in given):
        raise CheckpointError(f"config key 'no_rope_layers' must have 1 or 0 for each layer, found {given!r:.80}")
    return tuple(not one for one in given[:layers])


def _fields(raw: HFConfig) -> ConfigFields:
    window = window_of(raw) if flag(raw, "use_sliding_window") else None
    unrotated = _unrotated(raw)
    windows = windows_by_type(raw, window) or tuple(window if plain else None for plain in unrotated)
    return {**llama_fields(raw), "unrotated": unrotated, "windows": windows}


SMOLLM3 = Family(
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    fields=_fields,
    reads=frozenset({
        "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "no_rope_layers",
        "no_rope_layer_interval",
    }),
    gguf=GGUFFormat(architectures=("smollm3",), interleaved_rope=True, windowed=False),
)  # fmt: skip
