"""Every key of every family's configuration, changed in several ways and left out: is the reference's output ours?

A case is a `config.json` that differs from the family's in one key. The reference writes a tiny checkpoint with it and
runs it; our engine must give the same log-probabilities or refuse the checkpoint with an explanation.
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from penstock.engine.loading.keys import ABSENT
from penstock.engine.models.families import read_config
from penstock.engine.models.families.config_keys import reference_of
from penstock.engine.request import Request, SamplingParams
from penstock.errors import CheckpointError, PenstockError
from tests.engine.harness import drain, make_engine
from tests.engine.tiny.checkpoints import AutoModelForCausalLM

PROMPT = [(23 * i + i * i // 5) % 61 for i in range(60)]
PREFILL = 54
"""The reference computes the rest one token at a time, through its cache: some keys change that only."""

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GEMMA = {"head_dim": 12, "sliding_window": 20, "query_pre_attn_scalar": 10, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA4 = {"head_dim": 12, "global_head_dim": 16, "sliding_window": 20, "hidden_activation": "gelu_pytorch_tanh",
          "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 8.0,
          "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_theta": ABSENT}  # fmt: skip
GRANITE = {"hidden_act": "silu", "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
           "logits_scaling": 2.0}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
CSA, HCA, MSA = "compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse"
HYBRID = {
    "hidden_act": "silu", "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3,
    "full_attention_interval": 2,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "hidden_act": "silu", "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 3,
    "mamba_chunk_size": 16,
}  # fmt: skip
MAMBA_ALONE: dict[str, Any] = {"n_groups": 2, "conv_kernel": 3, "chunk_size": 16, "layer_norm_epsilon": 1e-4}
LFM2: dict[str, Any] = {"norm_eps": 1e-4, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2}
LATENT: dict[str, Any] = {
    "hidden_act": "silu", "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8,
    "v_head_dim": 6, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_group": 3, "topk_group": 2,
}  # fmt: skip
DSA: dict[str, Any] = {**LATENT, "q_lora_rank": 10, "index_topk": 20, "index_head_dim": 12, "index_n_heads": 12}
CORRECTED: dict[str, Any] = {
    "hidden_act": "silu", "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2,
    "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip
MUSE: dict[str, Any] = {
    "hidden_activation": "silu", "head_dim": 12, "sliding_window": 20, "final_logit_softcapping": 8.0,
    "output_multiplier": 0.6, "post_norm_eps": 1e-3, "qk_scale_factor": 1.5, "pad_token_id": None,
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu"},
    "mistral": {"hidden_act": "silu", "sliding_window": 20, "head_dim": 12},
    "mixtral": {"hidden_act": "silu", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20},
    "qwen2": {"hidden_act": "silu", "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    "qwen3": {"hidden_act": "silu", "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2,
              "head_dim": 12},
    "qwen3_moe": {"hidden_act": "silu", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "use_sliding_window": True, "sliding_window": 20, "head_dim": 12, "norm_topk_prob": True},
    "qwen3_next": {**HYBRID, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                   "shared_expert_intermediate_size": 24, "norm_topk_prob": True},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": {**HYBRID, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                         "shared_expert_intermediate_size": 24},
    "qwen4_exp_text": {**HYBRID, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                       "shared_expert_intermediate_size": 24, "hc_count": 3, "hc_lowrank": 6, "indexer_n_heads": 12,
                       "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 12,
                       "indexer_compress_ratio": 3, "ple_layer_ids": [1, 3], "ple_embed_dim": 24,
                       "heads_per_ngram": 2, "ngram_vocab_size_base": 40, "make_ngram_vocab_size_divisible_by": 8,
                       "split_ngram_parts": 2, "ple_conv_kernel_size": 3, "seed": 99, "eos_token_id": 5},
    "axk2": {**{key: value for key, value in DSA.items() if key != "first_k_dense_replace"}, "gated_norm_rank": 6},
    "hrm_text": {"hidden_act": "silu", "head_dim": 8, "num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 1,
                 "initializer_range": 0.1, "num_key_value_heads": ABSENT},
    "hy_v4": {**{key: value for key, value in DSA.items() if key != "first_k_dense_replace"}, "rms_norm_eps": 1e-4,
              "hc_mult": 3, "hc_magnitude": 1.5,
              "hc_eps": 1e-3, "swiglu_limit": 2.0},
    "gemma": {"hidden_act": "gelu_pytorch_tanh", "head_dim": 12},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    "gemma3_text": {**GEMMA, "sliding_window_pattern": 2, "rope_local_base_freq": 3000.0},
    "gemma4_text": {**GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61,
                    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "gemma4_unified_text": {**GEMMA4, "num_kv_shared_layers": 1, "use_double_wide_mlp": True},
    "cohere": {"hidden_act": "silu", "layer_norm_eps": 1e-4, "logit_scale": 0.3, "use_qk_norm": True},
    "cohere2": {"hidden_act": "silu", "layer_norm_eps": 1e-4, "logit_scale": 0.3, "sliding_window": 20,
                "sliding_window_pattern": 2},
    "exaone4": {"hidden_act": "silu", "sliding_window": 20, "sliding_window_pattern": 2},
    "glm4_moe": {"hidden_act": "silu", "head_dim": 12, "partial_rotary_factor": 0.75, "moe_intermediate_size": 16,
                 "n_routed_experts": 6, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1,
                 "routed_scaling_factor": 1.5, "use_qk_norm": True, "n_group": 2, "topk_group": 1},
    "llama4_text": {"hidden_act": "silu", "head_dim": 12, "intermediate_size_mlp": 40, "num_local_experts": 4,
                    "num_experts_per_tok": 1, "attention_chunk_size": 20, "no_rope_layer_interval": 2,
                    "floor_scale": 8, "attn_scale": 0.4, "interleave_moe_layer_step": 2},
    "glm4": {"hidden_act": "silu", "head_dim": 12, "partial_rotary_factor": 0.75},
    "gpt_oss": {"sliding_window": 20, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2,
                "attention_bias": True, "swiglu_limit": 2.0, "swiglu_alpha": 1.5, "rope_parameters": None},
    "granite": GRANITE,
    "ministral": {"hidden_act": "silu", "sliding_window": 20, "head_dim": 12},
    "granitemoe": {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    "granitemoehybrid": {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24,
                         "layer_types": ["linear_attention", FULL] * 2, **MAMBA, "position_embedding_type": "rope"},
    "bamba": {**MAMBA, "attn_layer_indices": [1], "attention_bias": True},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 48, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.6,
                  "mlp_multipliers": [0.7, 1.3], "key_multiplier": 0.6, "attention_in_multiplier": 0.9,
                  "attention_out_multiplier": 1.2, "ssm_in_multiplier": 0.8, "ssm_out_multiplier": 0.7,
                  "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "mamba_rms_norm": True},
    "nemotron_h": {**MAMBA_ALONE, "layers_block_type": ["linear_attention", "mlp", FULL, "moe"],
                   "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 3,
                   "topk_group": 2, "moe_shared_expert_intermediate_size": 24, "routed_scaling_factor": 1.5,
                   "mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 12, "mlp_hidden_act": "relu2",
                   "head_dim": 12, "num_hidden_layers": ABSENT},
    "mamba2": {**MAMBA_ALONE, "num_heads": 8, "head_dim": 8, "state_size": 12},
    "lfm2": {**LFM2, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.2},
    "lfm2_moe": {**LFM2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                 "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    "mistral4": {**LATENT, "q_lora_rank": 10, "rope_theta": ABSENT,
                 "rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "mscale": 1.0,
                                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 24,
                                     "llama_4_scaling_beta": 0.5}},
    "mistral_large4_text": {**LATENT, "index_topk": 20, "index_head_dim": 12, "index_n_heads": 12,
                            "final_logit_softcapping": 8.0, "no_rope_layer_interval": 2, "rope_theta": ABSENT,
                            "kv_source_layers": [0, 1, 0, 1],
                            "rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0,
                                                "original_max_position_embeddings": 24, "attention_factor": 1.2}},
    "ministral3": {"hidden_act": "silu", "head_dim": 12, "rope_theta": ABSENT,
                   "rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "mscale": 1.0,
                                       "mscale_all_dim": 1.0, "original_max_position_embeddings": 24,
                                       "llama_4_scaling_beta": 0.5}},
    "olmo2": {"hidden_act": "silu"},
    "olmoe": {"hidden_act": "silu", "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"hidden_act": "silu", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "shared_expert_intermediate_size": 24, "use_sliding_window": True, "sliding_window": 20,
                  "max_window_layers": 3},
    "smollm3": {"hidden_act": "silu", "no_rope_layer_interval": 2},
    "olmo3": {"hidden_act": "silu", "sliding_window": 20},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**LATENT, "q_lora_rank": 10},
    "deepseek_v32": DSA,
    "glm_moe_dsa": {**DSA, "index_topk_freq": 2, "rms_norm_eps": 1e-4},
    "deepseek_v4": {"hidden_act": "silu", "head_dim": 12, "num_key_value_heads": 1, "q_lora_rank": 10,
                    "qk_rope_head_dim": 8, "compress_ratios": [0, 4, 128, 4],
                    "compress_rates": {CSA: 4, HCA: 9}, "num_hash_layers": 1, "n_routed_experts": 6,
                    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": ABSENT,
                    "sliding_window": 20, "o_groups": 2, "o_lora_rank": 6, "index_n_heads": 12, "index_head_dim": 10,
                    "index_topk": 6, "swiglu_limit": 2.0, "hc_sinkhorn_iters": 5, "hc_eps": 1e-3},
    "seed_oss": {"hidden_act": "silu", "head_dim": 12, "attention_bias": True, "attention_out_bias": True},
    "ernie4_5": {"hidden_act": "silu", "head_dim": 12, "use_bias": True},
    "ernie4_5_moe": {"hidden_act": "silu", "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 16,
                     "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "hunyuan_v1_dense": {"hidden_act": "silu", "head_dim": 12, "rope_theta": ABSENT,
                         "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5000.0, "alpha": 20.0,
                                             "factor": 1.0}},
    "hunyuan_v1_moe": {"hidden_act": "silu", "head_dim": 12, "num_experts": 4, "moe_topk": 2},
    "minimax_m2": {"hidden_act": "silu", "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2,
                   "rotary_dim": 6},
    "glm4_moe_lite": {**{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
                      "q_lora_rank": 10},
    "exaone_moe": {**CORRECTED, "num_experts": 6, "num_shared_experts": 1, "sliding_window": 20, "head_dim": 12,
                   "sliding_window_pattern": 2},
    "dots1": {**CORRECTED, "n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 12,
              "sliding_window": 20, "max_window_layers": 2},
    "solar_open": {**CORRECTED, "n_routed_experts": 6, "n_shared_experts": 1, "head_dim": 12,
                   "attention_bias": True},
    "cwm": {"hidden_act": "silu", "sliding_window": 20, "head_dim": 12, "bos_token_id": 1},
    "arcee": {"hidden_act": "relu2", "head_dim": 12, "attention_bias": True, "mlp_bias": True},
    "flex_olmo": {"hidden_act": "silu", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "glm": {"hidden_act": "silu", "head_dim": 12, "partial_rotary_factor": 0.75, "attention_bias": True},
    "stablelm": {"hidden_act": "silu", "layer_norm_eps": 1e-4, "use_qkv_bias": True, "partial_rotary_factor": 0.75},
    "starcoder2": {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-4, "sliding_window": 20},
    "olmo": {"hidden_act": "silu", "clip_qkv": 1.0},
    "phi": {"hidden_act": "gelu_new", "layer_norm_eps": 1e-4, "partial_rotary_factor": 0.75},
    "helium": {"hidden_act": "silu", "head_dim": 8},
    "hyperclovax": {**GRANITE, "head_dim": 12},
    "jais2": {"hidden_act": "relu2", "layer_norm_eps": 1e-4, "head_dim": 12},
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-4, "head_dim": 12, "partial_rotary_factor": 0.75},
    "apertus": {"hidden_act": "xielu", "head_dim": 12, "attention_bias": True},
    "hy_v3": {"hidden_act": "silu", "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2,
              "moe_intermediate_size": 16, "router_scaling_factor": 1.5, "num_shared_experts": 1},
    "youtu": {**{key: LATENT[key] for key in ("hidden_act", "num_key_value_heads", "kv_lora_rank", "qk_nope_head_dim",
                                              "qk_rope_head_dim", "v_head_dim")}, "q_lora_rank": 10},
    "granite_swa": {**GRANITE, "sliding_window": 20},
    "granitemoe_swa": {**GRANITE, "sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
    "afmoe": {"hidden_act": "silu", "head_dim": 12, "sliding_window": 20, "global_attn_every_n_layers": 2,
              "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1,
              "num_shared_experts": 1, "route_scale": 1.5, "mup_enabled": True},
    "axk1": {**{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}, "q_lora_rank": 10},
    "minicpm3": {**{key: LATENT[key] for key in ("hidden_act", "num_key_value_heads", "kv_lora_rank",
                                                 "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
                 "q_lora_rank": 10, "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 8},
    "cohere2_moe": {"hidden_act": "silu", "layer_norm_eps": 1e-4, "logit_scale": 0.3, "sliding_window": 20,
                    "sliding_window_pattern": 2, "head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2,
                    "num_shared_experts": 1, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 40,
                    "rms_norm_eps": ABSENT},
    "kimi_linear": {**{key: value for key, value in LATENT.items() if key not in (
                        "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group")},
                    "num_experts": 6, "num_experts_per_token": 2, "num_shared_experts": 1, "num_expert_group": 3,
                    "layer_types": ["linear_attention", FULL, "linear_attention", FULL], "linear_head_dim": 8,
                    "linear_num_heads": 2, "linear_conv_kernel_dim": 3, "rope_theta": ABSENT},
    "glm5_next_text": {**{key: value for key, value in DSA.items() if key not in (
                           "first_k_dense_replace", "qk_rope_head_dim")},
                       "layer_types": ["linear_attention", "indexed_attention"] * 2, "index_kpool": 4,
                       "index_n_heads": 25,
                       "linear_head_dim": 8, "linear_num_heads": 2, "linear_conv_kernel_dim": 3, "swiglu_limit": 2.0,
                       "hc_sinkhorn_iters": 5, "hc_eps": 1e-3, "rope_theta": ABSENT},
    "mellum": {"hidden_act": "silu", "head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2,
               "moe_intermediate_size": 16, "sliding_window": 20, "layer_types": [FULL, SLIDING] * 2,
               "rope_theta": ABSENT,
               "rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 5000.0},
                                   SLIDING: {"rope_type": "default", "rope_theta": 700.0}}},
    "minimax_m3_vl_text": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16,
                           "dense_intermediate_size": 48, "shared_intermediate_size": 24, "index_n_heads": 2,
                           "index_head_dim": 12, "index_block_size": 7, "index_topk_blocks": 3,
                           "layer_types": [FULL, MSA, MSA, FULL], "mlp_layer_types": ["dense", "sparse"] * 2},
    "laguna": {"hidden_act": "silu", "head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2,
               "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "sliding_window": 20,
               "moe_routed_scaling_factor": 1.3, "layer_types": [FULL, SLIDING] * 2,
               "num_attention_heads_per_layer": [2, 4, 6, 2], "rope_theta": ABSENT,
               "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5}
                                   for kind in (FULL, SLIDING)}},
    "mimo_v2_flash": {**CORRECTED, "n_routed_experts": 6, "head_dim": 12, "v_head_dim": 8, "sliding_window": 20,
                      "layer_types": [FULL, SLIDING] * 2, "rope_theta": ABSENT,
                      "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 700.0,
                                                 "partial_rotary_factor": 0.5} for kind in (FULL, SLIDING)}},
    "step3p5": {"hidden_act": "silu", "head_dim": 12, "sliding_window": 20, "layer_types": [FULL, SLIDING] * 2,
                "num_sliding_attention_heads": 6, "n_routed_experts": 6, "num_experts_per_tok": 2,
                "moe_intermediate_size": 16, "share_expert_dim": 24, "moe_layers_enum": "1,2,3", "pad_token_id": 0,
                "moe_router_scaling_factor": 1.5, "swiglu_limits": [0.0, 0.3, None, 0.5],
                "swiglu_limits_shared": [0.4, 0.0, 0.6, None], "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0]},
    "muse_glimmer_text": MUSE,
    "muse_spark_text": {**{key: value for key, value in MUSE.items() if key != "hidden_activation"},
                        "hidden_act": "silu", "num_local_experts": 4, "num_experts_per_tok": 2,
                        "moe_intermediate_size": 16, "moe_hidden_size": 20, "routed_scaling_factor": 1.5,
                        "residual_gate_temperature": 0.7, "mlp_layer_types": ["sparse", "dense"] * 2},
    "phi3": {"hidden_act": "silu", "sliding_window": 20, "original_max_position_embeddings": 96, "pad_token_id": None},
}  # fmt: skip
"""Small enough to be quick; every key that matters has a value that shows in the output."""

ACTIVATIONS = ("relu", "silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "", 3)
LAYER_TYPES = (
    [FULL] * 4, [SLIDING] * 4, [FULL, SLIDING] * 2, [SLIDING, FULL, FULL, FULL], ["attention"] * 4,
    ["linear_attention"] * 4, [FULL, "linear_attention"] * 2, ["conv", "conv", FULL, "conv"],
    [FULL] * 3, ["chunked_attention"] * 4, ["linear_attention", FULL, FULL, FULL], "full", 3,
    [SLIDING, CSA, HCA, CSA], [SLIDING, HCA] * 2, [MSA] * 4, [MSA, FULL] * 2,
)  # fmt: skip
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}  # fmt: skip
ROPES: tuple[Any, ...] = (
    {}, {"rope_type": "default"}, {"rope_theta": 700.0}, {"rope_type": "default", "factor": 3.0}, {"rope_theta": None},
    {"rope_type": "linear", "factor": 2.0}, {"type": "linear", "factor": 2.0, "rope_theta": 700.0},
    {"rope_type": "linear"}, {"rope_type": "linear", "factor": None}, {"rope_type": "linear", "factor": 0.5},
    {"type": "linear", "rope_type": "default", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "proportional", "factor": 2.0}, {"rope_type": "axial"},
    LLAMA3, {**LLAMA3, "original_max_position_embeddings": None}, {**LLAMA3, "high_freq_factor": 2.0},
    {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"},
    YARN, {**YARN, "factor": None}, {"rope_type": "yarn", "factor": 4.0}, {**YARN, "attention_factor": 1.7},
    {**YARN, "beta_fast": 8.0, "beta_slow": 2.0}, {**YARN, "beta_fast": 1.0, "beta_slow": 32.0},
    {**YARN, "beta_fast": None, "beta_slow": 0}, {**YARN, "truncate": False}, {**YARN, "truncate": None},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}, {**YARN, "mscale": 0.7}, {**YARN, "factor": 0.5},
    {**YARN, "original_max_position_embeddings": None}, {**YARN, "mrope_section": [1, 1, 2]},
    {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 96},
    {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 24},
    {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 24, "factor": 2.0},
    {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 24, "attention_factor": 1.3},
    {"rope_type": "su", **FACTORS}, {"type": "yarn", **FACTORS, "factor": 2.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5}, {"rope_type": "default", "partial_rotary_factor": 1.0},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    {FULL: {"rope_type": "linear", "factor": 2.0}, SLIDING: {"rope_type": "default", "rope_theta": 700.0}},
    {FULL: {**YARN, "truncate": False}, SLIDING: {"rope_type": "default"}}, {FULL: LLAMA3}, {FULL: None},
    {FULL: {"rope_type": "default", "partial_rotary_factor": 0.5}}, {SLIDING: {"rope_type": "linear", "factor": 3.0}},
    {FULL: {"type": "linear", "factor": 3.0}}, {FULL: {**YARN}, "truncate": False}, [1.0], "linear",
)  # fmt: skip
SPECIAL: dict[str, tuple[Any, ...]] = {
    # Few heads leave many scores at zero, and which of equals the reference chooses depends on how many there are.
    "index_n_heads": (24, 13, 0, 12.0, None),
    "indexer_n_heads": (24, 13, 0, 12.0, None),
    "index_kpool": (1, 2, 5, 10, 3, 0, None, 4.0),
    "linear_lower_bound": (-1.0, -20, None, 0.0, "x"),
    "linear_attn_config": ({"head_dim": 6}, {"gate_lower_bound": None}, {"gate_lower_bound": None, "safe_gate": False},
                           {"num_heads": 3, "short_conv_kernel_size": 2}, {"full_attn_layers": [1]}, {}, None, [1]),
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "layer_types": LAYER_TYPES,
    # A bound that does not bind: the reference's one-token step has none, its pass over whole sequences does.
    "time_step_min": (0.0, 1e-4, None, "x"),
    "mamba_dt_min": (0.0, 1e-4, None, "x"),
    "index_block_size": (1, 5, 16, 0, None, 7.0),
    "index_topk_blocks": (1, 2, 50, 0, None),
    "index_local_blocks": (0, 2, 3, 4, -1, None),
    "sparse_attention_config": ({"sparse_topk_blocks": 2}, {"sparse_attention_freq": [0, 1, 1, 0]}, {}, None, [1],
                                {"sparse_block_size": 5, "sparse_local_block": 0, "sparse_num_index_heads": 1}),
    "moe_layer_freq": ([0, 1, 1, 0], [1] * 3, 1, None),
    "gating": (False, "per-head", "per-element", "other", 1, None),
    "moe_router_logit_softcapping": (0.7, 3, -1.0, None, "x"),
    "num_attention_heads_per_layer": ([2] * 4, [4, 2, 2, 4], [2, 3, 2, 2], [2] * 3, [2, None, 2, 2], None, 4),
    "mlp_layer_types": (["dense", "sparse"] * 2, ["sparse"] * 4, ["dense"] * 4, ["dense"], ["other"] * 4, "sparse", 3,
                        ["moe", "hash_moe"] * 2, ["hash_moe"] * 3),
    "compress_ratios": ([4, 0, 0, 128, 4], [0] * 4, [0, 4], [2] * 4, 4, []),
    "compress_rates": ({CSA: 3, HCA: 16}, {CSA: 5}, {CSA: 0, HCA: 2}, {}, [4, 8], "4"),
    "compress_rate_csa": (2, 7, 0, None, "x"),
    "num_hash_layers": (0, 3, 9, -1, None),
    "qk_rope_head_dim": (4, 12, 7, 0, None, 24),
    "scoring_func": ("sigmoid", "softmax", "relu", "x", None, 3),
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "sliding_window": (None, 0, 1, 7, 1000, "7", -3),
    "sliding_window_pattern": (None, 0, 1, 3, 6),
    "max_window_layers": (0, 1, 3, 9, -1, None),
    "layer_rope_theta": ([0, 5000.0] * 2, [5000] * 4, [0] * 4, [0, 700.0] * 2, [0] * 3, [None] * 4, "x", 3),
    "swiglu_limits": (None, [], [0.2] * 4, [0.2] * 3, [0.2] * 6, [-1.0] * 4, ["x"] * 4, 0.5),
    "swiglu_limits_shared": (None, [], [0.2] * 4, [0.2] * 3, [0.2] * 6, [-1.0] * 4, ["x"] * 4, 0.5),
    "partial_rotary_factors": (None, [], [0.75] * 4, [0.5] * 3, [0.5, 1.0, 0.75, 1.0], [0.0] * 4, 0.5),
    "moe_layers_enum": ("", "2", "0,1,2,3", " 1, 3,", [1, 2], [], "a", 3, [1.5], None),
    "attention_other_setting": ({"num_attention_heads": 2}, {}, {"num_attention_groups": 1}, {"head_dim": 16}, "x",
                                None),
    "num_nextn_predict_layers": (0, 1, -1, None, "x"),
    "max_position_embeddings": (61, 200, None, "200"),
    "intermediate_size": (96, 49, 0, None),
    "mlp_only_layers": (None, [], [1], [0, 2], [9]),
    "per_layer_config": (None, {}, {"1": {"sliding_window": 5}}, {"1": {"num_key_value_heads": 4}},
                         {"1": {"num_attention_heads": 2}, "3": {"num_attention_heads": 2}},
                         {"0": {"num_attention_heads": 8}, "2": {"num_attention_heads": 8}},
                         {"1": {"num_attention_heads": 2}}),
    "head_dim": (None, 8, 10, 7, 0),
    "partial_rotary_factor": (None, 0.5, 1.0, 0.25),
    "original_max_position_embeddings": (24, 48, 96, None),
    "text_config": (None, {}, {"model_type": "llama"}),
    "architectures": (None, [], ["OtherForCausalLM"]),
    "dtype": (None, "bfloat16", "float16"),
    "torch_dtype": (None, "bfloat16", "float16"),
    "id2label": (None, {"0": "a"}),
    "label2id": (None, {"a": 0}),
    "attn_implementation": ("eager",),
    "_attn_implementation": ("eager",),
    "experts_implementation": ("eager",),
    "_experts_implementation": ("eager",),
}  # fmt: skip
SKIPPED = ("quantization_config", "transformers_version", "name_or_path", "_name_or_path", "_commit_hash", "auto_map")
"""Quantization has tests of its own; the others are names, and `auto_map` needs code beside the checkpoint."""
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Never left out here: the reference's defaults are those of whole models."""
PAIRS: dict[str, tuple[dict[str, Any], ...]] = {
    "rope keys of both ages": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 700.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": YARN},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": YARN, "rope_parameters": {FULL: {"rope_theta": 700.0}, SLIDING: {"rope_theta": 90.0}}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": ABSENT},
    ),
    "lengths inside and outside": (
        {"rope_parameters": {**YARN, "truncate": False}, "original_max_position_embeddings": 48},
        {"rope_scaling": {**YARN, "truncate": False, "original_max_position_embeddings": None},
         "original_max_position_embeddings": 48},
        {"rope_parameters": {**YARN, "factor": None}, "original_max_position_embeddings": 48},
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 48},
        {"rope_scaling": {"rope_type": "longrope", **FACTORS}, "original_max_position_embeddings": 24},
        {"rope_scaling": {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 48},
         "original_max_position_embeddings": 24},
        {"rope_scaling": {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 24},
         "original_max_position_embeddings": ABSENT},
        {"rope_parameters": YARN, "partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default"}, "partial_rotary_factor": 0.5},
    ),
    "windows": (
        {"use_sliding_window": False, "layer_types": [SLIDING] * 4},
        {"use_sliding_window": True, "sliding_window": None},
        {"sliding_window": None, "layer_types": [FULL] * 4},
        {"sliding_window": None, "layer_types": [SLIDING] * 4},
        {"layer_types": [FULL, SLIDING] * 2, "sliding_window_pattern": 3},
        {"layer_types": ABSENT, "sliding_window_pattern": ABSENT, "_sliding_window_pattern": 3},
    ),
    "biases": ({"attention_bias": True, "mlp_bias": True},),
    "experts": ({"num_experts": 3, "num_local_experts": 5}, {"num_experts": 3}, {"num_experts_per_tok": 1}),
}  # fmt: skip
"""Cases in which several keys meet."""


