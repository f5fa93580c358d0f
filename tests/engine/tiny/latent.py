"""Families of latent attention, some of which choose what they attend to."""

from __future__ import annotations

from typing import Any

from tests.engine.tiny.common import CORRECTED, YARN_ROPE

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
AXK2: dict[str, Any] = {
    **{key: value for key, value in DSA.items() if key != "first_k_dense_replace"}, "gated_norm_rank": 6,
}  # fmt: skip
HY_V4: dict[str, Any] = {
    **{key: value for key, value in DSA.items() if key != "first_k_dense_replace"}, "num_hidden_layers": 4,
    "indexer_types": ["full", "shared", "full", "shared"], "hc_mult": 3, "hc_magnitude": 1.5, "swiglu_limit": 3.0,
}  # fmt: skip
MISTRAL_LARGE4: dict[str, Any] = {
    "num_hidden_layers": 5, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "index_topk": 24, "index_head_dim": 12, "index_n_heads": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "final_logit_softcapping": 20.0,
    "indexer_types": ["full", "full", "full", "full", "shared"], "no_rope_layers": [1, 0, 1, 0, 0],
    "kv_source_layers": [0, 1, 2, 1, 1], "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
}  # fmt: skip
GLM5_NEXT: dict[str, Any] = {
    "num_hidden_layers": 5, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "layer_types": [*["linear_attention"] * 2, "indexed_attention", "linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", *["sparse"] * 4], "index_topk": 24, "index_head_dim": 12, "index_n_heads": 16,
    "index_kpool": 4, "linear_head_dim": 16, "linear_num_heads": 4, "swiglu_limit": 1.5, "hc_sinkhorn_iters": 4,
}  # fmt: skip
GLM4_LITE: dict[str, Any] = {
    **{key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"}, **CORRECTED,
}  # fmt: skip
YOUTU: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}  # fmt: skip
AXK1: dict[str, Any] = {key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
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
    "glm4-moe-lite": ("Glm4MoeLiteConfig", GLM4_LITE),
    "glm4-moe-lite-some-dense": (
        "Glm4MoeLiteConfig",
        {**GLM4_LITE, "mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": None, "rope_interleave": False},
    ),
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
    "youtu": ("YoutuConfig", YOUTU),
    "youtu-halves": ("YoutuConfig", {**YOUTU, "q_lora_rank": None, "rope_interleave": False, "attention_bias": True}),
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
    "mistral-large4": ("MistralLarge4TextConfig", MISTRAL_LARGE4),
    "mistral-large4-own": (
        "MistralLarge4TextConfig",
        {
            **MISTRAL_LARGE4,
            "num_hidden_layers": 4,
            "v_head_dim": 16,
            "index_head_dim": 16,
            "moe_intermediate_size": 32,
            "indexer_types": None,
            "no_rope_layers": None,
            "kv_source_layers": None,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
            "rope_parameters": DEEPSEEK_ROPE,
        },
    ),
    "glm5-next": ("Glm5NextTextConfig", GLM5_NEXT),
    "glm5-next-shared": (
        "Glm5NextTextConfig",
        {
            **GLM5_NEXT,
            "layer_types": ["indexed_attention"] * 2 + ["linear_attention"] + ["indexed_attention"] * 2,
            "indexer_types": ["full", "shared", "shared", "full", "shared"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense", "sparse"],
            "index_kpool": 6,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "q_lora_rank": 32,
            "v_head_dim": 16,
            "index_head_dim": 16,
            "moe_intermediate_size": 32,
            "linear_conv_kernel_dim": 3,
            "linear_head_dim": 32,
            "linear_num_heads": 2,
            "linear_lower_bound": None,
            "hc_mult": 3,
            "hc_eps": 1e-3,
            "rms_norm_eps": 1e-3,
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
}
