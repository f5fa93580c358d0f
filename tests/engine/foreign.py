"""Tiny random checkpoints of model types that no family describes: they run through `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from penstock.engine.models.families import FAMILIES
from tests.engine.tiny import COMMON

NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.4}
GPT: dict[str, Any] = {**NO_IDS, "vocab_size": 199, "n_positions": 1024, "n_embd": 64, "n_layer": 3, "n_head": 4}
BLOOM: dict[str, Any] = {**NO_IDS, "vocab_size": 199, "hidden_size": 64, "n_layer": 3, "n_head": 4}
OPT: dict[str, Any] = {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 48, "dropout": 0.0, "pad_token_id": 1}
MIMO: dict[str, Any] = {
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
WINDOW: dict[str, Any] = {"sliding_window": 40}
MOE: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "head_dim": 16,
}
HALF: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
}

LATENT: dict[str, Any] = {
    **COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
GEMMA: dict[str, Any] = {
    **COMMON,
    **WINDOW,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 199,
    "hidden_size_per_layer_input": 8,
}

EXPERTS: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

SCAN: dict[str, Any] = {"mamba_d_state": 8, "mamba_dt_rank": 4}
RECURRENT: dict[str, Any] = {**NO_IDS, "vocab_size": 199, "hidden_size": 64, "num_hidden_layers": 3}
LINEAR = ["linear_attention", "full_attention"] * 2
CONVOLUTIONS = ["conv", "full_attention"] * 2
SHARED = ["linear_attention", "hybrid", "hybrid"]
"""Layers with the same attention before their states."""

FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", GPT),
    "gpt2-odd": ("GPT2Config", {**GPT, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "gpt_bigcode": ("GPTBigCodeConfig", {**GPT, "multi_query": True}),
    "gpt_neox": ("GPTNeoXConfig", {**COMMON, **HALF}),
    "opt": ("OPTConfig", OPT),
    "starcoder2": ("Starcoder2Config", {**COMMON, **WINDOW}),
    "stablelm": ("StableLmConfig", {**COMMON, **HALF, "use_qkv_bias": True}),
    "phi": ("PhiConfig", {**COMMON, **HALF}),
    "persimmon": ("PersimmonConfig", {**COMMON, **HALF}),
    "nemotron": ("NemotronConfig", {**COMMON, **HALF, "head_dim": 20}),
    "helium": ("HeliumConfig", {**COMMON, "head_dim": 16}),
    "arcee": ("ArceeConfig", COMMON),
    "apertus": ("ApertusConfig", COMMON),
    "seed_oss": ("SeedOssConfig", {**COMMON, "head_dim": 24}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {**COMMON, "head_dim": 16}),
    "ernie4_5": ("Ernie4_5Config", {**COMMON, "head_dim": 16}),
    "dots1": ("Dots1Config", {**COMMON, **MOE}),
    "diffllama": ("DiffLlamaConfig", COMMON),
    "biogpt": ("BioGptConfig", {**COMMON, "pad_token_id": 1}),
    "vaultgemma": ("VaultGemmaConfig", {**COMMON, **WINDOW, "head_dim": 32, "attn_logit_softcapping": 5.0}),
    "mimo_v2_flash": ("MiMoV2FlashConfig", {**COMMON, **MIMO}),
    "jais2": ("Jais2Config", COMMON),
    "minicpm3": ("MiniCPM3Config", LATENT),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**LATENT, **MOE, "head_dim": 24}),
    "gemma3n_text": (
        "Gemma3nTextConfig",
        {**GEMMA, "num_kv_shared_layers": 2, "laurel_rank": 8, "activation_sparsity_pattern": None},
    ),
    "gemma4_text": ("Gemma4TextConfig", {**GEMMA, "global_head_dim": 24, "num_kv_shared_layers": 0}),
    "gemma4_text-shared": (
        "Gemma4TextConfig",
        {**GEMMA, "global_head_dim": 24, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0},
    ),
    "gemma4_text-small": ("Gemma4TextConfig", {**GEMMA, "global_head_dim": 24, "num_kv_shared_layers": 2}),
    "gemma4_text-large": (
        "Gemma4TextConfig",
        {
            **GEMMA,
            "global_head_dim": 24,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4_text-experts": (
        "Gemma4TextConfig",
        {
            **GEMMA,
            "global_head_dim": 24,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "laguna": ("LagunaConfig", {**COMMON, **WINDOW, "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 32}),
    "youtu": ("YoutuConfig", LATENT),
    "jetmoe": ("JetMoeConfig", {**COMMON, "kv_channels": 16, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "modernbert-decoder": (
        "ModernBertDecoderConfig",
        {**COMMON, "local_attention": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    ),
    "ctrl": ("CTRLConfig", {**GPT, "dff": 96}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {**COMMON, "head_dim": 16, "num_experts": 8, "moe_topk": 2}),
    "phimoe": ("PhimoeConfig", {**COMMON, **WINDOW, "num_local_experts": 8}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {**COMMON, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
    ),
    "minimax_m2": ("MiniMaxM2Config", {**COMMON, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "cohere2_moe": ("Cohere2MoeConfig", {**COMMON, **WINDOW, "head_dim": 16, "num_experts": 8}),
    "glm": ("GlmConfig", {**COMMON, "head_dim": 16}),
    "nanochat": ("NanoChatConfig", COMMON),
    "bitnet": ("BitNetConfig", COMMON),
    "olmo": ("OlmoConfig", {**COMMON, "clip_qkv": 1.0}),
    "doge": ("DogeConfig", {**COMMON, "keep_window_size": 64}),
    "bloom": ("BloomConfig", BLOOM),
    "mpt": (
        "MptConfig",
        {**NO_IDS, "vocab_size": 199, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 1024},
    ),
    "falcon": ("FalconConfig", {**COMMON, "multi_query": True, "new_decoder_architecture": False}),
    "falcon-alibi": ("FalconConfig", {**COMMON, "alibi": True, "multi_query": False}),
    "codegen": ("CodeGenConfig", {**GPT, "rotary_dim": 8}),
    "gptj": ("GPTJConfig", {**GPT, "rotary_dim": 8}),
    "gpt_neo": (
        "GPTNeoConfig",
        {**COMMON, "num_heads": 4, "attention_types": [[["global", "local", "global"], 1]], "window_size": 40},
    ),
    "xglm": (
        "XGLMConfig",
        {**COMMON, "d_model": 64, "num_layers": 3, "attention_heads": 4, "ffn_dim": 96, "pad_token_id": 1},
    ),
    "dbrx": (
        "DbrxConfig",
        {
            **NO_IDS,
            "vocab_size": 199,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 1024,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "flint": ("FlintConfig", {**COMMON, **WINDOW, **EXPERTS}),
    "kolibri1": (
        "Kolibri1Config",
        {key: value for key, value in {**COMMON, **WINDOW, **EXPERTS}.items() if key != "intermediate_size"},
    ),
    "longcat_flash": (
        "LongcatFlashConfig",
        {
            **{key: value for key, value in LATENT.items() if key not in ("intermediate_size", "num_hidden_layers")},
            "num_layers": 2,
            "ffn_hidden_size": 96,
            "n_routed_experts": 8,
            "zero_expert_num": 4,
            "moe_topk": 3,
            "expert_ffn_hidden_size": 32,
            "head_dim": 8,
        },
    ),
    "jamba": (
        "JambaConfig",
        {**COMMON, **SCAN, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
    ),
    "mamba": ("MambaConfig", {**RECURRENT, "state_size": 8}),
    "falcon_mamba": ("FalconMambaConfig", {**RECURRENT, "state_size": 8}),
    "lfm2": ("Lfm2Config", {**COMMON, "num_hidden_layers": 4, "block_multiple_of": 16, "layer_types": CONVOLUTIONS}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **COMMON,
            "num_hidden_layers": 4,
            "layer_types": CONVOLUTIONS,
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **LATENT,
            "q_lora_rank": None,
            "num_hidden_layers": 4,
            "layer_types": LINEAR,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "olmo_hybrid": ("OlmoHybridConfig", {**COMMON, "num_hidden_layers": 4, "linear_key_head_dim": 12}),
    "zamba": ("ZambaConfig", {**COMMON, **SCAN, "num_key_value_heads": 4, "layers_block_type": SHARED}),
    "zamba2": (
        "Zamba2Config",
        {
            **COMMON,
            "num_key_value_heads": 4,
            "layers_block_type": SHARED,
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "chunk_size": 16,
            "use_mem_rope": True,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
        },
    ),
    "minimax": (
        "MiniMaxConfig",
        {
            **COMMON,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "layer_types": LINEAR,
            "block_size": 16,
        },
    ),
    "bailing_hybrid": (
        "BailingHybridConfig",
        {
            **LATENT,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "layer_types": LINEAR,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "zaya": (
        "ZayaConfig",
        {
            **COMMON,
            **WINDOW,
            "head_dim": 16,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "router_hidden_size": 16,
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {**COMMON, "num_key_value_heads": 1, "lru_width": 64, "attention_window_size": 40},
    ),
    "rwkv": ("RwkvConfig", {**RECURRENT, "context_length": 1024, "rescale_every": 2}),
    "xlstm": (
        "xLSTMConfig",
        {**RECURRENT, "hidden_size": 128, "num_heads": 4, "chunk_size": 16, "autocast_kernel_dtype": "float32"},
    ),
}
"""The last ones have attention of their own, or layers that keep states."""
STATEFUL = list(FOREIGN)[list(FOREIGN).index("jamba") :]
"""Those with such layers."""


def without_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all of them through `transformers`, also those that a family took over: what a test promises of models of
    that shape is then tried with more shapes."""
    for name in FOREIGN:
        monkeypatch.delitem(FAMILIES, name.partition("-")[0], raising=False)


def write_foreign(model_type: str, folder: Path, **changes: Any) -> Path:
    """A reproducible random checkpoint."""
    name, settings = FOREIGN[model_type]
    config = getattr(transformers, name)(**{**settings, **changes})
    torch.manual_seed(sum(map(ord, model_type)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0, 0.4)
            elif "norm" in key or ".ln_" in key or "layernorm" in key:
                parameter.normal_(1, 0.2)
            elif "lambda" not in key:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder
