"""Models that take images or sound too, as data: where the decoder's keys are, and what else of the model changes what
the decoder computes of text.

A wrapper is a `model_type` whose configuration has a decoder's under a key of its own. Which decoder that is says the
decoder's own `model_type`, where the reference asks it. What the tensors are called is the same for all of them:
`tensor_names.PREFIXES`. A test compares this table with the reference's classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

HFConfig = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """One `model_type`."""

    model_type: str
    decoder: str
    """`model_type` of the decoder, or of another wrapper under `key`: where its keys do not say, and whatever they say
    where it is `fixed`."""
    fixed: bool = False
    """Whether the reference reads the decoder's keys with one class, without asking for their `model_type`."""
    key: str = "text_config"
    older_keys: tuple[str, ...] = ()
    """Other names of `key`, in older files."""
    flat: bool = False
    """Whether older files have the decoder's keys beside those of the wrapper, without `key`."""
    tied_by: Literal["wrapper", "either", "decoder"] = "wrapper"
    """Whose `tie_word_embeddings` holds. A wrapper that leaves it open (null) asks the decoder."""
    tied_key: str = ""
    """An older name of the wrapper's, which goes before it."""
    own_head: bool = True
    """Whether logits come from the wrapper's own head, which neither scales nor caps them, whatever the decoder's keys
    say; else from the decoder's."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Names of decoders that the reference takes for others."""
    refused: str = ""
    """Why text alone cannot be run, for a wrapper of which that is so."""

    def keys_of(self, raw: HFConfig) -> HFConfig | None:
        """The decoder's keys; None where the file has none."""
        for key in (self.key, *self.older_keys):
            if isinstance(raw.get(key), Mapping) and raw[key]:
                found: HFConfig = raw[key]
                return found
        return raw if self.flat and "hidden_size" in raw else None


WRAPPERS: dict[str, Wrapper] = {
    wrapper.model_type: wrapper
    for wrapper in (
        # Qwen
        Wrapper(model_type="qwen2_vl", decoder="qwen2_vl_text", fixed=True, flat=True, tied_by="either"),
        Wrapper(model_type="qwen2_5_vl", decoder="qwen2_5_vl_text", fixed=True, flat=True, tied_by="either"),
        Wrapper(model_type="qwen3_vl", decoder="qwen3_vl_text", fixed=True),
        Wrapper(model_type="qwen3_vl_moe", decoder="qwen3_vl_moe_text", fixed=True),
        Wrapper(model_type="qwen3_5", decoder="qwen3_5_text", fixed=True),
        Wrapper(model_type="qwen3_5_moe", decoder="qwen3_5_moe_text", fixed=True),
        Wrapper(model_type="qwen4_exp", decoder="qwen4_exp_text", fixed=True),
        Wrapper(model_type="qwen2_5_omni_thinker", decoder="qwen2_5_omni_text", fixed=True),
        Wrapper(model_type="qwen2_5_omni", decoder="qwen2_5_omni_thinker", fixed=True, key="thinker_config"),
        Wrapper(model_type="qwen3_omni_moe_thinker", decoder="qwen3_omni_moe_text", fixed=True),
        Wrapper(model_type="qwen3_omni_moe", decoder="qwen3_omni_moe_thinker", fixed=True, key="thinker_config"),
        # GLM
        Wrapper(model_type="glm4v", decoder="glm4v_text", fixed=True, tied_by="either"),
        Wrapper(model_type="glm4v_moe", decoder="glm4v_moe_text", fixed=True, tied_by="either"),
        Wrapper(model_type="glm46v", decoder="glm4v_text"),
        Wrapper(model_type="glm5_next", decoder="glm5_next_text", fixed=True, flat=True),
        Wrapper(model_type="glm_ocr", decoder="glm_ocr_text", fixed=True, tied_by="either"),
        # Around any decoder
        Wrapper(model_type="internvl", decoder="qwen2"),
        Wrapper(model_type="llava", decoder="llama", tied_by="either"),
        Wrapper(model_type="llava_next", decoder="llama"),
        Wrapper(model_type="llava_next_video", decoder="llama", tied_by="either"),
        Wrapper(model_type="llava_onevision", decoder="qwen2", tied_by="either"),
        Wrapper(model_type="video_llava", decoder="llama"),
        Wrapper(model_type="vipllava", decoder="llama"),
        Wrapper(model_type="mistral3", decoder="mistral"),
        Wrapper(model_type="idefics2", decoder="mistral"),
        Wrapper(model_type="idefics3", decoder="llama"),
        Wrapper(model_type="smolvlm", decoder="llama"),
        Wrapper(model_type="perception_lm", decoder="llama"),
        Wrapper(model_type="deepseek_vl", decoder="llama"),
        Wrapper(model_type="deepseek_vl_hybrid", decoder="llama"),
        Wrapper(model_type="janus", decoder="llama"),
        Wrapper(model_type="ovis2", decoder="qwen2"),
        Wrapper(model_type="got_ocr2", decoder="qwen2"),
        Wrapper(model_type="video_llama_3", decoder="qwen2", tied_by="either"),
        Wrapper(model_type="lighton_ocr", decoder="qwen3"),
        Wrapper(model_type="qianfan_ocr", decoder="qwen3"),
        Wrapper(model_type="aya_vision", decoder="cohere2"),
        Wrapper(model_type="cohere2_vision", decoder="cohere2"),
        Wrapper(model_type="hyperclovax_vision_v2", decoder="hyperclovax", own_head=False),
        Wrapper(model_type="lfm2_vl", decoder="lfm2", tied_key="tie_embedding"),
        Wrapper(model_type="exaone4_5", decoder="exaone4", renamed={"exaone4_5_text": "exaone4"}),
        Wrapper(
            model_type="nemotron_h_omni",
            decoder="nemotron_h",
            older_keys=("llm_config",),
            tied_by="decoder",
            own_head=False,
        ),
        # Around one
        Wrapper(model_type="gemma3", decoder="gemma3_text", fixed=True),
        Wrapper(model_type="llama4", decoder="llama4_text", fixed=True, own_head=False),
        Wrapper(model_type="kimi_k25", decoder="deepseek_v3"),
        Wrapper(model_type="granite4_vision", decoder="granite4_vision_text", own_head=False),
        Wrapper(model_type="ernie4_5_vl_moe", decoder="ernie4_5_vl_moe_text", fixed=True),
        Wrapper(model_type="paddleocr_vl", decoder="paddleocr_vl_text", fixed=True, flat=True, tied_by="either"),
        Wrapper(model_type="hunyuan_vl", decoder="hunyuan_vl_text", fixed=True, flat=True, tied_by="either"),
        Wrapper(model_type="minimax_m3_vl", decoder="minimax_m3_vl_text", fixed=True, tied_by="either"),
        Wrapper(model_type="gemma4", decoder="gemma4_text", fixed=True, own_head=False),
        Wrapper(model_type="gemma4_unified", decoder="gemma4_unified_text", fixed=True, own_head=False),
        Wrapper(model_type="step3p7", decoder="step3p5", fixed=True),
        Wrapper(model_type="mistral_large4", decoder="mistral_large4_text", fixed=True, own_head=False),
        Wrapper(model_type="muse_glimmer", decoder="muse_glimmer_text", fixed=True, own_head=False),
        Wrapper(model_type="muse_spark", decoder="muse_spark_text", fixed=True, own_head=False),
        # Around one that runs through transformers
        Wrapper(model_type="gemma3n", decoder="gemma3n_text", fixed=True, own_head=False),
        Wrapper(
            model_type="paligemma",
            decoder="gemma",
            refused="its prompts are a prefix whose tokens see each other in both directions, and attention here is "
            "causal",
        ),
    )
}
"""By `model_type`."""

