"""Random checkpoints have exactly the tensors of the real architecture, whatever the shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.engine.loading import RandomCheckpoint
from penstock.errors import CheckpointError

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama-bias": {"attention_bias": True},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 32},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3_text": {"tie_word_embeddings": True},
    "phi3": {"head_dim": None, "pad_token_id": 0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tensors_as_the_reference(family: str) -> None:
    config = {**SMALL, **FAMILIES[family], "model_type": family.removesuffix("-bias")}
    given = {key: value for key, value in config.items() if key != "model_type" and value is not None}
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **given))
    expected = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    if config.get("tie_word_embeddings"):
        expected.pop("lm_head.weight", None)
    checkpoint = RandomCheckpoint(config)
    assert {name: tuple(checkpoint.tensor(name).shape) for name in checkpoint.names()} == expected


def test_weights_depend_on_seed_and_name_only() -> None:
    config = {**SMALL, "model_type": "llama"}
    first, second = RandomCheckpoint(config, seed=1), RandomCheckpoint(config, seed=1)
    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    first.tensor(k)
    assert torch.equal(first.tensor(q), second.tensor(q))
    assert not torch.equal(first.tensor(q), RandomCheckpoint(config, seed=2).tensor(q))
    assert not torch.equal(first.tensor(q)[:32], first.tensor(k))


def test_dtype_and_scale() -> None:
    checkpoint = RandomCheckpoint({**SMALL, "model_type": "llama"}, dtype=torch.float32)
    weight = checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
    assert weight.dtype == torch.float32
    assert abs(weight.std().item() * 8 - 1) < 0.1
    assert torch.equal(checkpoint.tensor("model.norm.weight"), torch.ones(64))


def test_a_tensor_the_architecture_lacks() -> None:
    with pytest.raises(CheckpointError, match="llama model has no tensor"):
        RandomCheckpoint({**SMALL, "model_type": "llama"}).tensor("model.layers.9.self_attn.q_proj.weight")
