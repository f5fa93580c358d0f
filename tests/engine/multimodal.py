"""Tiny random checkpoints of models that take images too, written by the reference: one for each wrapper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from tests.engine.foreign import FOREIGN
from tests.engine.tiny import COMMON, FAMILIES

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_INTERLEAVED = {**MROPE, "mrope_section": [4, 4, 4], "mrope_interleaved": True}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
TEXT_TYPES: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_omni_text": {"rope_parameters": MROPE},
    "qwen3_vl_text": {"head_dim": 24, "rope_parameters": _INTERLEAVED},
    "qwen3_vl_moe_text": {
        **_EXPERTS, "head_dim": 24, "mlp_only_layers": [1],
        "rope_parameters": _INTERLEAVED,
    },
    "qwen3_omni_moe_text": {**_EXPERTS, "rope_parameters": MROPE},
    "glm4v_text": {"rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    "glm_ocr_text": {"rope_parameters": MROPE},
    "glm4v_moe_text": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5,
        "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
    },
    "granite4_vision_text": {
        "embedding_multiplier": 3.0, "logits_scaling": 5.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
    },
    "ernie4_5_vl_moe_text": {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": [48, 32], "moe_num_shared_experts": 1,
        "rope_parameters": {**MROPE, "mrope_section": [3, 3, 2]},
    },
    "paddleocr_vl_text": {"head_dim": 16, "rope_parameters": MROPE},
    "hunyuan_vl_text": {"head_dim": 16, "rope_parameters": {**MROPE, "mrope_section": [2, 2, 2, 2]}},
}  # fmt: skip
"""Decoders with configuration classes of their own, by their `model_type`: what differs from `COMMON`."""

VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "head_dim": 16, "depth": 1, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 1,
    "out_hidden_size": 64, "num_position_embeddings": 4, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
    "projection_dim": 32, "num_patches": 4,
}  # fmt: skip
_CLIP = {**VISION, "model_type": "clip_vision_model"}
_SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
_PIXTRAL = {**VISION, "model_type": "pixtral"}
_RADIO = {**VISION, "mlp_ratio": 1.0, "model_type": "radio", "video_temporal_patch_size": 2}

_AUDIO = {
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 64,
    "downsample_hidden_size": 8, "num_mel_bins": 8, "max_source_positions": 16,
}  # fmt: skip
_OMNI = {"audio_config": _AUDIO}
_GRANITE = {
    "vision_config": {**_CLIP, "hidden_size": 64, "num_attention_heads": 1},
    "deepstack_layer_map": [[-1, 0]],
    "spatial_target_layers": [1],
    "downsample_rate": "1/2",
}

_MUSE = {"out_hidden_size": 128, "projector_hidden_size": 32}
_MUSE_AUDIO = {"hidden_sizes": (8, 8, 8, 16), "patch_sizes": (2, 2, 2, 2), "depths": (1, 1, 1, 1),
               "out_hidden_size": 64}  # fmt: skip


def _text(family: str) -> dict[str, Any]:
    """The decoder of a family's tiny checkpoint."""
    name, changes = FAMILIES[family]
    return {**changes, "model_type": getattr(transformers, name).model_type}


def _foreign(name: str) -> dict[str, Any]:
    """A decoder that runs through the library."""
    config, changes = FOREIGN[name]
    return {**changes, "model_type": getattr(transformers, config).model_type}


