"""Families in which some layers keep a state instead of keys and values."""

from __future__ import annotations

from typing import Any

from tests.engine.tiny.common import FULL, GRANITE, QWEN_MOE

HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "full_attention_interval": 2,
}
GRANITE4 = {
    **GRANITE,
    "layer_types": [FULL] * 3,
    "mamba_n_heads": 8,
    "shared_intermediate_size": 80,
    "position_embedding_type": None,
}
MAMBA, ATTENTION = "linear_attention", "full_attention"
GRANITE4_HYBRID: dict[str, Any] = {
    **GRANITE4, "layer_types": [MAMBA, ATTENTION, MAMBA], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2,
    "mamba_d_state": 24, "mamba_d_conv": 3, "mamba_chunk_size": 24,
}  # fmt: skip
BAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_d_conv": 3,
    "mamba_chunk_size": 24,
}  # fmt: skip
FALCON_H1: dict[str, Any] = {
    **BAMBA, "mamba_d_ssm": 96, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.6, "mlp_multipliers": [0.7, 1.3],
    "key_multiplier": 0.6, "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.2, "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 0.7, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "conv_kernel": 3, "chunk_size": 24,
    "layer_norm_epsilon": 1e-4,
}  # fmt: skip
NEMOTRON_H: dict[str, Any] = {
    "layers_block_type": [MAMBA, "mlp", ATTENTION, MAMBA], "head_dim": 20, "mamba_num_heads": 6, "mamba_head_dim": 12,
    "n_groups": 2, "ssm_state_size": 24, "conv_kernel": 3, "chunk_size": 24, "num_hidden_layers": 4,
}  # fmt: skip
NEMOTRON_H_MOE: dict[str, Any] = {
    **NEMOTRON_H, "layers_block_type": [MAMBA, "moe", ATTENTION, "moe"], "n_routed_experts": 12,
    "num_experts_per_tok": 3, "moe_intermediate_size": 36, "moe_shared_expert_intermediate_size": 52,
    "routed_scaling_factor": 1.7,
}  # fmt: skip
QWEN4_EXP: dict[str, Any] = {
    **{key: value for key, value in HYBRID.items() if key != "full_attention_interval"}, "num_hidden_layers": 5,
    "initializer_range": 0.15,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
    "hc_count": 3, "hc_lowrank": 10, "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 12,
    "indexer_budget": 24, "indexer_compress_ratio": 4, "ple_layer_ids": [1, 2], "ple_embed_dim": 48,
    "heads_per_ngram": 4, "ngram_vocab_size_base": 100, "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 3, "eos_token_id": 7, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                                  "partial_rotary_factor": 0.25},
}  # fmt: skip
CONV = "conv"
LFM2: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": [CONV, FULL, CONV, CONV]}
LFM2_MOE: dict[str, Any] = {
    **LFM2, "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_dense_layers": 1,
}  # fmt: skip
LINEAR = "linear_attention"
KIMI_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": [LINEAR, FULL, LINEAR, LINEAR], "num_key_value_heads": 4, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "linear_head_dim": 16, "linear_num_heads": 4,
    "num_local_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3NextConfig", {**HYBRID, **QWEN_MOE, "shared_expert_intermediate_size": 48}),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**HYBRID, **QWEN_MOE, "shared_expert_intermediate_size": 48}),
    "qwen3-next-dense": ("Qwen3NextConfig", {**HYBRID, "num_experts": 0}),
    "qwen3.5": ("Qwen3_5TextConfig", {**HYBRID, "linear_num_key_heads": 4, "tie_word_embeddings": True}),
    "granite4": ("GraniteMoeHybridConfig", {**GRANITE4, "num_local_experts": 0, "position_embedding_type": "rope"}),
    "granite4-experts-nope": ("GraniteMoeHybridConfig", {**GRANITE4, "num_local_experts": 5}),
    "granite4-hybrid": (
        "GraniteMoeHybridConfig",
        {**GRANITE4_HYBRID, "num_local_experts": 5, "num_experts_per_tok": 2, "mamba_proj_bias": True},
    ),
    "granite4-hybrid-dense": (
        "GraniteMoeHybridConfig",
        {
            **GRANITE4_HYBRID,
            "num_local_experts": 0,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 3,
            "mamba_n_heads": 6,
            "mamba_d_head": "auto",
            "mamba_conv_bias": False,
            "time_step_limit": (0.2, 0.9),
        },
    ),
    "bamba": ("BambaConfig", {**BAMBA, "attn_layer_indices": [1], "mamba_conv_bias": False, "attention_bias": True}),
    "falcon-h1": ("FalconH1Config", {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "falcon-h1-biased": (
        "FalconH1Config",
        {
            **FALCON_H1,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mlp_bias": True,
            "mamba_d_ssm": None,
        },
    ),
    "falcon-h1-norm-first": ("FalconH1Config", {**FALCON_H1, "mamba_rms_norm": True}),
    "nemotron-h": ("NemotronHConfig", NEMOTRON_H),
    "nemotron-h-biased": (
        "NemotronHConfig",
        {
            **NEMOTRON_H,
            "layers_block_type": ["mlp", "mlp", MAMBA, ATTENTION],
            "n_groups": 3,
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
            "time_step_min": 0.3,
            "layer_norm_epsilon": 1e-4,
        },
    ),
    "nemotron-h-experts": ("NemotronHConfig", NEMOTRON_H_MOE),
    "nemotron-h-narrow-experts": (
        "NemotronHConfig",
        {
            **NEMOTRON_H_MOE,
            "layers_block_type": ["moe", "mlp", ATTENTION, MAMBA],
            "moe_latent_size": 40,
            "mlp_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "n_shared_experts": 3,
        },
    ),
    "mamba2": ("Mamba2Config", MAMBA2),
    "mamba2-biased": (
        "Mamba2Config",
        {
            **MAMBA2,
            "expand": 3,
            "num_heads": 12,
            "n_groups": 1,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": True,
            "residual_in_fp32": False,
            "time_step_limit": (0.2, 0.9),
        },
    ),
    "lfm2": ("Lfm2Config", {**LFM2, "block_auto_adjust_ff_dim": False}),
    "lfm2-biased": (
        "Lfm2Config",
        {
            **LFM2,
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.3,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-moe": ("Lfm2MoeConfig", {**LFM2_MOE, "routed_scaling_factor": 1.7}),
    "lfm2-moe-plain": (
        "Lfm2MoeConfig",
        {**LFM2_MOE, "use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 2, "conv_bias": True},
    ),
    "kimi-linear": ("KimiLinearConfig", KIMI_LINEAR),
    "kimi-linear-groups": (
        "KimiLinearConfig",
        {
            **KIMI_LINEAR,
            "layer_types": [FULL, LINEAR, LINEAR, FULL],
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "q_lora_rank": 24,
            "attention_bias": True,
            "linear_conv_kernel_dim": 3,
            "linear_head_dim": 24,
            "linear_num_heads": 2,
        },
    ),
    "qwen4-exp": ("Qwen4ExpTextConfig", QWEN4_EXP),
    "qwen4-exp-plain": (
        "Qwen4ExpTextConfig",
        {
            **QWEN4_EXP,
            "layer_types": None,
            "full_attention_interval": 2,
            "ple_layer_ids": None,
            "output_gate_type": "sigmoid",
            "norm_topk_prob": False,
            "attention_bias": True,
            "indexer_compress_ratio": 12,
        },
    ),
}
