"""Families of plain layers: attention over whole keys and values, one MLP."""

from __future__ import annotations

from typing import Any

from tests.engine.tiny.common import (
    ALPHA_ROPE,
    FULL,
    GEMMA4,
    GRANITE,
    HALF_ROPE,
    LLAMA3_ROPE,
    MUSE,
    OLMO3_ROPES,
    SLIDING,
    TWO_IN_THREE,
    YARN_ROPE,
)

LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 1024,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
}
GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 40}
GEMMA4_SMALL: dict[str, Any] = {
    "num_hidden_layers": 6, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL], "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 199, "use_double_wide_mlp": True,
}  # fmt: skip
MINISTRAL3_ROPE = {**YARN_ROPE, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.7, "mscale": 1.0,
                   "mscale_all_dim": 1.0}  # fmt: skip
THREE_QUARTERS = {**HALF_ROPE, "partial_rotary_factor": 0.75}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("LlamaConfig", {}),
    "llama-mqa-tied": ("LlamaConfig", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-mha-bias": ("LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": ("LlamaConfig", {"rope_parameters": LINEAR_ROPE}),
    "llama-yarn-rope": ("LlamaConfig", {"rope_parameters": YARN_ROPE}),
    "mistral-window": ("MistralConfig", {"sliding_window": 40, "head_dim": 32}),
    "qwen2-bias": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3-qknorm": ("Qwen3Config", {"head_dim": 32}),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "gemma2": ("Gemma2Config", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "gemma3-two-ropes": ("Gemma3TextConfig", {**GEMMA, "sliding_window_pattern": 2, "num_key_value_heads": 1}),
    "granite": ("GraniteConfig", GRANITE),
    "ministral": ("MinistralConfig", {"head_dim": 32, "sliding_window": 40, "layer_types": [SLIDING, FULL, SLIDING]}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "ministral3": ("Ministral3Config", {"head_dim": 32, "rope_parameters": MINISTRAL3_ROPE}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 40, "num_hidden_layers": 4, "rope_parameters": OLMO3_ROPES}),
    "phi3": ("Phi3Config", {"sliding_window": 60}),
    "phi3-half-rotated": ("Phi3Config", {"rope_parameters": HALF_ROPE, "tie_word_embeddings": True}),
    "cohere": ("CohereConfig", {"layer_norm_eps": 1e-4, "logit_scale": 0.3}),
    "cohere-qknorm": ("CohereConfig", {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False}),
    "cohere2": ("Cohere2Config", {"sliding_window": 40, "layer_types": TWO_IN_THREE}),
    "exaone4": ("Exaone4Config", {"sliding_window": 40, "layer_types": TWO_IN_THREE}),
    "exaone4-full": (
        "Exaone4Config",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "rope_parameters": LLAMA3_ROPE},
    ),
    "glm4": ("Glm4Config", {"head_dim": 32}),
    "seed-oss": ("SeedOssConfig", {"head_dim": 24}),
    "seed-oss-biased": ("SeedOssConfig", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "ernie4.5": ("Ernie4_5Config", {"head_dim": 24}),
    "ernie4.5-biased": ("Ernie4_5Config", {"use_bias": True, "rope_parameters": LLAMA3_ROPE}),
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 32, "rope_parameters": ALPHA_ROPE}),
    "hunyuan-biased": (
        "HunYuanDenseV1Config",
        {"head_dim": 16, "attention_bias": True, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "cwm": ("CwmConfig", {"bos_token_id": 1, "head_dim": 32, "sliding_window": 40, "rope_parameters": LLAMA3_ROPE}),
    "arcee": ("ArceeConfig", {}),
    "arcee-biased": ("ArceeConfig", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN_ROPE}),
    "gemma4": ("Gemma4TextConfig", {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-small": ("Gemma4TextConfig", {**GEMMA4, **GEMMA4_SMALL}),
    "gemma4-unified": ("Gemma4UnifiedTextConfig", {**GEMMA4, "attention_bias": True, "tie_word_embeddings": True}),
    "glm": ("GlmConfig", {"head_dim": 32, "attention_bias": True}),
    "glm-unbiased": ("GlmConfig", {"head_dim": 16, "attention_bias": False, "rope_parameters": THREE_QUARTERS}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "stablelm-parallel": ("StableLmConfig", {"use_parallel_residual": True, "rope_parameters": HALF_ROPE}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 40}),
    "starcoder2-unbiased": ("Starcoder2Config", {"use_bias": False, "tie_word_embeddings": False}),
    "olmo": ("OlmoConfig", {"clip_qkv": 1.5}),
    "olmo-biased": ("OlmoConfig", {"attention_bias": True, "tie_word_embeddings": True}),
    "phi": ("PhiConfig", {"num_key_value_heads": 4}),
    "phi-gqa": ("PhiConfig", {"rope_parameters": THREE_QUARTERS}),
    "helium": ("HeliumConfig", {"head_dim": 16}),
    "helium-biased": ("HeliumConfig", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "hyperclovax": ("HyperCLOVAXConfig", {**GRANITE, "head_dim": 32}),
    "hyperclovax-biased": ("HyperCLOVAXConfig", {"attention_bias": True, "mlp_bias": True, "logits_scaling": 0.4}),
    "jais2": ("Jais2Config", {}),
    "jais2-unbiased": ("Jais2Config", {"attention_bias": False, "mlp_bias": False}),
    "nemotron": ("NemotronConfig", {"head_dim": 32}),
    "nemotron-biased": ("NemotronConfig", {"attention_bias": True, "mlp_bias": True, "rope_parameters": HALF_ROPE}),
    "apertus": ("ApertusConfig", {"head_dim": 16}),
    "apertus-biased": ("ApertusConfig", {"attention_bias": True, "rope_parameters": LINEAR_ROPE}),
    "granite-swa": ("GraniteSWAConfig", {**GRANITE, "sliding_window": 40, "layer_rope_theta": [0, 500.0, 10000.0]}),
    "granite-swa-biased": (
        "GraniteSWAConfig",
        {"sliding_window": 40, "attention_bias": True, "mlp_bias": True, "layer_types": TWO_IN_THREE},
    ),
    "stablelm-head-norms": (
        "StableLmConfig",
        {"use_parallel_residual": True, "qk_layernorm": True, "layer_norm_eps": 1e-4},
    ),
    "hrm-text": (
        "HrmTextConfig",
        {"initializer_range": 0.2, "head_dim": 16, "num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 2},
    ),
    "hrm-text-scaled": (
        "HrmTextConfig",
        {
            "initializer_range": 0.2,
            "head_dim": 24,
            "num_hidden_layers": 1,
            "H_cycles": 3,
            "L_cycles": 1,
            "embedding_scale": 1.7,
            "prefix_lm": False,
            "tie_word_embeddings": True,
        },
    ),
    "muse-glimmer": ("MuseGlimmerTextConfig", MUSE),
    "muse-glimmer-other": (
        "MuseGlimmerTextConfig",
        {
            **MUSE,
            "num_hidden_layers": 3,
            "layer_types": TWO_IN_THREE,
            "layer_rope_theta": [0, 10000.0, 10000.0],
            "rope_parameters": YARN_ROPE,
            "post_norm_eps": 0.3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "phi3-longrope": ("Phi3Config", {"original_max_position_embeddings": 1024, "rope_parameters": LONG_ROPE}),
}
