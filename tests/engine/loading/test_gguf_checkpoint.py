"""A GGUF file gives the same configuration and the same weights as the model it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.engine.loading import open_checkpoint
from penstock.engine.loading.checkpoint import GGUFCheckpoint
from penstock.engine.loading.gguf import GGUFFile
from penstock.engine.loading.gguf_rope import llama3_factors
from penstock.errors import CheckpointError
from tests.engine.harness import make_engine
from tests.engine.loading.gguf_files import write_gguf

SHAPE = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
}


def metadata(arch: str, **more: Any) -> dict[str, Any]:
    shape = {**SHAPE, **more}
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in shape.items()}}


def weights(**more: tuple[int, ...]) -> dict[str, np.ndarray]:
    shapes = {"token_embd.weight": (96, 32), "output_norm.weight": (32,), **more}
    return {name: np.ones(shape, dtype=np.float32) for name, shape in shapes.items()}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows as converters write them for the Llama family: rotary pairs side by side."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def test_the_default_model_is_read_exactly(default_model: Path) -> None:
    """Stored bytes are the reference reader's (test_gguf.py); here, what is made of them."""
    checkpoint = open_checkpoint(default_model)
    file = GGUFFile(default_model)
    reference = {
        name: gguf.quants.dequantize(file.raw(name).data, gguf.GGMLQuantizationType(info.type)).reshape(info.shape)
        for name, info in file.tensors.items()
        if name.startswith(("blk.7.", "output_norm"))
    }
    layer = "model.layers.7"
    names = {
        "model.norm.weight": "output_norm.weight",
        f"{layer}.input_layernorm.weight": "blk.7.attn_norm.weight",
        f"{layer}.post_attention_layernorm.weight": "blk.7.ffn_norm.weight",
        f"{layer}.self_attn.v_proj.weight": "blk.7.attn_v.weight",
        f"{layer}.self_attn.o_proj.weight": "blk.7.attn_output.weight",
        f"{layer}.mlp.gate_proj.weight": "blk.7.ffn_gate.weight",
        f"{layer}.mlp.up_proj.weight": "blk.7.ffn_up.weight",
        f"{layer}.mlp.down_proj.weight": "blk.7.ffn_down.weight",
    }
    for ours, theirs in names.items():
        assert np.array_equal(checkpoint.tensor(ours).numpy(), reference.pop(theirs)), ours
    for ours, theirs, heads in (("q_proj", "attn_q", 9), ("k_proj", "attn_k", 3)):
        found = checkpoint.tensor(f"{layer}.self_attn.{ours}.weight").numpy()
        assert np.array_equal(interleaved(found, heads), reference.pop(f"blk.7.{theirs}.weight"))
    assert not reference
    assert len(checkpoint.names()) == 30 * 9 + 2
    assert checkpoint.config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 2,
    }


@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q8_0])
def test_llama_rows_are_put_back_in_order(tmp_path: Path, kind: gguf.GGMLQuantizationType | None) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        attention_bias=True,
    )
    state = {name: tensor.detach().numpy() for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    bias = {name: np.random.default_rng(0).standard_normal(state[name].shape, dtype=np.float32) for name in state}
    state = {name: bias[name] if name.endswith("bias") else value for name, value in state.items()}
    layer = "model.layers.0.self_attn"
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output.weight": state["lm_head.weight"],
        "blk.0.attn_q.weight": interleaved(state[f"{layer}.q_proj.weight"], 4),
        "blk.0.attn_q.bias": interleaved(state[f"{layer}.q_proj.bias"][:, None], 4)[:, 0],
        "blk.0.attn_k.weight": interleaved(state[f"{layer}.k_proj.weight"], 2),
        "blk.0.attn_v.weight": state[f"{layer}.v_proj.weight"],
    }
    quantized = {"blk.0.attn_q.weight": kind, "blk.0.attn_k.weight": kind} if kind else {}
    path = write_gguf(tmp_path / "llama.gguf", metadata("llama", block_count=1), tensors, quantized)
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, GGUFCheckpoint)
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.config["attention_bias"] is True
    for name in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "v_proj.weight"):
        expected = state[f"{layer}.{name}"]
        found = checkpoint.tensor(f"{layer}.{name}").numpy()
        np.testing.assert_allclose(found, expected, atol=1e-3 if kind else 0)
    raw = checkpoint.raw(f"{layer}.q_proj.weight")
    assert raw.shape == (32, 32)
    if kind:
        again = gguf.quants.dequantize(raw.data, kind)
        assert np.array_equal(again, checkpoint.tensor(f"{layer}.q_proj.weight").numpy())


