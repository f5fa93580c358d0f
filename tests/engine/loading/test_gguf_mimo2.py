"""MiMo-V2-Flash in GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
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
from penstock.engine.models.model_config import ModelConfig
from penstock.errors import CheckpointError
from tests import parts
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.loading.gguf_files import write_gguf
from tests.engine.loading.test_gguf_keys import Described, llama_cpp, vocabulary
from tests.engine.loading.test_gguf_kimi import assert_alike, logprobs
from tests.engine.models.test_mimo_v2 import published
from tests.engine.parallel.threads import threaded_engine
from tests.engine.speculative.forced import eager_engine
from tests.engine.speculative.heads import noted_drafts
from tests.engine.speculative.plain_mtp import PlainMimo
from tests.engine.tiny import write_checkpoint
from tests.engine.tiny.common import YARN_ROPE

ARCH = "mimo2"
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{one}_proj.weight": f"attn_{one}.weight" for one in "qkv"},
    **{f"self_attn.{one}_proj.bias": f"attn_{one}.bias" for one in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
}
DRAFTING_NAMES = {
    "final_layernorm.weight": "layer_output_norm.weight",
    **{f"{one}.weight": f"nextn.{one}.weight" for one in ("eh_proj", "enorm", "hnorm")},
}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
       "lm_head.weight": "output.weight"}  # fmt: skip
ROPES = {
    "full_attention": {**YARN_ROPE, "partial_rotary_factor": 0.75},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "published": ("mimo-v2-flash", {"routed_scaling_factor": 1.0}),
    "further": (
        "mimo-v2-flash-some-dense",
        {"attention_bias": False, "norm_topk_prob": True, "rope_parameters": ROPES},
    ),
    "windows": ("mimo-v2-flash", {"routed_scaling_factor": None, "layer_types": ["sliding_attention"] * 3}),
}
"""What llama.cpp computes as transformers does."""
DRAFTING = 3
PROMPT = [23 * i % 199 for i in range(150)]
REQUEST = greedy("a", PROMPT, 16)


def write(name: str, tmp_path: Path, **further: Any) -> Path:
    family, changes = FAMILIES[name]
    return write_checkpoint(family, tmp_path, **changes, **further)


def described(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The metadata of the file, without the architecture, and its tensors."""
    config, checkpoint = json.loads((folder / "config.json").read_text()), open_checkpoint(folder)
    tensors: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name in sorted(checkpoint.names(), key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
        tensor = checkpoint.tensor(name).numpy()
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        expert = re.fullmatch(r"mlp\.experts\.\d+\.(\w+)_proj\.weight", match[2]) if match else None
        if name.startswith("model.mtp."):
            continue
        if match is None:
            tensors[TOP[name]] = tensor
        elif expert is not None:
            stacks.setdefault(f"blk.{match[1]}.ffn_{expert[1]}_exps.weight", []).append(tensor)
        else:
            tensors[f"blk.{match[1]}.{NAMES[match[2]]}"] = tensor
    tensors |= {name: np.stack(stack) for name, stack in stacks.items()}
    ropes = config["rope_parameters"]
    full, local = ropes["full_attention"], ropes["sliding_attention"]
    windows = [int(kind == "sliding_attention") for kind in config["layer_types"]]
    heads, kv_heads, dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    metadata: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": [kv_heads * (1 + windowed) for windowed in windows],
        "attention.key_length": dim,
        "attention.value_length": config["v_head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windows,
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_gating_func": 2,
        "rope.dimension_count": int(dim * full["partial_rotary_factor"]),
        "rope.freq_base": full["rope_theta"],
        "rope.freq_base_swa": local["rope_theta"],
        "nextn_predict_layers": 0,
    }
    if config["attention_value_scale"] is not None:
        metadata["attention.value_scale"] = config["attention_value_scale"]
    if full["rope_type"] == "yarn":
        metadata |= {"rope.scaling.type": "yarn", "rope.scaling.factor": full["factor"]}
        metadata["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
    return metadata, tensors


def with_drafting(metadata: dict[str, Any], tensors: dict[str, np.ndarray], folder: Path) -> None:
    """Layers for multi-token prediction, which the converter counts with the others: dense ones with a window."""
    layers, checkpoint = metadata["block_count"], open_checkpoint(folder)
    for name in checkpoint.names():
        if match := re.fullmatch(r"model\.mtp\.layers\.(\d+)\.(.*)", name):
            own = (NAMES | DRAFTING_NAMES)[match[2]]
            tensors[f"blk.{layers + int(match[1])}.{own}"] = checkpoint.tensor(name).numpy()
    metadata["nextn_predict_layers"] = DRAFTING
    metadata["block_count"] += DRAFTING
    kv_heads = max(metadata["attention.head_count_kv"])
    metadata["attention.head_count_kv"] = [*metadata["attention.head_count_kv"], *[kv_heads] * DRAFTING]
    metadata["attention.sliding_window_pattern"] = [*metadata["attention.sliding_window_pattern"], *[1] * DRAFTING]


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With queries, keys and values in one matrix, as MiMo-V2.5 has them."""
    parts = ("q", "k", "v")
    layers = sorted({name.split(".")[1] for name in tensors if name.startswith("blk.")})
    whole = {
        f"blk.{layer}.attn_qkv.weight": np.concatenate([tensors[f"blk.{layer}.attn_{one}.weight"] for one in parts])
        for layer in layers
    }
    apart = {f"blk.{layer}.attn_{one}.weight" for layer in layers for one in parts}
    return {name: tensor for name, tensor in tensors.items() if name not in apart} | whole


def convert(
    folder: Path,
    *,
    fuse: bool = False,
    drafting: bool = False,
    quantized: str = "",
    tokenizer: dict[str, Any] | None = None,
    without: str = "",
    **changed: Any,
) -> Path:
    """`quantized`: the type of all matrices but routers."""
    metadata, tensors = described(folder)
    if drafting:
        with_drafting(metadata, tensors, folder)
    tensors = fused(tensors) if fuse else tensors
    metadata = {key: value for key, value in (metadata | changed).items() if key != without}
    kinds: dict[str, gguf.GGMLQuantizationType] = {}
    if quantized:
        kind = gguf.GGMLQuantizationType[quantized]
        block = gguf.GGML_QUANT_SIZES[kind][0]
        matrices = {name: t for name, t in tensors.items() if t.ndim > 1 and t.shape[-1] % block == 0}
        kinds = {name: kind for name in matrices if "_inp." not in name}
    return write_gguf(folder / "model.gguf", prefixed(metadata) | (tokenizer or {}), tensors, kinds)


def prefixed(metadata: dict[str, Any]) -> dict[str, Any]:
    return {"general.architecture": ARCH, **{f"{ARCH}.{key}": value for key, value in metadata.items()}}


def model_of(checkpoint: Any) -> ModelConfig:
    """With the numbers of rotated dimensions instead of the shares that they follow from."""
    model = read_config(checkpoint.config)
    rope, local = model.rope, model.local_rope
    assert local is not None
    return replace(
        model,
        rope=replace(rope, rotated=int(model.head_dim * rope.rotated)),
        local_rope=replace(local, rotated=int(model.head_dim * local.rotated)),
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_the_file_gives_the_tokens_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path)
    file, theirs = convert(folder), open_checkpoint(folder)
    ours = GGUFCheckpoint(file)
    assert model_of(ours) == model_of(theirs)
    assert set(ours.names()) == set(theirs.names())
    assert all(torch.equal(ours.tensor(tensor), theirs.tensor(tensor)) for tensor in theirs.names())
    expected = generate(make_engine(folder), REQUEST)
    assert generate(make_engine(file), REQUEST) == expected
    with threaded_engine(file, 2, 2) as engine:
        assert generate(engine, REQUEST) == expected


@pytest.mark.parametrize("kind", ["", "Q8_0"])
def test_queries_keys_and_values_may_be_one_matrix(kind: str, tmp_path: Path) -> None:
    folder = write("published", tmp_path)
    apart = convert(folder, quantized=kind).rename(tmp_path / "apart.gguf")
    one, three = GGUFCheckpoint(convert(folder, quantized=kind, fuse=True)), GGUFCheckpoint(apart)
    assert set(one.names()) == set(three.names())
    assert all(torch.equal(one.tensor(tensor), three.tensor(tensor)) for tensor in three.names())
    assert generate(make_engine(one.file.path), REQUEST) == generate(make_engine(apart), REQUEST)
    if kind:
        assert one.groups("model.layers.1.self_attn.v_proj.weight") is not None
    with pytest.raises(CheckpointError, match=r"attn_qkv\.weight has 176 rows, not the 184 of its heads"):
        open_checkpoint(convert(folder, fuse=True, **{"attention.value_length": 20}))


@pytest.mark.parametrize("fuse", [False, True])
def test_layers_for_multi_token_prediction(fuse: bool, tmp_path: Path) -> None:
    """Counted with the others: the first drafts with `speculation: mtp`."""
    folder = PlainMimo.write("mimo-v2-flash", tmp_path, routed_scaling_factor=1.0)
    expected = generate(make_engine(folder), REQUEST)
    file = convert(folder, drafting=True, fuse=fuse)
    assert model_of(GGUFCheckpoint(file)) == model_of(open_checkpoint(folder))
    assert generate(make_engine(file), REQUEST) == expected
    engine = eager_engine(file, speculation="mtp")
    drafts = noted_drafts(engine)
    assert generate(engine, REQUEST) == expected
    layer = PlainMimo(folder)
    assert len(drafts) > 3
    for tokens, draft in drafts:
        assert layer.scores(tokens, draft).argmax(-1).tolist() == draft


def test_a_norm_behind_other_layers_is_refused(tmp_path: Path) -> None:
    folder = write("published", tmp_path)
    stray = described(folder)
    stray[1]["blk.1.layer_output_norm.weight"] = np.ones(stray[0]["embedding_length"], np.float32)
    with pytest.raises(CheckpointError, match=r"no use for 'blk\.1\.layer_output_norm\.weight'"):
        make_engine(write_gguf(tmp_path / "stray.gguf", prefixed(stray[0]), stray[1]))


def test_the_published_model() -> None:
    """llama.cpp's converter writes `sliding_window`, and not `sliding_window_size`, which the reference takes."""
    windows = [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0] + [1] * DRAFTING
    keys = {
        "block_count": 15, "context_length": 262144, "embedding_length": 4096, "feed_forward_length": 16384,
        "attention.head_count": 64, "attention.head_count_kv": [4 + 4 * windowed for windowed in windows],
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.key_length": 192, "attention.value_length": 128,
        "attention.sliding_window": 128, "attention.sliding_window_pattern": windows,
        "attention.value_scale": float(np.float32(0.707)), "expert_count": 256, "expert_used_count": 8,
        "expert_feed_forward_length": 2048, "expert_group_count": 1, "expert_group_used_count": 1,
        "expert_gating_func": 2, "rope.dimension_count": 64, "rope.freq_base": 5e6, "rope.freq_base_swa": 1e4,
        "nextn_predict_layers": DRAFTING,
    }  # fmt: skip
    matrix, vector = (np.broadcast_to(np.float32(0), shape) for shape in ((152576, 4096), (4096,)))
    tensors = {f"blk.{layer}.attn_norm.weight": vector for layer in range(15)}
    tensors |= {f"blk.{layer}.ffn_gate_inp.weight": matrix for layer in range(1, 12)}
    file = Described(prefixed(keys), {"token_embd.weight": matrix, "output.weight": matrix, **tensors})
    found = read_config(config_from_gguf(cast(GGUFFile, file)))
    wanted = read_config(published(sliding_window_size=None, partial_rotary_factor=None))
    assert [(rope.theta, int(192 * rope.rotated)) for rope in found.ropes[:2]] == [(5e6, 64), (1e4, 64)]
    assert (found.windows, found.layer_heads, found.value_dim) == (wanted.windows, wanted.layer_heads, 128)
    assert (found.moe, found.value_scale, found.rms_eps) == (wanted.moe, wanted.value_scale, wanted.rms_eps)


def test_quantized_files_run(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 96, "v_head_dim": 32}
    folder = write("published", tmp_path, vocab_size=320, spread=0.5, **sizes)
    file = convert(folder, quantized="Q8_0")
    stored = GGUFCheckpoint(file)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.experts.3.down_proj"):
        assert stored.groups(f"model.layers.1.{name}.weight") is not None
    found = logprobs(file, weights="int8", activations="int16")
    assert_alike(found, logprobs(file, weights="dense"), 0.3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": "attention.sliding_window"}, r"attention\.sliding_window is missing or 0"),
        ({"without": "attention.sliding_window_pattern"}, r"sliding_window_pattern is missing"),
        ({"attention.sliding_window_pattern": 2}, "true or false for each of 3 layers"),
        ({"attention.sliding_window_pattern": [0, 1]}, "true or false for each of 3 layers"),
        ({"attention.head_count_kv": 2}, "2 times the KV heads of others"),
        ({"without": "attention.head_count_kv"}, "2 times the KV heads of others"),
        ({"attention.head_count_kv": [4, 8, 8]}, "4 heads over 8 KV heads"),
        ({"attention.value_length": 48}, "v_head_dim is 48, above head_dim 24"),
        ({"attention.value_length_swa": 24}, r"value_length_swa is 24, which is not supported; supported: 16"),
        ({"attention.key_length_swa": 16}, r"key_length_swa is 16"),
        ({"rope.dimension_count_swa": 4}, r"dimension_count_swa is 4"),
        ({"feed_forward_length": [32, 64, 64]}, "feed_forward_length differs between layers"),
        ({"expert_gating_func": 1}, "expert_gating_func is 1"),
        ({"expert_weights_norm": False}, "expert_weights_norm"),
        ({"expert_weights_scale": 1.5}, "expert_weights_scale"),
        ({"expert_shared_count": 1}, "expert_shared_count"),
        ({"nextn_predict_layers": 3}, "nextn_predict_layers is 3 of 3 layers"),
        ({"rope.scaling.attn_factor": 1.5}, "attn_factor"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write("published", tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_config(GGUFCheckpoint(convert(folder, **changes)).config)


def test_biases_are_refused(tmp_path: Path) -> None:
    """llama.cpp reads them and adds none."""
    folder = write_checkpoint("mimo-v2-flash", tmp_path, attention_bias=True)
    with pytest.raises(CheckpointError, match=r"attn_q\.bias"):
        open_checkpoint(convert(folder))


def test_the_shape_of_a_file_is_planned_without_torch(tmp_path: Path) -> None:
    folder = write("published", tmp_path)
    file = convert(folder, drafting=True)
    code = (
        "import sys; from penstock.planning.model_shape import model_shape; "
        f"print(model_shape({str(file)!r}).parameters); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stored = open_checkpoint(folder)
    assert int(done.stdout) == sum(stored.tensor(name).numel() for name in stored.names())


CASES: list[dict[str, Any]] = [
    {},
    {"attention.value_scale": 0.0},
    {"attention.value_scale": 0.3},
    {"attention.sliding_window": 17},
    {"without": "rope.freq_base_swa"},
    {"rope.freq_base_swa": 300.0},
    {"rope.scaling.factor": 4.0},
    {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    {"expert_group_count": 4, "expert_group_used_count": 2},
    {"drafting": True},
    {"fuse": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    folder, python = write(name, tmp_path, vocab_size=320, spread=0.5), parts.python("llama-cpp")
    for case in CASES:
        file = convert(folder, tokenizer=vocabulary(320), **case)
        theirs = llama_cpp(python, file)
        assert theirs is not None, f"llama.cpp does not load the file: {case}"
        assert_alike(logprobs(file, weights="dense"), theirs, 0.002)
