"""What families with LayerNorms share (`models.layer_norm`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.engine.models.families.family import ConfigFields, HFConfig, number

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

LAYER_NORM_EPSILON = "attention.layer_norm_epsilon"
"""In GGUF files."""


def centred_architecture() -> Architecture:
    from penstock.engine.models.layer_norm import CENTRED

    return CENTRED


def layer_normed(raw: HFConfig, epsilon: str = "layer_norm_eps") -> ConfigFields:
    """LayerNorms with weights and biases; `epsilon` is the key of theirs."""
    return {"rms_eps": number(raw, epsilon), "layer_norms": True, "norm_bias": True}