OWN: dict[str, tuple[dict[str, Any], ...]] = {
    "glm5_next_text": (
        {"layer_types": ["indexed_attention"] * 4, "indexer_types": ["full", "shared"] * 2},
        {"layer_types": ["indexed_attention"] * 4, "index_topk_freq": 2},
        {"layer_types": ["indexed_attention"] * 4, "index_topk_freq": 2, "index_skip_topk_offset": 1},
        {"layer_types": ["indexed_attention"] * 4, "index_topk_pattern": "FSFF"},
        *({"indexer_types": kinds} for kinds in (["full"] * 4, ["shared", "full"] * 2, ["full"] * 3, "full")),
        {"layer_types": ["linear_attention"] * 2 + ["indexed_attention", FULL]},
        {"index_kpool": 1, "index_kpool_always_select_tail": False}, {"index_kpool": 20}, {"index_topk": 100},
        {"linear_attn_config": {"gate_lower_bound": None}, "linear_lower_bound": -2.0},
        {"linear_attn_config": {}, "linear_lower_bound": None},
        {"mlp_layer_types": ["sparse"] * 4, "num_local_experts": 9, "n_group": 1, "topk_group": 1},
    ),
    "step3p5": (
        {"layer_types": [FULL, SLIDING] * 2 + [SLIDING], "num_nextn_predict_layers": 1},
        {"rope_theta": [90.0, 700.0] * 2 + [3.0], "swiglu_limits": [0.2] * 5, "num_nextn_predict_layers": 1},
        {"layer_types": [FULL, SLIDING] * 2 + [SLIDING], "num_mtp_layers": 1},
        {"num_sliding_attention_heads": ABSENT, "attention_other_setting": {"num_attention_heads": 2}},
        {"num_sliding_attention_heads": ABSENT, "attention_other_setting": {"num_attention_groups": 1}},
        {"n_routed_experts": ABSENT, "moe_num_experts": 4}, {"num_experts_per_tok": ABSENT, "moe_top_k": 3},
        {"moe_num_experts": 4}, {"moe_top_k": 3}, {"num_attention_groups": 1}, {"share_expert_dims": 20},
        {"moe_layers_enum": "1", "mlp_layer_types": ["dense", "sparse"] * 2},
        {"rope_scaling": LLAMA3, "rope_theta": [90.0, 700.0] * 2},
        *({"rope_theta": value} for value in ([90.0, 700.0] * 2, [700.0] * 3, [90.0, 700.0, 80.0, 60.0], [None] * 4)),
    ),
}  # fmt: skip
"""Further cases of one family."""