THROUGH_LIBRARY = ("llava-diffllama", "internvl-vaultgemma")
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("qwen2_vl", TEXT_TYPES["qwen2_vl_text"], {}),
    "qwen2_5_vl": ("qwen2_5_vl", TEXT_TYPES["qwen2_5_vl_text"], {}),
    "qwen2_5_vl-yarn": (
        "qwen2_5_vl",
        {"rope_parameters": {**MROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {},
    ),
    "qwen3_vl": ("qwen3_vl", TEXT_TYPES["qwen3_vl_text"], {"tie_word_embeddings": True}),
    "qwen3_vl_moe": ("qwen3_vl_moe", TEXT_TYPES["qwen3_vl_moe_text"], {}),
    "qwen2_5_omni": ("qwen2_5_omni_thinker", TEXT_TYPES["qwen2_5_omni_text"], _OMNI),
    "qwen3_omni_moe": ("qwen3_omni_moe_thinker", TEXT_TYPES["qwen3_omni_moe_text"], _OMNI),
    "glm4v": ("glm4v", TEXT_TYPES["glm4v_text"], {}),
    "glm4v_moe": ("glm4v_moe", TEXT_TYPES["glm4v_moe_text"], {}),
    "glm46v": ("glm46v", {**TEXT_TYPES["glm4v_text"], "model_type": "glm4v_text"}, {}),
    "glm46v-moe": ("glm46v", {**TEXT_TYPES["glm4v_moe_text"], "model_type": "glm4v_moe_text"}, {}),
    "glm_ocr": ("glm_ocr", TEXT_TYPES["glm_ocr_text"], {}),
    "internvl": ("internvl", _text("qwen3-qknorm"), {}),
    "internvl-qwen3_moe": ("internvl", _text("qwen3-moe"), {}),
    "internvl-gpt_oss": ("internvl", _text("gpt-oss"), {"tie_word_embeddings": False}),
    "llava": ("llava", _text("llama-gqa"), {"vision_config": _CLIP}),
    "llava-gemma2": ("llava", {**_text("gemma2"), "tie_word_embeddings": False}, {"vision_config": _CLIP}),
    "llava_next": ("llava_next", _text("mistral-window"), {"vision_config": _CLIP}),
    "llava_next-granite": ("llava_next", _text("granite"), {"vision_config": _CLIP}),
    "llava_next_video": ("llava_next_video", _text("llama-gqa"), {"vision_config": _CLIP}),
    "llava_onevision": ("llava_onevision", _text("qwen2-bias"), {"vision_config": _SIGLIP}),
    "video_llava": ("video_llava", _text("llama-gqa"), {"vision_config": _CLIP}),
    "vipllava": ("vipllava", _text("llama-gqa"), {"vision_config": _CLIP}),
    "mistral3": ("mistral3", _text("mistral-window"), {"vision_config": _PIXTRAL, "tie_word_embeddings": False}),
    "mistral3-ministral3": ("mistral3", _text("ministral3"), {"vision_config": _PIXTRAL}),
    "mistral3-llama": ("mistral3", _text("llama-gqa"), {"vision_config": _PIXTRAL}),
    "idefics2": ("idefics2", _text("mistral-window"), {}),
    "idefics3": ("idefics3", _text("llama-gqa"), {}),
    "smolvlm": ("smolvlm", _text("llama-gqa"), {}),
    "deepseek_vl": ("deepseek_vl", _text("llama-gqa"), {"vision_config": _SIGLIP}),
    "deepseek_vl_hybrid": ("deepseek_vl_hybrid", _text("llama-gqa"), {"vision_config": _SIGLIP}),
    "janus": ("janus", _text("llama-gqa"), {}),
    "ovis2": ("ovis2", _text("qwen2-bias"), {"visual_indicator_token_ids": [190, 191, 192, 193, 194]}),
    "got_ocr2": ("got_ocr2", _text("qwen2-bias"), {}),
    "video_llama_3": ("video_llama_3", _text("qwen2-bias"), {}),
    "lighton_ocr": ("lighton_ocr", _text("qwen3-qknorm"), {"vision_config": _PIXTRAL}),
    "qianfan_ocr": ("qianfan_ocr", _text("qwen3-qknorm"), {}),
    "aya_vision": ("aya_vision", _text("cohere2"), {"vision_config": _SIGLIP}),
    "cohere2_vision": ("cohere2_vision", _text("cohere2"), {"vision_config": _SIGLIP}),
    "lfm2_vl": ("lfm2_vl", _text("lfm2"), {}),
    "exaone4_5": ("exaone4_5", _text("exaone4"), {}),
    "nemotron_h_omni": ("nemotron_h_omni", _text("nemotron-h"), {"vision_config": _RADIO}),
    "gemma3": ("gemma3", _text("gemma3-two-ropes"), {"vision_config": _SIGLIP, "tie_word_embeddings": False}),
    "llama4": ("llama4", _text("llama4"), {}),
    "granite4_vision": ("granite4_vision", TEXT_TYPES["granite4_vision_text"], _GRANITE),
    "ernie4_5_vl_moe": ("ernie4_5_vl_moe", TEXT_TYPES["ernie4_5_vl_moe_text"], {}),
    "paddleocr_vl": ("paddleocr_vl", TEXT_TYPES["paddleocr_vl_text"], {}),
    "hunyuan_vl": ("hunyuan_vl", TEXT_TYPES["hunyuan_vl_text"], {}),
    "gemma4": ("gemma4", {**_text("gemma4-small"), "pad_token_id": 0}, {}),
    "gemma4_unified": ("gemma4_unified", {**_text("gemma4-unified"), "pad_token_id": 0}, {}),
    "llava-starcoder2": ("llava", _foreign("starcoder2"), {"vision_config": _CLIP}),
    "llava-minicpm3": ("llava", _foreign("minicpm3"), {"vision_config": _CLIP}),
    "llava-diffllama": ("llava", _foreign("diffllama"), {"vision_config": _CLIP}),
    "hyperclovax_vision_v2": ("hyperclovax_vision_v2", _text("hyperclovax"), {"tie_word_embeddings": False}),
    "qwen4_exp": ("qwen4_exp", _text("qwen4-exp"), {}),
    "step3p7": ("step3p7", _text("step3.5"), {"vision_config": {**VISION, "mlp_ratio": 1.0}}),
    "minimax_m3_vl": ("minimax_m3_vl", _text("minimax-m3"), {}),
    "mistral_large4": ("mistral_large4", _text("mistral-large4"), {"vision_config": _PIXTRAL}),
    "muse_glimmer": ("muse_glimmer", _text("muse-glimmer"), _MUSE),
    "muse_spark": ("muse_spark", _text("muse-spark"), {**_MUSE, "audio_config": _MUSE_AUDIO}),
    "glm5_next": ("glm5_next", _text("glm5-next"), {}),
    "internvl-vaultgemma": ("internvl", _foreign("vaultgemma"), {"tie_word_embeddings": False}),
}
"""The wrapper, its decoder's keys, and others of its own."""


def tiny_model(name: str, **changes: Any) -> Any:
    """`changes`: to the decoder's keys."""
    kind, text, more = CHECKPOINTS[name]
    config = transformers.CONFIG_MAPPING[kind].from_dict(
        {"text_config": {**COMMON, **text, **changes}, "vision_config": VISION, "model_type": kind, **more}
    )
    torch.manual_seed(0)
    found = getattr(transformers, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind])(config).eval()
    with torch.no_grad():  # as in `tiny`; the wrappers' own initialization hardly tells tokens apart
        for key, parameter in found.named_parameters():
            if "visi" in key or "visual" in key:
                continue
            if "norm" in key and not key.endswith("bias"):
                parameter.normal_(1, 0.2)
            elif key.endswith("sinks"):
                parameter.normal_(0, 2)
            elif not key.endswith((".A_log", ".D", "dt_bias")):
                parameter.normal_(0, 0.4)
        for key, buffer in found.named_buffers():
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.2)
    return found


def saved(name: str, folder: Path, **changes: Any) -> Any:
    """The model, which is also written to `folder` under the names that are published."""
    model = tiny_model(name, **changes)
    model.save_pretrained(folder)
    return model


def write_as_named(model: Any, folder: Path, rename: Callable[[str], str] = str) -> Path:
    """With the names that the reference has in its modules, or others, instead of those that it publishes."""
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if tensor is not None}
    if "lm_head.weight" in tensors and model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    save_file({rename(name): tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
