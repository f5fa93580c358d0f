"""HRM-Text: two stacks of Llama's layers, with gates on what attention gives and norms without weights, that run in
turn."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.engine.models.families.family import (
    MOST_LAYERS,
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    integer,
    number,
)
from penstock.engine.models.families.tensor_names import TensorNames
from penstock.engine.models.model_config import CyclesConfig
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

_KEYS = frozenset({
    "H_cycles", "L_cycles", "L_bp_cycles", "embedding_scale", "initializer_range", "num_layers_per_stack", "prefix_lm",
})  # fmt: skip
"""`L_bp_cycles` is for training. What `prefix_lm` says of types of tokens changes nothing: no request has any."""
_PUBLISHED = re.compile(r"\.attn\.((?:gqkv|o)_proj)\.")


def _architecture() -> Architecture:
    from penstock.engine.models.hrm_text import HRM_TEXT_LIKE

    return HRM_TEXT_LIKE


def _own_name(name: str) -> str:
    return _PUBLISHED.sub(r".self_attn.\1.", name)


def _fields(raw: HFConfig) -> ConfigFields:
    # A file that was written by the reference counts every run of a layer in `num_hidden_layers`.
    own = "num_hidden_layers" if raw.get("num_layers_per_stack") is None else "num_layers_per_stack"
    cycles = CyclesConfig(integer(raw, own), integer(raw, "H_cycles"), integer(raw, "L_cycles"))
    if cycles.total > MOST_LAYERS:
        raise CheckpointError(f"{cycles.total} runs of layers for each token; at most {MOST_LAYERS} are supported")
    if raw.get("embedding_scale") is not None:
        scale = number(raw, "embedding_scale")
    elif number(raw, "initializer_range"):
        scale = 1.0 / number(raw, "initializer_range")
    else:
        raise CheckpointError("initializer_range is 0, which embeddings are divided by; set embedding_scale")
    return {
        "cycles": cycles,
        "embedding_scale": scale,
        "num_kv_heads": integer(raw, "num_attention_heads"),
        "num_layers": cycles.total,
        "output_gate": True,
        "virtual_scale": scale,
    }


HRM_TEXT = Family(
    model_type="hrm_text",
    class_name="HrmTextForCausalLM",
    fields=_fields,
    reads=_KEYS,
    limits={"hidden_act": SILU},
    gguf=GGUFFormat(architectures=()),
    names=TensorNames(mixer_norm="", feed_forward_norm="", output_gate="gate_proj", final_norm=""),
    own_name=_own_name,
    architecture=_architecture,
)