@dataclass(frozen=True, slots=True)
class Case:
    family: str
    changes: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        merged = {"model_type": self.family, **SMALL, **BASES[self.family], **self.changes}
        return {key: value for key, value in merged.items() if value is not ABSENT}

    def __str__(self) -> str:
        shown = ", ".join(f"{key}: {'(left out)' if v is ABSENT else repr(v)}" for key, v in self.changes.items())
        return f"{self.family} {{{shown}}}"


def cases(family: str) -> Iterator[Case]:
    base = Case(family, {}).config
    for key, default in {**reference_of(family), **base}.items():
        if key in SKIPPED or key == "model_type":
            continue
        now = base.get(key, default)
        seen = [repr(now)]
        for value in values(key, now):
            left_out = value is ABSENT and (key in SIZES or key not in base)
            if repr(value) not in seen and not left_out:
                seen.append(repr(value))
                yield Case(family, {key: value})
    for changes in itertools.chain(*PAIRS.values(), OWN.get(family, ())):
        yield Case(family, changes)


def values(key: str, now: Any) -> tuple[Any, ...]:
    """Others than `now`, by its type; `ABSENT` leaves the key out."""
    if key in SPECIAL:
        return (*SPECIAL[key], ABSENT)
    if isinstance(now, bool):
        return (not now, None, ABSENT)
    if isinstance(now, int):
        return (now * 2, now + 1, 1, 0, float(now), None, ABSENT)
    if isinstance(now, float):
        return (now * 2, now + 0.5, 0.0, str(now), None, ABSENT)
    return (True, False, 1, 0.5, "x", {}, [], None) if now is ABSENT else (True, 1, 0.5, "x", {}, ABSENT)


