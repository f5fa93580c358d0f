"""Families that route tokens to experts, over plain attention."""

from __future__ import annotations

from typing import Any

from tests.engine.tiny.common import (
    ALPHA_ROPE,
    CORRECTED,
    FULL,
    GEMMA4,
    GRANITE,
    HALF_ROPE,
    LLAMA3_ROPE,
    MUSE,
    OLMO3_ROPES,
    QWEN_MOE,
    SLIDING,
    TWO_IN_THREE,
    YARN_ROPE,
)

GPT_OSS: dict[str, Any] = {
    "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 4, "sliding_window": 40, "swiglu_limit": 3.0,
}  # fmt: skip
GPT_OSS_ROPE = {**YARN_ROPE, "truncate": False}
GEMMA4_MOE: dict[str, Any] = {
    "enable_moe_block": True, "num_experts": 12, "top_k_experts": 3, "moe_intermediate_size": 32,
}  # fmt: skip
QWEN2_MOE = {
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
LLAMA4: dict[str, Any] = {"head_dim": 32, "intermediate_size_mlp": 112, "num_local_experts": 4, "attn_scale": 0.3}
GLM_MOE: dict[str, Any] = {
    "head_dim": 32, "moe_intermediate_size": 32, "n_routed_experts": 12, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "num_mtp_layers": 0,
}  # fmt: skip
ERNIE_MOE: dict[str, Any] = {
    "moe_num_experts": 12, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2,
}  # fmt: skip
HUNYUAN_MOE: dict[str, Any] = {"head_dim": 32, "num_experts": 8, "moe_topk": 3}
MINIMAX_M2: dict[str, Any] = {"head_dim": 32, "num_local_experts": 12, "num_experts_per_tok": 3}
MINIMAX_M3: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 32, "num_local_experts": 12, "num_experts_per_tok": 3, "intermediate_size": 32,
    "dense_intermediate_size": 96, "shared_intermediate_size": 64, "index_n_heads": 2, "index_head_dim": 16,
    "index_block_size": 8, "index_topk_blocks": 3, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "layer_types": [FULL, "minimax_m3_sparse", "minimax_m3_sparse", FULL],
}  # fmt: skip
EXAONE_MOE: dict[str, Any] = {
    **CORRECTED, "head_dim": 32, "num_experts": 12, "sliding_window": 40, "num_shared_experts": 1,
}  # fmt: skip
DOTS1: dict[str, Any] = {
    **CORRECTED, "head_dim": 32, "n_routed_experts": 12, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "sliding_window": None,
}  # fmt: skip
SOLAR: dict[str, Any] = {**CORRECTED, "head_dim": 32, "n_routed_experts": 12, "n_shared_experts": 1}
MIMO_V2: dict[str, Any] = {
    "head_dim": 24, "v_head_dim": 16, "sliding_window": 40, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}  # fmt: skip
LAGUNA: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 40, "num_experts": 12, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "moe_routed_scaling_factor": 1.7,
}  # fmt: skip
STEP: dict[str, Any] = {
    "pad_token_id": 0, "head_dim": 16, "num_sliding_attention_heads": 6, "sliding_window": 40,
    "layer_types": [FULL, SLIDING, SLIDING], "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "share_expert_dim": 64,
    "moe_router_scaling_factor": 1.7, "swiglu_limits": [0.0, None, 0.6], "swiglu_limits_shared": [0.4, 0.0, 0.7],
    "rope_parameters": {
        FULL: {**LLAMA3_ROPE, "partial_rotary_factor": 0.5},
        SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
    },
}  # fmt: skip
HY_V3: dict[str, Any] = {
    "head_dim": 32, "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "router_scaling_factor": 1.7,
}  # fmt: skip
AFMOE: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 32, "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "sliding_window": 40,
}  # fmt: skip
COHERE_MOE: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "sliding_window": 40,
    "sliding_window_pattern": 2, "logit_scale": 0.3,
}  # fmt: skip