PLAIN_HEAD: HFConfig = {
    "final_logit_softcapping": None,
    "lm_head_multiplier": 1.0,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
}
"""Keys of decoders of the library that say what their own head does with logits, at the values that change nothing."""


def decoder_keys(raw: HFConfig) -> HFConfig:
    """The keys of the decoder as the file has them: a wrapper's are one level down, or two. Nothing is checked."""
    wrapper = WRAPPERS.get(str(raw.get("model_type")))
    if wrapper is None:
        inner = raw.get("text_config")
        return inner if isinstance(inner, Mapping) and inner else raw
    inner = wrapper.keys_of(raw)
    if inner is None or inner is raw:
        return raw
    return decoder_keys({**inner, "model_type": wrapper.decoder}) if wrapper.decoder in WRAPPERS else inner


ALONE = (
    (r"^(?:model\.language_model|language_model\.model|model\.text_model)\.", "model."),
    (r"^language_model\.lm_head\.", "lm_head."),
)
"""Patterns of names of the decoder's tensors in wrappers, and what these are in the decoder alone."""


def alone(name: str) -> str:
    for pattern, target in ALONE:
        name = re.sub(pattern, target, name)
    return name


SENSES = frozenset({
    "visual", "vision_tower", "vision_model", "vision_encoder", "vision_projection", "image_tower", "video_tower",
    "audio_tower", "embed_vision", "embed_audio", "vision_embedder", "multi_modal_projector", "connector",
    "projector", "aligner", "resampler_model", "layerwise_projectors", "spatial_projectors",
    "visual_embeddings_table", "vqmodel", "generation_aligner", "generation_embeddings", "generation_head",
    "high_res_vision_model", "high_res_vision_neck", "high_res_vision_proj", "talker", "token2wav", "code2wav",
    "mlp1", "mlp_AR", "vit", "vision_adapter", "vit_large_projector",
})  # fmt: skip
"""Modules that see, hear, draw or speak: nothing in them changes what is computed of text."""


def senses(name: str) -> bool:
    """Whether a tensor belongs to such a module, whatever its name begins with."""
    return not SENSES.isdisjoint(name.split("."))