class ReferenceFailed(Exception):
    """The reference rejects the configuration, or cannot run it."""


def write_weights(config: dict[str, Any], folder: Path) -> torch.nn.Module:
    """A checkpoint that the reference makes of `config`, which is stored as it is."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    parsed = AutoConfig.from_pretrained(folder)
    parsed.dtype = None
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(parsed, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2 if "norm" in name else 0.35)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return model


def reference_scores(config: dict[str, Any], folder: Path) -> torch.Tensor:
    """Log-probability of each token after the first."""
    try:
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            model = write_weights(config, folder)
            output = model(torch.tensor([PROMPT[:PREFILL]]), use_cache=True)
            logits = [output.logits[0]]
            for at, token in enumerate(PROMPT[PREFILL:-1], PREFILL):
                # Positions are given as `generate` gives them: Bamba counts from zero otherwise.
                cached = {"past_key_values": output.get("past_key_values"), "position_ids": torch.tensor([[at]])}
                if cached["past_key_values"] is None:  # Mamba-2 has another name for it, and no positions
                    cached = {"cache_params": output.cache_params}
                output = model(torch.tensor([[token]]), **cached, use_cache=True)
                logits.append(output.logits[0])
            scores = torch.cat(logits).log_softmax(-1).gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1)).squeeze(1)
    except Exception as error:
        raise ReferenceFailed(f"{type(error).__name__}: {error}") from error
    if not math.isfinite(float(scores.sum())):
        raise ReferenceFailed("not a number")
    return scores


def our_scores(folder: Path) -> torch.Tensor:
    engine = make_engine(folder, num_blocks=16, weights="dense", max_running=2, threads=1)
    engine.submit(Request("a", PROMPT, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)))
    first = drain(engine)[0]
    assert first.prompt_logprobs is not None
    return torch.tensor([part.logprob for part in first.prompt_logprobs if part is not None])


def verdict(case: Case, folder: Path) -> str:
    """`equal`, `refused: ...`, `reference failed: ...`; anything else is a fault of ours."""
    try:
        read_config(case.config)  # what is refused by its configuration need not be computed
    except CheckpointError as error:
        return f"refused: {error}"
    try:
        expected = reference_scores(case.config, folder)
    except ReferenceFailed as error:
        return f"reference failed: {error}"
    try:
        found = our_scores(folder)
    except PenstockError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"CRASHED: {type(error).__name__}: {error}"
    worst = float((found - expected).abs().max())
    # Sums in another order move these scores by up to 0.0022; a key that is ignored, by far more.
    return "equal" if worst < 4e-3 else f"DIFFERENT by {worst:.4f}"
