"""Muse Glimmer, the decoder of models that also take images: Gemma 2's four norms, a gate on the output of attention,
heads of queries and keys normalized without weights, windows with rotary embedding and neither in the other layers, a
normalized embedding, scaled and capped logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.engine.models.families.family import (
    SILU,
    ConfigFields,
    Family,
    GGUFFormat,
    HFConfig,
    flag,
    integer,
    layer_count,
    number,
    window_of,
    windows_by_type,
)
from penstock.engine.models.families.gemma2 import SANDWICH_NORMS, cap
from penstock.engine.models.rope import read_rope
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.engine.models.architecture import Architecture

_PERIOD = 4
MUSE_KEYS = frozenset({
    "attention_bias", "final_logit_softcapping", "layer_rope_theta", "output_multiplier", "post_norm_eps",
    "qk_scale_factor", "sliding_window",
})  # fmt: skip


def muse_fields(raw: HFConfig) -> ConfigFields:
    bias, rope, layers, window = flag(raw, "attention_bias"), read_rope(raw), layer_count(raw), window_of(raw)
    heads, hidden = integer(raw, "num_attention_heads"), integer(raw, "hidden_size")
    if hidden % heads:
        raise CheckpointError(f"hidden_size is {hidden}, which is no multiple of {heads} heads, as the model demands")
    # Counted from the last layer, which sees everything.
    everything = tuple((layers - 1 - index) % _PERIOD == 0 for index in range(layers))
    windows = windows_by_type(raw, window) or tuple(None if whole else window for whole in everything)
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "plain_qk_norm": True,
        "attention_scale": integer(raw, "head_dim", hidden // heads) ** -0.5 * number(raw, "qk_scale_factor"),
        "output_gate": True,
        "windows": windows,
        "rope": rope,
        "unrotated": _unrotated(raw, everything, rope.theta),
        "normed_embedding": True,
        "out_norm_eps": number(raw, "post_norm_eps"),
        "logit_scale": number(raw, "output_multiplier"),
        "logit_softcap": cap(raw, "final_logit_softcapping"),
    }


def _unrotated(raw: HFConfig, everything: tuple[bool, ...], theta: float) -> tuple[bool, ...]:
    """Of a base for each layer the reference reads whether it is 0: all others are that of the rope parameters."""
    bases = raw.get("layer_rope_theta")
    if bases is None:
        return everything
    if not isinstance(bases, list | tuple) or len(bases) != len(everything) or {*bases} - {0, theta}:
        raise CheckpointError(
            f"layer_rope_theta must be 0 or rope_theta, {theta:g}, for each of {len(everything)} layers, "
            f"found {bases!r:.80}"
        )
    return tuple(base == 0 for base in bases)


def muse_layers() -> Architecture:
    from penstock.engine.models.muse import MUSE_LIKE

    return MUSE_LIKE


MUSE_GLIMMER = Family(
    model_type="muse_glimmer_text",
    class_name="MuseGlimmerTextModel",
    fields=muse_fields,
    reads=MUSE_KEYS,
    limits={"hidden_activation": SILU},
    norm_offset=1.0,
    final_norm_offset=0.0,
    names=replace(SANDWICH_NORMS, output_gate="gate_proj"),
    gguf=GGUFFormat(architectures=()),
    architecture=muse_layers,
)
