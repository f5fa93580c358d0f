"""Step 3.5 in GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
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
from penstock.engine.loading.gguf_rope import llama3_factors
from penstock.engine.models.families import read_config
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.rope import RopeConfig
from penstock.errors import CheckpointError
from tests import parts
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.loading.gguf_files import write_gguf
from tests.engine.loading.test_gguf_keys import Described, llama_cpp, vocabulary
from tests.engine.loading.test_gguf_kimi import assert_alike, logprobs
from tests.engine.models.test_step3p5 import published
from tests.engine.parallel.threads import threaded_engine
from tests.engine.speculative.forced import eager_engine
from tests.engine.speculative.mtp_layers import write_mtp
from tests.engine.tiny import write_checkpoint
from tests.engine.tiny.common import FULL, SLIDING, YARN_ROPE

ARCH = "step35"
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{f"self_attn.{one}_proj.{kind}": f"attn_{one}.{kind}" for one in "qkv" for kind in ("weight", "bias")},
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.g_proj.weight": "attn_gate.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
    **{f"{part}.weight": f"nextn.{part}.weight" for part in ("eh_proj", "enorm", "hnorm")},
    "shared_head.norm.weight": "nextn.shared_head_norm.weight",
}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
       "lm_head.weight": "output.weight"}  # fmt: skip
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 1000.0}
FURTHER: dict[str, dict[str, Any]] = {
    "published": {},
    "yarn": {
        "layer_types": [SLIDING, FULL, SLIDING],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "rope_parameters": {FULL: {**YARN_ROPE, "partial_rotary_factor": 0.5}, SLIDING: LOCAL_ROPE},
        "swiglu_limits": None,
    },
    "one kind": {
        "layer_types": [SLIDING] * 3,
        "mlp_layer_types": ["dense"] * 3,
        "rope_parameters": {SLIDING: {**LOCAL_ROPE, "partial_rotary_factor": 0.5}},
        "swiglu_limits_shared": None,
    },
}
PROMPT = [23 * i % 199 for i in range(150)]
REQUEST = greedy("a", PROMPT, 16)


def described(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The metadata of the file, without the architecture, and its tensors."""
    config, checkpoint = json.loads((folder / "config.json").read_text()), open_checkpoint(folder)
    tensors: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name in sorted(checkpoint.names(), key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
        tensor = checkpoint.tensor(name).numpy()
        tensor = tensor + 1 if name.endswith("norm.weight") else tensor
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        expert = re.fullmatch(r"mlp\.experts\.\d+\.(\w+)_proj\.weight", match[2]) if match else None
        if match is None:
            tensors[TOP[name]] = tensor
        elif expert is not None:
            stacks.setdefault(f"blk.{match[1]}.ffn_{expert[1]}_exps.weight", []).append(tensor)
        else:
            tensors[f"blk.{match[1]}.{NAMES[match[2]]}"] = tensor
    tensors |= {name: np.stack(stack) for name, stack in stacks.items()}
    layers, drafting = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 0
    kinds = [*config["layer_types"][:layers], *(config.get("mtp_layer_types") or [])[:drafting]]
    heads = {FULL: config["num_attention_heads"], SLIDING: config["num_sliding_attention_heads"]}
    ropes, dim = config["rope_parameters"], config["head_dim"]
    full = ropes.get(FULL) or {"rope_type": "default"}
    metadata: dict[str, Any] = {
        "block_count": len(kinds),
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": [heads[kind] for kind in kinds],
        "attention.head_count_kv": [config["num_key_value_heads"]] * len(kinds),
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == SLIDING for kind in kinds],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["share_expert_dim"],
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": config["moe_router_scaling_factor"],
        "leading_dense_block_count": 0,
        "moe_every_n_layers": 1,
        "rope.freq_base": full.get("rope_theta", 1e4),
        "rope.freq_base_swa": ropes[SLIDING]["rope_theta"],
    }
    if ropes[SLIDING].get("partial_rotary_factor", 1.0) != 1.0:
        metadata["rope.dimension_count_swa"] = int(dim * ropes[SLIDING]["partial_rotary_factor"])
    for key, theirs in (("swiglu_limits", "swiglu_clamp_exp"), ("swiglu_limits_shared", "swiglu_clamp_shexp")):
        if config.get(key):
            given = [float(limit or 0) for limit in config[key][:layers]]
            metadata[theirs] = [*given, *[0.0] * drafting]
    if drafting:
        metadata["nextn_predict_layers"] = drafting
    if full["rope_type"] == "llama3":
        divisors = llama3_factors(full, full["rope_theta"], dim // 2)
        tensors["rope_freqs.weight"] = np.array([*divisors, *[1.0] * (dim // 2 - len(divisors))], np.float32)
    if full["rope_type"] == "yarn":
        metadata |= {"rope.scaling.type": "yarn", "rope.scaling.factor": full["factor"]}
        metadata["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
    return metadata, tensors


def convert(
    folder: Path,
    *,
    quantized: str = "",
    tokenizer: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
    **changed: Any,
) -> Path:
    """`quantized`: the type of all matrices but routers. `without`: keys and tensors that are left out."""
    metadata, tensors = described(folder)
    metadata = {key: value for key, value in (metadata | changed).items() if key not in without}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in without}
    kinds: dict[str, gguf.GGMLQuantizationType] = {}
    if quantized:
        kind = gguf.GGMLQuantizationType[quantized]
        block = gguf.GGML_QUANT_SIZES[kind][0]
        matrices = {name: t for name, t in tensors.items() if t.ndim > 1 and t.shape[-1] % block == 0}
        kinds = {name: kind for name in matrices if "_inp." not in name}
    return write_gguf(folder / "model.gguf", prefixed(metadata) | dict(tokenizer or {}), tensors, kinds)


def prefixed(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {"general.architecture": ARCH, **{f"{ARCH}.{key}": value for key, value in metadata.items()}}


def model_of(raw: Mapping[str, Any]) -> ModelConfig:
    """Without the rotary scaling of layers that see everything, of which a file has the divisors alone."""
    model = read_config(raw)
    plain = RopeConfig(theta=model.rope.theta, rotated=model.rope.rotated)
    return replace(model, rope=plain if any(window is None for window in model.windows) else RopeConfig())


@pytest.mark.parametrize("name", FURTHER)
def test_the_file_gives_the_tokens_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint("step3.5", tmp_path, **FURTHER[name])
    file, theirs = convert(folder), open_checkpoint(folder)
    ours = GGUFCheckpoint(file)
    assert model_of(ours.config) == model_of(theirs.config)
    assert set(ours.names()) == set(theirs.names())
    for tensor in theirs.names():
        torch.testing.assert_close(ours.tensor(tensor), theirs.tensor(tensor), rtol=0, atol=1e-6)
    expected = generate(make_engine(folder), REQUEST)
    assert generate(make_engine(file), REQUEST) == expected
    with threaded_engine(file, 2, 2) as engine:
        assert generate(engine, REQUEST) == expected


def test_layers_that_draft(tmp_path: Path) -> None:
    """Counted with the others: the first drafts with `speculation: mtp`."""
    folder = write_mtp("step3.5", tmp_path)
    request = greedy("a", PROMPT[:40], 12)
    expected = generate(make_engine(folder), request)
    file = convert(folder)
    assert generate(make_engine(file), request) == expected
    alone, engine = (eager_engine(source, speculation="mtp") for source in (folder, file))
    assert generate(engine, request) == generate(alone, request) == expected
    assert engine.load_snapshot().accepted_tokens == alone.load_snapshot().accepted_tokens
    assert engine.load_snapshot().draft_tokens > 5
    apart = [name for name in described(folder)[1] if name.startswith("blk.3.")]
    assert generate(make_engine(convert(folder, without=apart)), request) == expected, "in a file of their own"


def test_the_published_model() -> None:
    kinds = ([0, 1, 1, 1] * 12)[:48]
    keys = {
        "block_count": 48, "context_length": 262144, "embedding_length": 4096, "feed_forward_length": 11264,
        "attention.head_count": [96 if windowed else 64 for windowed in kinds], "attention.head_count_kv": [8] * 48,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.key_length": 128, "attention.value_length": 128,
        "attention.sliding_window": 512, "attention.sliding_window_pattern": [bool(windowed) for windowed in kinds],
        "expert_count": 288, "expert_used_count": 8, "expert_feed_forward_length": 1280, "expert_gating_func": 2,
        "expert_shared_feed_forward_length": 1280, "expert_weights_norm": True, "expert_weights_scale": 3.0,
        "leading_dense_block_count": 3, "moe_every_n_layers": 1, "rope.freq_base": 5e6, "rope.freq_base_swa": 1e4,
        "nextn_predict_layers": 3, "swiglu_clamp_exp": [0.0] * 43 + [7.0, 7.0] + [0.0] * 3,
        "swiglu_clamp_shexp": [0.0] * 44 + [16.0] + [0.0] * 3,
    }  # fmt: skip
    raw = published()
    divisors = np.array(llama3_factors(raw["rope_scaling"], 5e6, 64) + [1.0] * 32, np.float32)
    matrix, vector = (np.broadcast_to(np.float32(0), shape) for shape in ((raw["vocab_size"], 4096), (4096,)))
    tensors = {f"blk.{layer}.{norm}.weight": vector for layer in range(48) for norm in ("attn_norm", "attn_q_norm")}
    tensors |= {f"blk.{layer}.ffn_gate_inp.weight": matrix for layer in range(3, 45)}
    tensors |= {"token_embd.weight": matrix, "output.weight": matrix, "rope_freqs.weight": divisors}
    found = config_from_gguf(cast(GGUFFile, Described(prefixed(keys), tensors)))
    assert model_of(found) == model_of(raw)
    rope = read_config(found).rope
    assert np.allclose(rope.short_factor, divisors[:32]) and rope.attention_factor == 1.0


def test_quantized_files_run(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "head_dim": 32}
    folder = write_checkpoint("step3.5", tmp_path, vocab_size=320, spread=0.5, **sizes)
    file = convert(folder, quantized="Q8_0")
    stored = GGUFCheckpoint(file)
    for name in ("self_attn.q_proj", "mlp.shared_experts.up_proj", "mlp.experts.3.down_proj"):
        assert stored.groups(f"model.layers.1.{name}.weight") is not None
    found = logprobs(file, weights="int8", activations="int16")
    assert_alike(found, logprobs(file, weights="dense"), 0.3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": ["attention.sliding_window"]}, r"attention\.sliding_window is missing or 0"),
        ({"without": ["attention.sliding_window_pattern"]}, r"sliding_window_pattern is missing"),
        ({"attention.sliding_window_pattern": [True, False]}, "true or false for each of 3 layers"),
        ({"attention.head_count": [4, 6]}, "an integer for each of 3 layers"),
        ({"attention.head_count": [4, 5, 6]}, "5 heads over 2 KV heads"),
        ({"attention.head_count_kv": [2, 4, 4]}, "head_count_kv differs between layers"),
        ({"attention.value_length": 8}, "value_length is 8"),
        ({"attention.key_length_swa": 8}, "key_length_swa is 8"),
        ({"rope.dimension_count": 10}, "dimension_count is 10"),
        ({"rope.dimension_count_swa": 32}, "dimension_count_swa 32; heads have 16"),
        ({"rope.scaling.attn_factor": 1.5}, "attn_factor"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "by yarn and by factors in tensors"),
        ({"expert_gating_func": 1}, "expert_gating_func is 1"),
        ({"expert_weights_norm": False}, "expert_weights_norm"),
        ({"without": ["expert_weights_norm"]}, "expert_weights_norm is not true"),
        ({"expert_group_count": 2}, "expert_group_count"),
        ({"leading_dense_block_count": 2}, "leading_dense_block_count is 2; 1 layers"),
        ({"moe_every_n_layers": 2}, "moe_every_n_layers"),
        ({"swiglu_clamp_exp": [0.0, 1.0]}, "swiglu_clamp_exp must have a number"),
        ({"swiglu_clamp_shexp": [0.0, -1.0, 1.0]}, "swiglu_clamp_shexp must have a number"),
        ({"nextn_predict_layers": 3}, "nextn_predict_layers is 3 of 3 layers"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_checkpoint("step3.5", tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_config(GGUFCheckpoint(convert(folder, **changes)).config)


def test_biases_are_refused(tmp_path: Path) -> None:
    """llama.cpp reads those of queries, keys and values and adds none; it loads no file with others."""
    folder = write_checkpoint("step3.5", tmp_path)
    metadata, tensors = described(folder)
    for name, rows, message in (
        ("blk.1.attn_q.bias", 96, r"files with attn_q\.bias"),
        ("blk.1.attn_v.bias", 32, r"no use for 'blk\.1\.attn_v\.bias'"),
        ("blk.0.ffn_down.bias", metadata["embedding_length"], r"no use for 'blk\.0\.ffn_down\.bias'"),
    ):
        biased = tensors | {name: np.ones(rows, np.float32)}
        with pytest.raises(CheckpointError, match=message):
            make_engine(write_gguf(tmp_path / "biased.gguf", prefixed(metadata), biased))


def test_the_shape_of_a_file_is_planned_without_torch(tmp_path: Path) -> None:
    folder = write_checkpoint("step3.5", tmp_path)
    file = convert(folder)
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
    {"attention.sliding_window": 17},
    {"without": ["rope.freq_base_swa"]},
    {"rope.freq_base_swa": 300.0},
    {"rope.dimension_count_swa": 12, "without": ["rope_freqs.weight"]},
    {"rope.dimension_count": 12, "rope.dimension_count_swa": 8, "without": ["rope_freqs.weight"]},
    {"rope.dimension_count": 12, "without": ["rope_freqs.weight"]},
    {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    {"without": ["swiglu_clamp_exp", "swiglu_clamp_shexp"]},
    {"swiglu_clamp_exp": 0.3, "swiglu_clamp_shexp": 0.2},
    {"without": ["expert_weights_scale"]},
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_logprobs_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint("step3.5", tmp_path, vocab_size=320, spread=0.5, **FURTHER[name])
    python = parts.python("llama-cpp")
    for case in CASES:
        file = convert(folder, tokenizer=vocabulary(320), **case)
        theirs = llama_cpp(python, file)
        assert theirs is not None, f"llama.cpp does not load the file: {case}"
        assert_alike(logprobs(file, weights="dense"), theirs, 0.002)


@pytest.mark.slow
def test_layers_that_draft_change_nothing_in_llama_cpp(tmp_path: Path) -> None:
    metadata, tensors = described(write_checkpoint("step3.5", tmp_path, vocab_size=320, spread=0.5))
    hidden = metadata["embedding_length"]
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("blk.2.")}
    tensors |= {name.replace("blk.2.", "blk.3."): tensor for name, tensor in last.items()}
    norms = ("enorm", "hnorm", "shared_head_norm")
    tensors |= {f"blk.3.nextn.{name}.weight": np.ones(hidden, np.float32) for name in norms}
    tensors["blk.3.nextn.eh_proj.weight"] = np.ones((hidden, 2 * hidden), np.float32)
    metadata |= {"nextn_predict_layers": 1, "block_count": 4}
    for key, value in metadata.items():
        if isinstance(value, list):
            metadata[key] = [*value, value[-1]]
    file = write_gguf(tmp_path / "drafting.gguf", prefixed(metadata) | vocabulary(320), tensors)
    theirs = llama_cpp(parts.python("llama-cpp"), file)
    assert theirs is not None, "llama.cpp does not load the file"
    assert_alike(logprobs(file, weights="dense"), theirs, 0.002)