MUSE_EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 96,
    "moe_hidden_size": 32, "routed_scaling_factor": 1.7, "qk_scale_factor": 0.8,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": 100}),
    "qwen3-moe": ("Qwen3MoeConfig", {**QWEN_MOE, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": ("Qwen3MoeConfig", {**QWEN_MOE, "mlp_only_layers": [1]}),
    "gpt-oss": ("GptOssConfig", {**GPT_OSS, "rope_parameters": GPT_OSS_ROPE}),
    "granite-moe": ("GraniteMoeConfig", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "granite-moe-shared": (
        "GraniteMoeSharedConfig",
        {**GRANITE, "num_local_experts": 5, "shared_intermediate_size": 48},
    ),
    "qwen2-moe": ("Qwen2MoeConfig", {**QWEN2_MOE, "mlp_only_layers": [1]}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3}),
    "llama4": (
        "Llama4TextConfig",
        {**LLAMA4, "attention_chunk_size": 48, "no_rope_layers": [1, 0, 1], "floor_scale": 16, "moe_layers": [0, 1]},
    ),
    "llama4-plain": (
        "Llama4TextConfig",
        {
            **LLAMA4,
            "attention_chunk_size": 100,
            "no_rope_layers": [1, 1, 0],
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "glm4-moe": ("Glm4MoeConfig", {**GLM_MOE, "use_qk_norm": True, "attention_bias": True}),
    "glm4-moe-groups": ("Glm4MoeConfig", {**GLM_MOE, "n_group": 3, "topk_group": 2, "n_shared_experts": 2}),
    "ernie4.5-moe": ("Ernie4_5_MoeConfig", ERNIE_MOE),
    "ernie4.5-moe-some-dense": (
        "Ernie4_5_MoeConfig",
        {
            **ERNIE_MOE,
            "num_hidden_layers": 5,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 3,
            "moe_num_shared_experts": 0,
        },
    ),
    "hunyuan-moe": ("HunYuanMoEV1Config", {**HUNYUAN_MOE, "rope_parameters": ALPHA_ROPE}),
    "minimax-m2": ("MiniMaxM2Config", {**MINIMAX_M2, "rope_parameters": HALF_ROPE}),
    "exaone-moe": ("ExaoneMoeConfig", {**EXAONE_MOE, "layer_types": TWO_IN_THREE}),
    "exaone-moe-full": (
        "ExaoneMoeConfig",
        {
            **EXAONE_MOE,
            "layer_types": [FULL] * 3,
            "sliding_window": 1 << 20,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "dots1": ("Dots1Config", DOTS1),
    "dots1-window": (
        "Dots1Config",
        {**DOTS1, "sliding_window": 40, "max_window_layers": 1, "n_group": 3, "topk_group": 2, "attention_bias": True},
    ),
    "solar-open": ("SolarOpenConfig", {**SOLAR, "attention_bias": True}),
    "flex-olmo": ("FlexOlmoConfig", {"num_experts": 8, "num_experts_per_tok": 3}),
    "mellum": (
        "MellumConfig",
        {
            **QWEN_MOE,
            "sliding_window": 40,
            "layer_types": TWO_IN_THREE,
            "rope_parameters": OLMO3_ROPES,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "gemma4-experts": ("Gemma4TextConfig", {**GEMMA4, **GEMMA4_MOE, "final_logit_softcapping": 8.0}),
    "hy-v3": ("HYV3Config", {**HY_V3, "num_shared_experts": 2}),
    "hy-v3-some-dense": (
        "HYV3Config",
        {**HY_V3, "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True, "mlp_bias": True},
    ),
    "granite-moe-swa": (
        "GraniteMoeSWAConfig",
        {**GRANITE, "sliding_window": 40, "num_local_experts": 6, "layer_rope_theta": [500.0, 0, 10000.0]},
    ),
    "granite-moe-swa-shared": (
        "GraniteMoeSWAConfig",
        {"sliding_window": 40, "num_local_experts": 5, "shared_intermediate_size": 48, "attention_bias": True},
    ),
    "afmoe": ("AfmoeConfig", {**AFMOE, "mup_enabled": True, "route_scale": 1.7}),
    "afmoe-biased": (
        "AfmoeConfig",
        {**AFMOE, "layer_types": [FULL, SLIDING, SLIDING, FULL], "num_dense_layers": 2, "attention_bias": True},
    ),
    "cohere2-moe": (
        "Cohere2MoeConfig",
        {**COHERE_MOE, "num_shared_experts": 1, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 80},
    ),
    "cohere2-moe-sigmoids": (
        "Cohere2MoeConfig",
        {
            **COHERE_MOE,
            "expert_selection_fn": "sigmoid",
            "num_shared_experts": 2,
            "shared_expert_combination_strategy": "sum",
            "rms_norm_eps": 1e-4,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
            "attention_bias": True,
        },
    ),
    "muse-spark": ("MuseSparkTextConfig", {**MUSE, **MUSE_EXPERTS}),
    "muse-spark-some-dense": (
        "MuseSparkTextConfig",
        {
            **MUSE,
            **MUSE_EXPERTS,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
            "layer_rope_theta": [10000.0, 10000.0, 0, 0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "residual_gate_temperature": 1.1,
            "post_norm_eps": 0.3,
            "attention_bias": True,
        },
    ),
    "minimax-m3": ("MiniMaxM3VLTextConfig", {**MINIMAX_M3, "rope_parameters": HALF_ROPE}),
    "minimax-m3-shared-choice": (
        "MiniMaxM3VLTextConfig",
        {
            **MINIMAX_M3,
            "num_key_value_heads": 4,
            "num_attention_heads": 8,
            "head_dim": 16,
            "index_head_dim": 20,
            "index_block_size": 20,
            "index_local_blocks": 2,
            "layer_types": ["minimax_m3_sparse"] * 4,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "swiglu_limit": 2.0,
            "swiglu_alpha": 1.2,
        },
    ),
    "laguna": (
        "LagunaConfig",
        {
            **LAGUNA,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
            "num_attention_heads_per_layer": [4, 8, 8, 4],
            "moe_router_logit_softcapping": 2.0,
            "rope_parameters": {FULL: {**YARN_ROPE, "partial_rotary_factor": 0.5}, SLIDING: OLMO3_ROPES[SLIDING]},
        },
    ),
    "laguna-elements": (
        "LagunaConfig",
        {
            **LAGUNA,
            "num_attention_heads_per_layer": [4, 2, 6, 2],
            "gating": "per-element",
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
    ),
    "step3.5": ("Step3p7TextConfig", STEP),
    "step3.5-biased": (
        "Step3p7TextConfig",
        {
            **STEP,
            "layer_types": [SLIDING, FULL, SLIDING],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_sliding_attention_heads": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "query_pre_attn_scalar": 9,
            "tie_word_embeddings": True,
            "rope_parameters": {FULL: {**YARN_ROPE, "partial_rotary_factor": 0.75}, SLIDING: HALF_ROPE},
        },
    ),
    "mimo-v2-flash": ("MiMoV2FlashConfig", {**MIMO_V2, "routed_scaling_factor": 1.6}),
    "mimo-v2-flash-some-dense": (
        "MiMoV2FlashConfig",
        {
            **MIMO_V2,
            "layer_types": TWO_IN_THREE,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "attention_value_scale": None,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "v_head_dim": 24,
            "rope_parameters": {FULL: {**YARN_ROPE, "partial_rotary_factor": 0.75}, SLIDING: HALF_ROPE},
        },
    ),
}
