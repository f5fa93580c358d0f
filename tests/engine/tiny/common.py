"""What the tiny configurations share: their sizes, and the ropes and layer types that several families use."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
QWEN_MOE: dict[str, Any] = {"head_dim": 32, "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
FULL, SLIDING = "full_attention", "sliding_attention"
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.11,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
GEMMA4: dict[str, Any] = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 40, "num_hidden_layers": 4,
    "layer_types": [SLIDING, SLIDING, FULL, FULL], "hidden_size_per_layer_input": 0, "tie_word_embeddings": False,
}  # fmt: skip
MUSE: dict[str, Any] = {
    "num_hidden_layers": 5, "head_dim": 24, "sliding_window": 40, "output_multiplier": 0.7, "qk_scale_factor": 1.7,
}  # fmt: skip
OLMO3_ROPES = {FULL: YARN_ROPE, SLIDING: {"rope_type": "default", "rope_theta": 10000.0}}
HALF_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
ALPHA_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
CORRECTED: dict[str, Any] = {
    "moe_intermediate_size": 32, "num_experts_per_tok": 3, "routed_scaling_factor": 1.7, "norm_topk_prob": True,
}  # fmt: skip
TWO_IN_THREE = ["sliding_attention", "full_attention", "sliding_attention"]
