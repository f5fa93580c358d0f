"""Kimi Linear in GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch

from penstock.engine.loading.checkpoint import GGUFCheckpoint, open_checkpoint
from penstock.engine.loading.gguf import GGUFFile
from penstock.engine.loading.gguf_config import config_from_gguf
from penstock.engine.models.families import read_config
from penstock.errors import CheckpointError
from tests import parts
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.loading.gguf_files import write_gguf
from tests.engine.loading.test_gguf_keys import Described, drain_one, llama_cpp, vocabulary
from tests.engine.models.test_kimi_linear import PUBLISHED
from tests.engine.parallel.matrix_models import q4_k
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import write_checkpoint

ARCH = "kimi-linear"
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
       "lm_head.weight": "output.weight"}  # fmt: skip
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{one}_proj.weight": f"attn_{one}.weight" for one in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    **{f"self_attn.{one}_conv1d.weight": f"ssm_conv1d_{one}.weight" for one in "qkv"},
    "self_attn.forget_gate.A_log": "ssm_a",
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
    **{f"self_attn.forget_gate.f_{one}_proj.weight": f"ssm_f_{one}.weight" for one in "ab"},
    **{f"self_attn.g_{one}_proj.weight": f"ssm_g_{one}.weight" for one in "ab"},
    "self_attn.b_proj.weight": "ssm_beta.weight",
    "self_attn.o_norm.weight": "ssm_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
}
FURTHER: dict[str, Any] = {
    "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "linear_conv_kernel_dim": 3,
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "linear_head_dim": 24,
}  # fmt: skip
"""What the published model does not have. llama.cpp loads files with `q_lora_rank` and cannot run them."""
WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "kv_lora_rank": 256,
    "linear_head_dim": 64,
}  # fmt: skip
"""Of which rows fill blocks of 256."""
PROMPT = [23 * i % 199 for i in range(150)]
REQUEST = greedy("a", PROMPT, 16)


def described(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The metadata of the file, without the architecture, and its tensors."""
    config, checkpoint = json.loads((folder / "config.json").read_text()), open_checkpoint(folder)
    heads, plain, value = (config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    tensors: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name in sorted(checkpoint.names(), key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
        tensor = checkpoint.tensor(name).numpy()
        if name in TOP:
            tensors[TOP[name]] = tensor
            continue
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        assert match is not None, name
        at, part = f"blk.{match[1]}.", match[2]
        expert = re.fullmatch(r"mlp\.experts\.\d+\.(\w+)_proj\.weight", part)
        if expert is not None:
            stacks.setdefault(f"{at}ffn_{expert[1]}_exps.weight", []).append(tensor)
        elif part == "self_attn.kv_b_proj.weight":
            whole = tensor.reshape(heads, plain + value, rank)
            tensors[f"{at}attn_k_b.weight"] = np.ascontiguousarray(whole[:, :plain].swapaxes(1, 2))
            tensors[f"{at}attn_v_b.weight"] = np.ascontiguousarray(whole[:, plain:])
        elif part.endswith("A_log"):
            tensors[at + NAMES[part]] = -np.exp(tensor)
        elif "conv1d" in part:
            tensors[at + NAMES[part]] = tensor.reshape(1, -1, 1, tensor.shape[-1])
        else:
            tensors[at + NAMES[part]] = tensor
    tensors |= {name: np.stack(stack) for name, stack in stacks.items()}
    metadata: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["model_max_length"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config["layer_types"]],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotary,
        "attention.value_length": config["hidden_size"] // heads,
        "attention.key_length_mla": plain + rotary,
        "attention.value_length_mla": value,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": rotary,
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "kda.head_dim": config["linear_head_dim"],
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_token"],
        "expert_group_used_count": config["topk_group"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_gating_func": 2,
    }
    if config["num_expert_group"] > 1:
        metadata["expert_group_count"] = config["num_expert_group"]
    if config["q_lora_rank"] is not None:
        metadata["attention.q_lora_rank"] = config["q_lora_rank"]
    return metadata, tensors


def convert(
    folder: Path,
    *,
    quantized: str = "",
    tokenizer: dict[str, Any] | None = None,
    without: str = "",
    **changed: Any,
) -> Path:
    """`quantized`: the type of all matrices whose rows allow it, routers apart. Quantizing also drops axes of one at
    the end of a shape."""
    metadata, tensors = described(folder)
    metadata = {key: value for key, value in (metadata | changed).items() if key != without}
    kinds: dict[str, gguf.GGMLQuantizationType] = {}
    if quantized:
        kind = gguf.GGMLQuantizationType[quantized]
        tensors = {name: tensor[0] if tensor.ndim == 4 else tensor for name, tensor in tensors.items()}
        tensors = {name: tensor[0] if name.endswith("ssm_a") else tensor for name, tensor in tensors.items()}
        block = gguf.GGML_QUANT_SIZES[kind][0]
        kinds = {
            name: kind
            for name, tensor in tensors.items()
            if tensor.ndim > 1 and tensor.shape[-1] % block == 0 and "_inp." not in name
        }
    return write_gguf(folder / "model.gguf", prefixed(metadata) | (tokenizer or {}), tensors, kinds)


def prefixed(metadata: dict[str, Any]) -> dict[str, Any]:
    return {"general.architecture": ARCH, **{f"{ARCH}.{key}": value for key, value in metadata.items()}}


def logprobs(file: Path, **settings: Any) -> dict[int, float]:
    """Of the most likely next tokens."""
    ours = next(delta for delta in drain_one(make_engine(file, **settings)) if delta.tokens).logprobs[0]
    return dict(zip(ours.top_ids, ours.top_logprobs, strict=True))


def assert_alike(found: dict[int, float], wanted: dict[int, float], bound: float) -> None:
    common = found.keys() & wanted.keys()
    assert len(common) > 14
    assert max(abs(found[token] - wanted[token]) for token in common) < bound


def write_k_quants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference package only reads Q4_K."""
    reference = gguf.quants.quantize

    def quantize(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        if kind is not gguf.GGMLQuantizationType.Q4_K:
            written: np.ndarray = reference(data, kind)
            return written
        return q4_k(data.reshape(-1, 256)).reshape(*data.shape[:-1], -1)

    monkeypatch.setattr(gguf.quants, "quantize", quantize)


@pytest.mark.parametrize("further", [{}, FURTHER], ids=["published", "further"])
def test_the_file_gives_the_tokens_of_the_folder(further: dict[str, Any], tmp_path: Path) -> None:
    folder = write_checkpoint("kimi-linear", tmp_path, **further)
    file, theirs = convert(folder), open_checkpoint(folder)
    ours = GGUFCheckpoint(file)
    assert read_config(ours.config) == read_config(theirs.config)
    assert set(ours.names()) == set(theirs.names())
    for name in theirs.names():
        found, wanted = ours.tensor(name), theirs.tensor(name)
        assert found.shape == wanted.shape, name
        assert torch.allclose(found, wanted, rtol=0, atol=1e-6 if name.endswith("A_log") else 0), name
    expected = generate(make_engine(folder), REQUEST)
    assert generate(make_engine(file), REQUEST) == expected
    with threaded_engine(file, 2, 2) as engine:
        assert generate(engine, REQUEST) == expected


def test_the_published_model() -> None:
    """The size that its files give values is the `head_dim` of its configuration, which says nothing."""
    attending = PUBLISHED["linear_attn_config"]["full_attn_layers"]
    keys = {
        "block_count": 27, "context_length": 1048576, "embedding_length": 2304, "feed_forward_length": 9216,
        "attention.head_count": 32, "attention.head_count_kv": [int(layer in attending) for layer in range(1, 28)],
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.kv_lora_rank": 512, "attention.key_length": 576,
        "attention.value_length": 72, "attention.key_length_mla": 192, "attention.value_length_mla": 128,
        "rope.freq_base": 10000.0, "rope.dimension_count": 64, "ssm.conv_kernel": 4, "kda.head_dim": 128,
        "leading_dense_block_count": 1, "expert_count": 256, "expert_used_count": 8, "expert_group_used_count": 1,
        "expert_shared_count": 1, "expert_feed_forward_length": 1024, "expert_gating_func": 2, "vocab_size": 163840,
        "expert_weights_scale": float(np.float32(2.446)),
    }  # fmt: skip
    matrix, vector = (np.broadcast_to(np.float32(0), shape) for shape in ((163840, 2304), (2304,)))
    norms = {f"blk.{layer}.attn_norm.weight": vector for layer in range(27)}
    file = Described(prefixed(keys), {"token_embd.weight": matrix, "output.weight": matrix, **norms})
    assert read_config(config_from_gguf(cast(GGUFFile, file))) == read_config(PUBLISHED)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_quantized_files_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As stored, but for the matrices of decays, gates and update rates, and those that make keys and values."""
    write_k_quants(monkeypatch)
    folder = write_checkpoint("kimi-linear", tmp_path, vocab_size=320, spread=0.5, **WIDE)
    file = convert(folder, quantized=kind)
    few, dense = GGUFCheckpoint(file), open_checkpoint(folder)
    for name in ("self_attn.q_proj", "self_attn.forget_gate.f_a_proj", "self_attn.g_a_proj", "self_attn.b_proj"):
        found, wanted = few.tensor(f"model.layers.0.{name}.weight"), dense.tensor(f"model.layers.0.{name}.weight")
        assert few.groups(f"model.layers.0.{name}.weight") is not None
        assert 0 < (found - wanted).abs().max() < (0.01 if kind == "Q8_0" else 0.1) * wanted.abs().max()
    assert few.tensor("model.layers.0.self_attn.forget_gate.A_log").shape == (1, 1, 4, 1)
    assert few.tensor("model.layers.0.self_attn.k_conv1d.weight").shape == (256, 1, 4)
    assert few.groups("model.layers.1.self_attn.kv_b_proj.weight") is None
    assert few.groups("model.layers.1.mlp.experts.3.down_proj.weight") is not None
    weights = "int8" if kind == "Q8_0" else "int4"
    stored = logprobs(file, weights=weights, activations="int16")
    assert_alike(stored, logprobs(file, weights="dense"), 0.3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": "kda.head_dim"}, r"kda\.head_dim missing or 0"),
        ({"ssm.conv_kernel": 0}, r"ssm\.conv_kernel missing or 0"),
        ({"attention.kv_lora_rank": 0, "attention.value_length_mla": 0}, "kv_lora_rank, attention.value_length_mla"),
        ({"without": "rope.dimension_count"}, "rope.dimension_count missing"),
        ({"attention.key_length_mla": 8}, "leaves nothing"),
        ({"attention.key_length": 99}, "latents make it 40"),
        ({"without": "attention.head_count_kv"}, "head_count_kv must be 0 in delta nets"),
        ({"attention.head_count_kv": [0, 2, 0, 0]}, "and 1 in some layers"),
        ({"attention.head_count_kv": [0, 1]}, "an integer for each of 4 layers"),
        ({"expert_gating_func": 1}, "expert_gating_func is 1"),
        ({"expert_weights_norm": False}, "expert_weights_norm"),
        ({"expert_used_count": 0}, "num_experts_per_tok"),
        ({"expert_count": 0}, "num_local_experts"),
        ({"attention.sliding_window": 30}, "sliding windows"),
        ({"ssm.state_size": 16}, r"ssm\.state_size"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_damaged_metadata_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_checkpoint("kimi-linear", tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_config(GGUFCheckpoint(convert(folder, **changes)).config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kda.head_dim": 24}, "ssm_conv1d_[qkv].weight has the shape"),
        ({"ssm.conv_kernel": 3}, "ssm_conv1d_[qkv].weight has the shape"),
        ({"attention.head_count_kv": [1, 1, 0, 0]}, "no use for 'blk.0.ssm_a' and 12 others"),
        ({"attention.head_count_kv": [0, 0, 0, 1]}, "no use for 'blk.1.attn_kv_a_norm.weight'"),
        ({"attention.value_length_mla": 24}, "o_proj"),
        ({"leading_dense_block_count": 2}, "no use for 'blk.1.exp_probs_b.bias'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_metadata_that_does_not_fit_the_tensors_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_checkpoint("kimi-linear", tmp_path)
    with pytest.raises(CheckpointError, match=message):
        make_engine(convert(folder, **changes))


def test_the_shape_of_a_file_is_planned_without_torch(tmp_path: Path) -> None:
    folder = write_checkpoint("kimi-linear", tmp_path)
    file = convert(folder)
    code = (
        "import sys; from penstock.planning.model_shape import model_shape; "
        f"print(model_shape({str(file)!r}).parameters); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stored = open_checkpoint(folder)
    assert int(done.stdout) == sum(stored.tensor(name).numel() for name in stored.names())


@pytest.mark.slow
@pytest.mark.parametrize("further", [{}, {"n_group": 4, "topk_group": 2, "n_shared_experts": 2}], ids=["one", "groups"])
def test_logprobs_are_those_of_llama_cpp(further: dict[str, Any], tmp_path: Path) -> None:
    folder = write_checkpoint("kimi-linear", tmp_path, vocab_size=320, spread=0.5, **further)
    file = convert(folder, tokenizer=vocabulary(320))
    theirs = llama_cpp(parts.python("llama-cpp"), file)
    assert theirs is not None, "llama.cpp does not load the file"
    assert_alike(logprobs(file, weights="dense"), theirs, 0.002)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_quantized_files_have_the_logprobs_of_llama_cpp(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp is given the same numbers widened: beside quantized matrices it rounds activations, too, and then
    chooses other experts."""
    write_k_quants(monkeypatch)
    folder = write_checkpoint("kimi-linear", tmp_path, vocab_size=320, spread=0.5, **WIDE)
    file = convert(folder, quantized=kind, tokenizer=vocabulary(320))
    stored = gguf.GGUFReader(file).tensors
    wide = {one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in stored}
    copy = write_gguf(tmp_path / "wide.gguf", prefixed(described(folder)[0]) | vocabulary(320), wide)
    theirs = llama_cpp(parts.python("llama-cpp"), copy)
    assert theirs is not None, "llama.cpp does not load the file"
    assert_alike(logprobs(file, weights="dense"), theirs, 0.002)
