"""Decoders of multimodal models that the reference reads with configuration classes of their own, though they compute
what a family here does: their keys become those of the family.

Positions of M-RoPE (`mrope_section`, interleaved or not) have an axis for time, height and width. Tokens of text have
the same position on all of them, so sections of a head's frequencies rotate as one: plain RoPE, which is what is run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.models.families.config_keys import decoder_rules, reference_of, with_defaults
from penstock.engine.models.families.family import Family, HFConfig, integer, layer_count
from penstock.engine.models.rope import rope_parameters
from penstock.errors import CheckpointError

Keys = dict[str, Any]


def _same(keys: Keys) -> Keys:
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class TextType:
    """One `model_type` of a decoder."""

    model_type: str
    family: str
    reads: frozenset[str] = frozenset()
    """Keys that `translate` uses, beyond the family's."""
    limits: Mapping[str, Collection[Any]] = field(default_factory=dict)
    """Keys of which only some values can be honoured, beyond the family's."""
    translate: Callable[[Keys], Keys] = _same
    """From its keys, checked and with the reference's defaults, to those of the family."""
    text_experts: bool = False
    """Whether checkpoints hold experts for text and others for images; see `loading.text_experts`."""
    stacked_experts: bool = False
    """Whether checkpoints store the experts of a layer as one tensor; see `loading.stacked_experts`."""

    def keys(self, family: Family, given: HFConfig) -> Keys:
        """What the family reads. CheckpointError for a key whose value cannot be honoured."""
        reads = family.reads | self.reads
        decoder_rules(self.model_type, reads, {**family.limits, **self.limits}, self.model_type).check(given)
        # What neither the reference's class nor the family knows is not there for the reference either.
        translated = self.translate(with_defaults(self.model_type, given, self.reads))
        known = reference_of(family.reference or family.model_type)
        kept = {key: value for key, value in translated.items() if key in known or key in family.reads}
        heads = integer(translated, "num_attention_heads")
        if kept.get("head_dim") is None:  # the family's class may have a size of its own
            kept["head_dim"] = integer(translated, "hidden_size") // heads
        return {**kept, "model_type": family.model_type}


def _rope_type(keys: Keys, other: str, meant: str) -> Keys:
    """With another name of a scaling kind."""
    rope = dict(rope_parameters(keys))
    if rope.get("rope_type", rope.get("type")) != other:
        return keys
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    return {**keys, name: {**rope, "rope_type": meant}}


def _qwen2(keys: Keys) -> Keys:
    return _rope_type(keys, "mrope", "default")


def _qwen3_vl_moe(keys: Keys) -> Keys:
    """Its weights of experts always add up to one. Of the two names of their number the reference's newer one wins."""
    experts = keys.get("num_local_experts", keys["num_experts"])
    return {**keys, "num_experts": experts, "num_local_experts": experts, "norm_topk_prob": True}


def _glm4v(keys: Keys) -> Keys:
    """Its head size follows from the others; biases are always there; the whole head is rotated unless the file says
    otherwise."""
    heads = integer(keys, "num_attention_heads")
    size = integer(keys, "hidden_size") // heads
    if keys.get("head_dim") not in (None, size):
        raise CheckpointError(f"head_dim is {keys['head_dim']!r:.80}; {heads} heads of this model have {size}")
    return {"partial_rotary_factor": 1.0, **keys, "attention_bias": True}


def _glm_ocr(keys: Keys) -> Keys:
    return {"partial_rotary_factor": 1.0, **keys, "attention_bias": False}


def _ernie(keys: Keys) -> Keys:
    """Of the two widths of experts the first is that of text. Layers with experts are named one by one."""
    widths, layers = keys["moe_intermediate_size"] or [1536, 512], layer_count(keys)
    kinds = keys["mlp_layer_types"] or ["dense"] + ["sparse"] * (layers - 1)
    if not isinstance(widths, list | tuple) or not isinstance(kinds, list | tuple):
        raise CheckpointError("moe_intermediate_size and mlp_layer_types must be lists")
    first = list(kinds).index("sparse") if "sparse" in kinds else layers
    if list(kinds) != ["dense"] * first + ["sparse"] * (layers - first):
        raise CheckpointError(
            f"mlp_layer_types is {kinds!r:.80}; supported: dense or sparse for each of {layers}, dense ones first"
        )
    return {
        **_three_sections(keys),
        "moe_intermediate_size": widths[0],
        "moe_layer_start_index": first,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    }


def _three_sections(keys: Keys) -> Keys:
    """Frequencies are shared out between axes and put back in order, which gives plain RoPE only where the sections of
    height and width are equal, and all of them make up a head."""
    rope = rope_parameters(keys)
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise CheckpointError(f"rope scaling {rope.get('rope_type')!r:.80} is not supported; supported: 'default'")
    sections = rope.get("mrope_section", [22, 22, 20])
    half = (keys.get("head_dim") or integer(keys, "hidden_size") // integer(keys, "num_attention_heads")) // 2
    if not isinstance(sections, list | tuple) or len(sections) != 3 or sections[0] != sections[1]:
        raise CheckpointError(f"mrope_section is {sections!r:.80}; supported: three numbers, the first two the same")
    if sum(sections) != half:
        raise CheckpointError(f"mrope_section is {sections!r:.80}, which must add up to half of a head, {half}")
    return keys


def _paddleocr(keys: Keys) -> Keys:
    bias = keys.get("use_bias") or False
    return {**keys, "attention_bias": bias, "mlp_bias": bias}


def _hunyuan(keys: Keys) -> Keys:
    sections = rope_parameters(keys).get("mrope_section", rope_parameters(keys).get("xdrope_section"))
    if not sections:
        raise CheckpointError("rope_parameters has no mrope_section, without which the reference cannot run the model")
    return _rope_type(keys, "xdrope", "dynamic")


_NO_WINDOW: Mapping[str, Collection[Any]] = {"sliding_window": (None,), "use_sliding_window": (False, None)}

TEXT_TYPES: dict[str, TextType] = {
    kind.model_type: kind
    for kind in (
        TextType(model_type="qwen2_vl_text", family="qwen2", translate=_qwen2),
        TextType(model_type="qwen2_5_vl_text", family="qwen2", translate=_qwen2),
        TextType(model_type="qwen2_5_omni_text", family="qwen2"),
        TextType(model_type="qwen3_vl_text", family="qwen3", limits=_NO_WINDOW),
        TextType(
            model_type="qwen3_vl_moe_text",
            family="qwen3_moe",
            reads=frozenset({"num_local_experts"}),
            limits=_NO_WINDOW,
            translate=_qwen3_vl_moe,
            stacked_experts=True,
        ),
        TextType(model_type="qwen3_omni_moe_text", family="qwen3_moe", limits=_NO_WINDOW),
        TextType(model_type="glm4v_text", family="glm4", translate=_glm4v),
        TextType(model_type="glm_ocr_text", family="glm4", translate=_glm_ocr),
        TextType(model_type="glm4v_moe_text", family="glm4_moe"),
        TextType(model_type="granite4_vision_text", family="granite"),
        TextType(
            model_type="ernie4_5_vl_moe_text",
            family="ernie4_5_moe",
            reads=frozenset({"mlp_layer_types"}),
            translate=_ernie,
            text_experts=True,
        ),
        TextType(model_type="paddleocr_vl_text", family="llama", reads=frozenset({"use_bias"}), translate=_paddleocr),
        TextType(model_type="hunyuan_vl_text", family="hunyuan_v1_dense", translate=_hunyuan),
    )
}
"""By `model_type`."""
