"""Tiny random checkpoints of every family, written by `transformers`, and greedy references from it."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

# The library lists this decoder only among models that also take images, and releases before 5.18 skip a `register` of
# their own classes.
AutoModelForCausalLM._model_mapping._extra_content[transformers.Mistral4Config] = transformers.Mistral4ForCausalLM

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
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 1024,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
}
GEMMA: dict[str, Any] = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 40}
QWEN_MOE: dict[str, Any] = {"head_dim": 32, "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32}

DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256,
    "mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
MISTRAL4_ROPE = {**DEEPSEEK_ROPE, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.7}
MISTRAL4: dict[str, Any] = {**DEEPSEEK, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
V2_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 4.0}
DSA: dict[str, Any] = {**DEEPSEEK, "index_topk": 24, "index_head_dim": 12, "index_n_heads": 16}
V4_MIXERS = ("compressed_sparse_attention", "heavily_compressed_attention")
DEEPSEEK_V4: dict[str, Any] = {
    "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8,
    "layer_types": ["sliding_attention", *V4_MIXERS, V4_MIXERS[0]],
    "compress_rates": {V4_MIXERS[0]: 4, V4_MIXERS[1]: 32},
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"], "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "intermediate_size": 24, "sliding_window": 24, "o_groups": 2, "o_lora_rank": 12,
    "index_n_heads": 16, "index_head_dim": 12, "index_topk": 8, "swiglu_limit": 3.0, "hc_sinkhorn_iters": 4,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "full_attention_interval": 2,
}

GPT_OSS: dict[str, Any] = {
    "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 4, "sliding_window": 40, "swiglu_limit": 3.0,
}  # fmt: skip
GPT_OSS_ROPE = {**YARN_ROPE, "truncate": False}

FULL, SLIDING = "full_attention", "sliding_attention"
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.11,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
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
AXK2: dict[str, Any] = {
    **{key: value for key, value in DSA.items() if key != "first_k_dense_replace"}, "gated_norm_rank": 6,
}  # fmt: skip
HY_V4: dict[str, Any] = {
    **{key: value for key, value in DSA.items() if key != "first_k_dense_replace"}, "num_hidden_layers": 4,
    "indexer_types": ["full", "shared", "full", "shared"], "hc_mult": 3, "hc_magnitude": 1.5, "swiglu_limit": 3.0,
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
GEMMA4: dict[str, Any] = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 40, "num_hidden_layers": 4,
    "layer_types": [SLIDING, SLIDING, FULL, FULL], "hidden_size_per_layer_input": 0, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA4_MOE: dict[str, Any] = {
    "enable_moe_block": True, "num_experts": 12, "top_k_experts": 3, "moe_intermediate_size": 32,
}  # fmt: skip
GEMMA4_SMALL: dict[str, Any] = {
    "num_hidden_layers": 6, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL], "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 199, "use_double_wide_mlp": True,
}  # fmt: skip
QWEN2_MOE = {
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MINISTRAL3_ROPE = {**YARN_ROPE, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.7, "mscale": 1.0,
                   "mscale_all_dim": 1.0}  # fmt: skip
OLMO3_ROPES = {FULL: YARN_ROPE, SLIDING: {"rope_type": "default", "rope_theta": 10000.0}}
HALF_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
THREE_QUARTERS = {**HALF_ROPE, "partial_rotary_factor": 0.75}
LLAMA4: dict[str, Any] = {"head_dim": 32, "intermediate_size_mlp": 112, "num_local_experts": 4, "attn_scale": 0.3}
GLM_MOE: dict[str, Any] = {
    "head_dim": 32, "moe_intermediate_size": 32, "n_routed_experts": 12, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "num_mtp_layers": 0,
}  # fmt: skip
ERNIE_MOE: dict[str, Any] = {
    "moe_num_experts": 12, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2,
}  # fmt: skip
ALPHA_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
HUNYUAN_MOE: dict[str, Any] = {"head_dim": 32, "num_experts": 8, "moe_topk": 3}
MINIMAX_M2: dict[str, Any] = {"head_dim": 32, "num_local_experts": 12, "num_experts_per_tok": 3}
CORRECTED: dict[str, Any] = {
    "moe_intermediate_size": 32, "num_experts_per_tok": 3, "routed_scaling_factor": 1.7, "norm_topk_prob": True,
}  # fmt: skip
GLM4_LITE: dict[str, Any] = {
    **{key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"}, **CORRECTED,
}  # fmt: skip
EXAONE_MOE: dict[str, Any] = {
    **CORRECTED, "head_dim": 32, "num_experts": 12, "sliding_window": 40, "num_shared_experts": 1,
}  # fmt: skip
DOTS1: dict[str, Any] = {
    **CORRECTED, "head_dim": 32, "n_routed_experts": 12, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "sliding_window": None,
}  # fmt: skip
SOLAR: dict[str, Any] = {**CORRECTED, "head_dim": 32, "n_routed_experts": 12, "n_shared_experts": 1}
TWO_IN_THREE = ["sliding_attention", "full_attention", "sliding_attention"]

MIMO_V2: dict[str, Any] = {
    "head_dim": 24, "v_head_dim": 16, "sliding_window": 40, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}  # fmt: skip
HY_V3: dict[str, Any] = {
    "head_dim": 32, "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "router_scaling_factor": 1.7,
}  # fmt: skip
AFMOE: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 32, "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "sliding_window": 40,
}  # fmt: skip
YOUTU: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}  # fmt: skip
AXK1: dict[str, Any] = {key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"}
COHERE_MOE: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "sliding_window": 40,
    "sliding_window_pattern": 2, "logit_scale": 0.3,
}  # fmt: skip

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
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": 100}),
    "qwen3-moe": ("Qwen3MoeConfig", {**QWEN_MOE, "norm_topk_prob": True}),
    "qwen3-moe-some-dense": ("Qwen3MoeConfig", {**QWEN_MOE, "mlp_only_layers": [1]}),
    "qwen3-next": ("Qwen3NextConfig", {**HYBRID, **QWEN_MOE, "shared_expert_intermediate_size": 48}),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**HYBRID, **QWEN_MOE, "shared_expert_intermediate_size": 48}),
    "qwen3-next-dense": ("Qwen3NextConfig", {**HYBRID, "num_experts": 0}),
    "qwen3.5": ("Qwen3_5TextConfig", {**HYBRID, "linear_num_key_heads": 4, "tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "gemma2": ("Gemma2Config", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "gemma3-two-ropes": ("Gemma3TextConfig", {**GEMMA, "sliding_window_pattern": 2, "num_key_value_heads": 1}),
    "deepseek-v2-lite": ("DeepseekV2Config", {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": DEEPSEEK_ROPE}),
    "deepseek-v2-groups": ("DeepseekV2Config", {**DEEPSEEK, **V2_GROUPS, "attention_bias": True, "mlp_bias": True}),
    "deepseek-v3": ("DeepseekV3Config", {**DEEPSEEK, "n_group": 4, "topk_group": 2, "rope_parameters": DEEPSEEK_ROPE}),
    "deepseek-v3-halves": (
        "DeepseekV3Config",
        {
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "q_lora_rank": None,
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "n_shared_experts": 1,
        },
    ),
    "deepseek-v32": ("DeepseekV32Config", {**DSA, "n_group": 4, "topk_group": 2, "rope_parameters": DEEPSEEK_ROPE}),
    "glm-dsa": (
        "GlmMoeDsaConfig",
        {**DSA, "n_group": 1, "topk_group": 1, "indexer_types": ["full", "full", "shared"], "attention_bias": True},
    ),
    "deepseek-v4": ("DeepseekV4Config", {**DEEPSEEK_V4, "rope_parameters": YARN_ROPE}),
    "gpt-oss": ("GptOssConfig", {**GPT_OSS, "rope_parameters": GPT_OSS_ROPE}),
    "granite": ("GraniteConfig", GRANITE),
    "ministral": ("MinistralConfig", {"head_dim": 32, "sliding_window": 40, "layer_types": [SLIDING, FULL, SLIDING]}),
    "granite-moe": ("GraniteMoeConfig", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "granite-moe-shared": (
        "GraniteMoeSharedConfig",
        {**GRANITE, "num_local_experts": 5, "shared_intermediate_size": 48},
    ),
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
    "qwen2-moe": ("Qwen2MoeConfig", {**QWEN2_MOE, "mlp_only_layers": [1]}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3}),
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
    "glm4": ("Glm4Config", {"head_dim": 32}),
    "seed-oss": ("SeedOssConfig", {"head_dim": 24}),
    "seed-oss-biased": ("SeedOssConfig", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "ernie4.5": ("Ernie4_5Config", {"head_dim": 24}),
    "ernie4.5-biased": ("Ernie4_5Config", {"use_bias": True, "rope_parameters": LLAMA3_ROPE}),
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
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 32, "rope_parameters": ALPHA_ROPE}),
    "hunyuan-biased": (
        "HunYuanDenseV1Config",
        {"head_dim": 16, "attention_bias": True, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "hunyuan-moe": ("HunYuanMoEV1Config", {**HUNYUAN_MOE, "rope_parameters": ALPHA_ROPE}),
    "minimax-m2": ("MiniMaxM2Config", {**MINIMAX_M2, "rope_parameters": HALF_ROPE}),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", GLM4_LITE),
    "glm4-moe-lite-some-dense": (
        "Glm4MoeLiteConfig",
        {**GLM4_LITE, "mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": None, "rope_interleave": False},
    ),
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
    "cwm": ("CwmConfig", {"bos_token_id": 1, "head_dim": 32, "sliding_window": 40, "rope_parameters": LLAMA3_ROPE}),
    "arcee": ("ArceeConfig", {}),
    "arcee-biased": ("ArceeConfig", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN_ROPE}),
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
    "gemma4": ("Gemma4TextConfig", {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-experts": ("Gemma4TextConfig", {**GEMMA4, **GEMMA4_MOE, "final_logit_softcapping": 8.0}),
    "gemma4-small": ("Gemma4TextConfig", {**GEMMA4, **GEMMA4_SMALL}),
    "gemma4-unified": ("Gemma4UnifiedTextConfig", {**GEMMA4, "attention_bias": True, "tie_word_embeddings": True}),
    "mistral4": ("Mistral4Config", {**MISTRAL4, "rope_parameters": MISTRAL4_ROPE}),
    "mistral4-halves": (
        "Mistral4Config",
        {
            **MISTRAL4,
            "rope_parameters": {**MISTRAL4_ROPE, "mscale_all_dim": 0.0},
            "rope_interleave": False,
            "q_lora_rank": None,
            "attention_bias": True,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
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
    "hy-v3": ("HYV3Config", {**HY_V3, "num_shared_experts": 2}),
    "hy-v3-some-dense": (
        "HYV3Config",
        {**HY_V3, "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True, "mlp_bias": True},
    ),
    "youtu": ("YoutuConfig", YOUTU),
    "youtu-halves": ("YoutuConfig", {**YOUTU, "q_lora_rank": None, "rope_interleave": False, "attention_bias": True}),
    "granite-swa": ("GraniteSWAConfig", {**GRANITE, "sliding_window": 40, "layer_rope_theta": [0, 500.0, 10000.0]}),
    "granite-swa-biased": (
        "GraniteSWAConfig",
        {"sliding_window": 40, "attention_bias": True, "mlp_bias": True, "layer_types": TWO_IN_THREE},
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
    "stablelm-head-norms": (
        "StableLmConfig",
        {"use_parallel_residual": True, "qk_layernorm": True, "layer_norm_eps": 1e-4},
    ),
    "axk1": ("AXK1Config", {**AXK1, "n_group": 4, "topk_group": 2, "rope_parameters": DEEPSEEK_ROPE}),
    "axk1-some-dense": (
        "AXK1Config",
        {
            **AXK1,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "attention_bias": True,
        },
    ),
    "minicpm3": ("MiniCPM3Config", {**YOUTU, "dim_model_base": 16, "scale_emb": 3}),
    "minicpm3-plain": (
        "MiniCPM3Config",
        {
            **YOUTU,
            "q_lora_rank": None,
            "v_head_dim": None,
            "scale_depth": None,
            "dim_model_base": None,
            "attention_bias": True,
            "mlp_bias": True,
        },
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
    "axk2": ("AXK2Config", {**AXK2, "n_group": 4, "topk_group": 2}),
    "axk2-plain": (
        "AXK2Config",
        {
            **AXK2,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": DEEPSEEK_ROPE,
            "attention_bias": True,
        },
    ),
    "hy-v4": ("HYV4Config", HY_V4),
    "hy-v4-some-dense": (
        "HYV4Config",
        {
            **HY_V4,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "indexer_types": None,
            "rms_norm_eps": 1e-3,
            "hc_eps": 1e-3,
        },
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
    "phi3-longrope": ("Phi3Config", {"original_max_position_embeddings": 1024, "rope_parameters": LONG_ROPE}),
}


def write_checkpoint(
    family: str, folder: Path, *, shard_size: str = "5GB", spread: float = 1.0, **changes: Any
) -> Path:
    """A reproducible random checkpoint of `family`, with `changes` to its configuration, as a folder of safetensors.

    With `spread` below 1 the weights are smaller and rounding errors grow less from layer to layer. One that this
    process has written before is copied, and the random generator left as writing it would.
    """
    name, overrides = FAMILIES[family]
    values = {**COMMON, **overrides, **changes}
    make_config = getattr(transformers, name)
    try:
        key = json.dumps([family, name, shard_size, spread, values])
    except TypeError:  # values that have no text
        return _write(family, folder, make_config(**values), shard_size, spread)
    if key not in _WRITTEN:
        kept = _write(family, _shelf() / str(len(_WRITTEN)), make_config(**values), shard_size, spread)
        _WRITTEN[key] = kept, torch.get_rng_state()
    kept, state = _WRITTEN[key]
    torch.set_rng_state(state)
    shutil.copytree(kept, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
    return folder


_WRITTEN: dict[str, tuple[Path, torch.Tensor]] = {}
"""The folder of each, and the state of the random generator behind it."""


@functools.cache
def _shelf() -> Path:
    """Where this process keeps what it has written; processes that it forks leave it alone."""
    folder, owner = Path(tempfile.mkdtemp(prefix="penstock-tiny-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def _write(family: str, folder: Path, config: Any, shard_size: str, spread: float) -> Path:
    torch.manual_seed(sum(map(ord, family)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0, 0.4)
            elif key.endswith("sinks"):
                parameter.normal_(0, 2)
            elif ("norm" in key and "norm.mlp" not in key) or key.endswith(("router.scale", "per_expert_scale")):
                parameter.normal_(1, 0.2)
            elif key.endswith((".A_log", ".D", ".alpha_p", ".alpha_n")):
                parameter.normal_(0, 0.7)
            elif key.endswith("z_L_init"):
                parameter.normal_(0, 1)
            elif key.endswith(("_hc.base", "hc_head.hc_base", "ple.conv1d.weight")):
                parameter.normal_(0, 0.5)
            else:
                parameter.mul_(spread)
        for key, buffer in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.2)
                if family.startswith("axk2"):  # below zero, experts of all other groups are tied
                    buffer.abs_()
            elif key.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.2)
            elif key.endswith("tid2eid"):
                choices = torch.rand(len(buffer), config.n_routed_experts)
                buffer.copy_(choices.topk(buffer.shape[1]).indices)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


class Reference:
    """Greedy generation by `transformers` in float32."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()
        for module in self.model.modules():  # transformers before 5.18 ignores the configured limit of gpt-oss
            if module.__class__.__name__ == "GptOssExperts":
                module.limit = self.model.config.swiglu_limit

    @torch.inference_mode()
    def margins(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """How far the logit of each output token is below the largest, given all tokens before it."""
        logits = self.model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        return logits.amax(-1) - logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)

    @torch.inference_mode()
    def margins_by_rounding(self, prompt: list[int], output: list[int], moves: int = 8) -> torch.Tensor:
        """The same, of each token the smallest of this model and some whose weights are moved by about what sums in
        another order are: where two tokens or experts to choose are nearly tied, that decides which one is."""
        found, generator = self.margins(prompt, output), torch.Generator()
        weights = {key: weight.clone() for key, weight in self.model.named_parameters()}
        for seed in range(moves):
            generator.manual_seed(seed)
            for key, weight in self.model.named_parameters():
                weight.copy_(weights[key] * (1 + 1e-6 * torch.randn(weight.shape, generator=generator)))
            found = found.minimum(self.margins(prompt, output))
        for key, weight in self.model.named_parameters():
            weight.copy_(weights[key])
        return found

    def agrees(self, prompt: list[int], output: list[int], tie: float = 0.0) -> bool:
        """Whether greedy decoding of `prompt` gives `output`; logits no more than `tie` apart count as equal."""
        return bool(output) and float(self.margins(prompt, output).max()) <= tie

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