def test_qwen_rows_stay_as_they_are(tmp_path: Path) -> None:
    matrix = np.random.default_rng(0).standard_normal((32, 32), dtype=np.float32)
    tensors = weights() | {"blk.0.attn_q.weight": matrix, "blk.0.attn_q_norm.weight": matrix[0]}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "qwen.gguf", metadata("qwen3"), tensors))
    assert checkpoint.config["model_type"] == "qwen3"
    assert np.array_equal(checkpoint.tensor("model.layers.0.self_attn.q_proj.weight").numpy(), matrix)
    assert "model.layers.0.self_attn.q_norm.weight" in checkpoint.names()


def test_gemma_norms_lose_the_one_that_was_added(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "gemma.gguf", metadata("gemma3"), weights(**{"blk.0.ffn_norm.weight": (32,)}))
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensor("model.layers.0.pre_feedforward_layernorm.weight").abs().max() == 0
    assert checkpoint.tensor("model.norm.weight").abs().max() == 0
    assert checkpoint.tensor("model.embed_tokens.weight").min() == 1


def test_stacked_experts_come_apart(tmp_path: Path) -> None:
    stack = np.random.default_rng(0).standard_normal((3, 64, 32), dtype=np.float32)
    tensors = weights() | {"blk.0.ffn_gate_exps.weight": stack}
    more = {"expert_count": 3, "expert_used_count": 2}
    mixtral = open_checkpoint(write_gguf(tmp_path / "mixtral.gguf", metadata("llama", **more), tensors))
    assert (mixtral.config["model_type"], mixtral.config["num_local_experts"]) == ("mixtral", 3)
    qwen = open_checkpoint(write_gguf(tmp_path / "qwen.gguf", metadata("qwen3moe", **more), tensors))
    assert (qwen.config["model_type"], qwen.config["num_experts_per_tok"]) == ("qwen3_moe", 2)
    for expert in range(3):
        name = f"model.layers.0.block_sparse_moe.experts.{expert}.w1.weight"
        assert np.array_equal(mixtral.tensor(name).numpy(), stack[expert])
        assert np.array_equal(
            qwen.tensor(f"model.layers.0.mlp.experts.{expert}.gate_proj.weight").numpy(), stack[expert]
        )


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequency_factors_are_recognised(tmp_path: Path, factor: float) -> None:
    rule = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters={**rule, "rope_theta": 500000.0})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    factors = (plain / scaled).numpy().astype(np.float32)
    np.testing.assert_allclose(llama3_factors(rule, 500000.0, 64), factors, rtol=1e-5)
    shape = {"embedding_length": 256, "rope.dimension_count": 64}
    tensors = weights() | {"rope_freqs.weight": factors}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "llama3.gguf", metadata("llama", **shape), tensors))
    assert checkpoint.config["rope_scaling"] == rule
    assert "rope_freqs.weight" not in checkpoint.names()


def test_other_rope_scalings(tmp_path: Path) -> None:
    odd = np.array([1.0, 2.0, 3.0, 4.0], dtype=np.float32)
    given = open_checkpoint(
        write_gguf(tmp_path / "odd.gguf", metadata("llama"), weights() | {"rope_freqs.weight": odd})
    )
    assert given.config["rope_scaling"] == {
        "rope_type": "longrope",
        "short_factor": [1.0, 2.0, 3.0, 4.0],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 512,
        "attention_factor": 1.0,
    }
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    yarn = open_checkpoint(write_gguf(tmp_path / "yarn.gguf", metadata("qwen2", **keys), weights()))
    assert yarn.config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }


def test_a_sliding_window_makes_it_mistral(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata("llama", **{"attention.sliding_window": 64}), weights())
    config = open_checkpoint(path).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.odd.weight", "blk.0.attn_q_norm.weight", "blk.0.attn_output.bias", "blk.0.attn_sinks.weight",
        "blk.0.attn_q.scale", "blk.7.attn_q.weight", "output.bias", "blk.0.ffn_gate_inp.weight", "rope_freqs.bias",
    ],
)  # fmt: skip
def test_tensors_that_the_model_would_not_read_are_refused(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata("llama"), weights(**{name: (32, 32)}))
    with pytest.raises(CheckpointError, match=rf"no use for '{name}'"):
        make_engine(path)


def test_unusable_files_say_why(tmp_path: Path) -> None:
    other = write_gguf(tmp_path / "bert.gguf", metadata("bert"), weights())
    with pytest.raises(CheckpointError, match=r"'bert' is not supported; supported: .*llama"):
        open_checkpoint(other)
    partial = metadata("llama")
    del partial["llama.embedding_length"]
    with pytest.raises(CheckpointError, match=r"llama\.embedding_length"):
        open_checkpoint(write_gguf(tmp_path / "partial.gguf", partial, weights()))
    vocabulary = write_gguf(tmp_path / "vocab.gguf", metadata("llama"), {})
    with pytest.raises(CheckpointError, match=r"token_embd\.weight"):
        open_checkpoint(vocabulary)
    split = write_gguf(tmp_path / "split.gguf", metadata("llama") | {"split.count": 3}, weights())
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        open_checkpoint(split)
