"""Bamba: Llama with Mamba-2 layers in place of most attention; half of each head is rotated in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.models.families.family import (
    ConfigFields,
    Family,
    GGUFFormat,
    GGUFKeys,
    HFConfig,
    layer_count,
    llama_fields,
    mapping,
)
from penstock.engine.models.families.mamba import (
    MAMBA_KEYS,
    MAMBA_MATRICES,
    SSM_KEYS,
    hybrid_architecture,
    mamba_config,
    mamba_from_gguf,
    rotated_in_gguf,
)
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.rope import read_rope
from penstock.errors import CheckpointError

_ROTATED = 0.5
"""Part of each head that is rotated, where `rope_parameters` says nothing else."""
NAMES = TensorNames(
    final_norm="final_layernorm",
    feed_forward_norm="pre_ff_layernorm",
    mlp="feed_forward.",
    recurrent=MAMBA_MATRICES,
)


def _fields(raw: HFConfig) -> ConfigFields:
    rope = mapping(raw, "rope_scaling") or mapping(raw, "rope_parameters")
    part = rope.get("partial_rotary_factor", _ROTATED)
    fields: ConfigFields = {
        **llama_fields(raw),
        "rope": read_rope({**raw, "partial_rotary_factor": part}, rope, partial=True),
    }
    recurrent = _recurrent_layers(raw)
    if any(recurrent):
        fields["mamba"] = mamba_config(raw, recurrent)
    return fields


def _recurrent_layers(raw: HFConfig) -> tuple[bool, ...]:
    attended = raw["attn_layer_indices"] or ()
    if not isinstance(attended, list | tuple):
        raise CheckpointError(f"config key 'attn_layer_indices' must be a list, found {attended!r:.80}")
    return tuple(index not in attended for index in range(layer_count(raw)))


def _from_gguf(keys: GGUFKeys, config: HFConfig) -> Mapping[str, Any]:
    """Layers without KV heads are Mamba's."""
    kv_heads = keys.each("attention.head_count_kv", config["num_hidden_layers"])
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"], **(config["rope_scaling"] or {})}
    return {
        **mamba_from_gguf(keys, config),
        "attn_layer_indices": [index for index, heads in enumerate(kv_heads) if heads],
        "rope_parameters": {**rope, "partial_rotary_factor": config.get("partial_rotary_factor", 1.0)},
        "rope_scaling": None,
    }


def _is_bamba(keys: GGUFKeys) -> bool:
    """Granite 4 shares the architecture: its hybrid models rotate nothing, and have multipliers or experts."""
    others = any(keys(name) for name in ("embedding_scale", "residual_scale", "logit_scale", "expert_count"))
    return rotated_in_gguf(keys) and not others


BAMBA = Family(
    model_type="bamba",
    class_name="BambaForCausalLM",
    fields=_fields,
    reads=MAMBA_KEYS | {"attention_bias", "mlp_bias", "attn_layer_indices", "num_logits_to_keep", "z_loss_coefficient"},
    names=NAMES,
    gguf=GGUFFormat(
        architectures=("granitehybrid",),
        applies=_is_bamba,
        interleaved_rope=True,
        whole_head_rotated=False,
        mamba=True,
        config=_from_gguf,
        reads=SSM_KEYS,
    ),
    architecture=hybrid_architecture,
)
