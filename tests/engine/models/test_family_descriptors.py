"""A descriptor is all that a family needs: the registered ones are complete, and a new one works by itself."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.adapters.model_sites import layout_of
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.loading.checkpoint import open_checkpoint
from penstock.engine.loading.random_checkpoint import RandomCheckpoint, possible_tensors, tensor_shapes
from penstock.engine.models.families import FAMILIES, Family, TensorNames, family_of, is_linear, read_config
from penstock.engine.models.families.family import GGUFFormat
from penstock.engine.parallel.layout import Place
from penstock.engine.parallel.shards import shard
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.loading.test_gguf_families import convert
from tests.engine.test_greedy_equals_reference import CASES
from tests.engine.tiny import write_checkpoint

PROMPT = [17 * i % 199 for i in range(50)]
ROUTERS = (
    ".gate.weight", ".gate.wg.weight", ".router.weight", ".router.layer.weight", ".router.proj.weight",
    "shared_expert_gate.weight",
)  # fmt: skip
DELTA_NETS = (".conv1d.weight", ".in_proj_ba.weight", ".in_proj_b.weight", ".in_proj_a.weight")
"""Their convolutions, and the small matrices of their decays and write strengths."""
CHANNEL_DECAYS = (
    "_conv1d.weight", ".A_log", ".b_proj.weight", ".f_a_proj.weight", ".f_b_proj.weight", ".g_a_proj.weight",
    ".g_b_proj.weight",
)  # fmt: skip
"""The same of Kimi Linear's, and what makes its output gates."""
INDEXERS = (".indexer.weights_proj.weight", ".scorer.weights_proj.weight", ".index_qk_proj.weight")
"""The weights of an indexer's heads, and Qwen4's projections."""
SHORT_CONVOLUTIONS = (".conv.conv.weight",)
"""LFM2's."""
TOKEN_INPUTS = (".per_layer_input_gate.weight", ".per_layer_projection.weight", ".per_layer_model_projection.weight")
"""What makes Gemma 4's vectors of tokens for layers, and adds them."""
DEEPSEEK_V4 = ("_hc.fn", ".hc_fn", ".position_bias", ".tid2eid")
"""What mixes streams, places in a group of tokens, and the experts of tokens."""
STREAMS = (
    "_hyper_connection.block_inject_weight.weight",
    ".input_mix_weight_down.weight",
    ".input_mix_weight_up.weight",
)
"""What mixes the streams of Qwen4."""
IN_NORMS = (".W_down.weight", ".W_up.weight", ".q_layernorm.weight", ".k_layernorm.weight")
"""A.X K2's gates behind norms, and StableLM's norms of heads, a row for each."""
POOLS = (".index_kpool_compress_ape", ".index_kpool_compress_gate")
"""What weighs the keys of GLM-5-Next's pools."""
N_GRAMS = (".ngram_embedding.weight", ".ple.key_proj.weight", ".ple.value_proj.weight")
"""Tables of Qwen4, which are looked up, and what weighs what was found."""
DENSE = (
    ROUTERS + DELTA_NETS + CHANNEL_DECAYS + INDEXERS + SHORT_CONVOLUTIONS + DEEPSEEK_V4 + TOKEN_INPUTS
    + STREAMS + IN_NORMS + POOLS + N_GRAMS
)  # fmt: skip
"""Ends of the names of matrices that are never quantized."""
CONSTANTS = (".act_fn.beta", ".act_fn.eps", ".layer_multipliers", ".ngram_heads_offsets", ".ngram_heads_vocab_sizes")
"""What the reference stores beside weights, and the configuration says as well."""
SHARD = re.compile(r"(\.ngram_embedding)\.shard_\d+(\.weight)$")
"""A part of the rows of a table."""


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def numbers(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def test_tensor_names_and_shapes_are_those_of_the_reference(checkpoint: Path) -> None:
    """Random checkpoints, quantization and benchmarks take them from the composition."""
    opened = open_checkpoint(checkpoint)  # stacks of experts under the names of ordinary ones
    stored = {name: tuple(opened.tensor(name).shape) for name in opened.names()}
    rows = {name for name, shape in stored.items() if name.endswith("correction_bias") and shape[0] == 1}  # ERNIE's
    stored |= {name: stored[name][1:] for name in rows}
    for name in [name for name in stored if SHARD.search(name)]:
        whole, (part, width) = SHARD.sub(r"\1\2", name), stored.pop(name)
        stored[whole] = (stored.get(whole, (0, width))[0] + part, width)
    stored = {name: shape for name, shape in stored.items() if not name.endswith(CONSTANTS)}
    config = json.loads((checkpoint / "config.json").read_text())
    ours, possible = tensor_shapes(config), possible_tensors(config)
    assert {name: ours[name] for name in ours.keys() & stored.keys()} == {
        name: shape for name, shape in stored.items() if name in ours
    }
    assert ours.keys() ^ stored.keys() <= possible, "parts that run as one matrix may be stored so or apart"
    assert numbers(ours) == numbers(stored)
    rest = ("embed", "lm_head", "_norm.weight")
    norms_and_rest = {name for name, shape in stored.items() if len(shape) == 1 or any(part in name for part in rest)}
    dense = {name for name in stored if name.endswith(DENSE)}
    assert {name for name in stored if is_linear(name)} == set(stored) - norms_and_rest - dense


def test_random_weights_of_every_family_run(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    settings = EngineConfig(model="random", device="cpu", dtype="float32", threads=1, num_blocks=16)
    engine = Engine.load(settings, checkpoint=RandomCheckpoint(config, dtype=torch.float32))
    assert len(generate(engine, greedy("a", PROMPT, 4))["a"]) == 4


def test_descriptors_need_no_torch() -> None:
    """The gateway reads GGUF headers through them."""
    code = "import sys, penstock.engine.loading.gguf_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


NEW = Family(
    model_type="newcomer",
    class_name="NewcomerForCausalLM",
    names=TensorNames(
        mixer_norm="attention_norm",
        feed_forward_norm="ffn_norm",
        attention="attention.",
        qkv=("wq", "wk", "wv"),
        output="wo",
        mlp="feed_forward.",
        gate_up=("w1", "w3"),
        down="w2",
    ),
    gguf=GGUFFormat(architectures=("newcomer",)),
)
"""Llama under other names: what somebody who adds a family writes."""


def test_a_new_family_is_one_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, NEW.model_type, NEW)
    llama, new = write_checkpoint("llama-gqa", tmp_path / "llama"), tmp_path / "new"
    expected = generate(make_engine(llama), greedy("a", PROMPT, 12))
    gguf = convert(llama, "newcomer")

    new.mkdir()
    config = json.loads((llama / "config.json").read_text()) | {"model_type": NEW.model_type}
    (new / "config.json").write_text(json.dumps(config))
    tensors = load_file(llama / "model.safetensors")
    save_file({_renamed(name): tensor for name, tensor in tensors.items()}, new / "model.safetensors")
    assert generate(make_engine(new), greedy("a", PROMPT, 12)) == expected
    assert generate(make_engine(gguf), greedy("a", PROMPT, 12)) == expected, "from its GGUF names"
    assert len(generate(make_engine(new, weights="int8"), greedy("a", PROMPT, 12))["a"]) == 12

    model, checkpoint = read_config(config), RandomCheckpoint(config, dtype=torch.float32)
    assert "model.layers.0.attention.wq.weight" in checkpoint.names()
    half = shard(checkpoint, model, Place(1, 2, 1))
    assert half.tensor("model.layers.0.feed_forward.w2.weight").shape == (64, 48), "tensor-parallel cuts know the names"
    modules = [module for site in layout_of(model).sites if not site.end for module in site.modules]
    assert modules == [f"attention.{n}" for n in ("wq", "wk", "wv", "wo")] + [f"feed_forward.w{n}" for n in (1, 3, 2)]


def _renamed(name: str) -> str:
    """What the newcomer calls a tensor of Llama."""
    llama, ours = family_of("llama").names, NEW.names
    modules = [(llama.mixer_norm, ours.mixer_norm), (llama.feed_forward_norm, ours.feed_forward_norm)]
    for part, other in zip((*llama.qkv, llama.output), (*ours.qkv, ours.output), strict=True):
        modules.append((llama.attention + part, ours.attention + other))
    for part, other in zip((*llama.gate_up, llama.down), (*ours.gate_up, ours.down), strict=True):
        modules.append((llama.mlp + part, ours.mlp + other))
    for theirs, new in modules:
        name = name.replace(f".{theirs}.", f".{new}.")
    return name
