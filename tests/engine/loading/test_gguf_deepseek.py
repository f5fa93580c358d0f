"""DeepSeek and Kimi in GGUF files, as llama.cpp's converter writes them now and wrote them before."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from penstock.engine.loading.checkpoint import GGUFCheckpoint, open_checkpoint
from penstock.engine.loading.expert_stacks import with_stacks
from penstock.engine.models.families import family_of, read_config
from penstock.errors import CheckpointError
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.loading.gguf_files import write_gguf
from tests.engine.speculative.forced import eager_engine
from tests.engine.speculative.mtp_layers import write_mtp
from tests.engine.tiny import FAMILIES, write_checkpoint
from tests.engine.tiny.latent import DEEPSEEK, DEEPSEEK_ROPE, DSA, MISTRAL4, MISTRAL4_ROPE, V2_GROUPS, YOUTU

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"{name}.weight": f"nextn.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")},
    "shared_head.norm.weight": "nextn.shared_head_norm.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    **{f"self_attn.indexer.k_norm.{kind}": f"indexer.k_norm.{kind}" for kind in ("weight", "bias")},
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj.weight": f"ffn_{part}_shexp.weight" for part in ("gate", "up", "down")},
}
ROPE = {**DEEPSEEK_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707}
"""As in all published files, and as the format assumes: both magnitudes are the same."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": ("DeepseekV2Config", {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": ROPE}),
    "v2-groups": ("DeepseekV2Config", {**DEEPSEEK, **V2_GROUPS}),
    "v3": (
        "DeepseekV3Config",
        {**DEEPSEEK, "n_group": 4, "topk_group": 2, "rope_parameters": ROPE, "routed_scaling_factor": 2.5},
    ),
    "v3-unnormalized": (
        "DeepseekV3Config",
        {**DEEPSEEK, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "v32": (
        "DeepseekV32Config",
        {**DSA, "n_group": 4, "topk_group": 2, "rope_parameters": {**DEEPSEEK_ROPE, "mscale": 1.0}},
    ),
    "glm-dsa": (
        "GlmMoeDsaConfig",
        {**DSA, "n_group": 1, "topk_group": 1, "indexer_types": ["full", "full", "shared"]},
    ),
    "mistral4": (
        "Mistral4Config",
        {**MISTRAL4, "rope_parameters": {**MISTRAL4_ROPE, "mscale": 1.0}},
    ),
    "minicpm3": (
        "MiniCPM3Config",
        {**YOUTU, "v_head_dim": 16, "dim_model_base": 256, "scale_emb": 12, "scale_depth": 1.4},
    ),
    "youtu": ("YoutuConfig", YOUTU),
    "dense": ("DeepseekV2Config", {**DEEPSEEK, "first_k_dense_replace": 3}),
}


def write(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(FAMILIES, "converted", MODELS[name])
    return write_checkpoint("converted", folder)


def convert(
    folder: Path,
    *,
    arch: str = "deepseek2",
    parts: str = "two",
    quantized: gguf.GGMLQuantizationType | None = None,
    leave_out: tuple[str, ...] = (),
    **changed: Any,
) -> Path:
    """`parts`: how what makes keys and values is kept: in `two` as files of today, in `one` as older ones, in `flat`
    matrices beside the whole one as other writers do. `quantized`: all matrices whose rows allow it."""
    config = json.loads((folder / "config.json").read_text())
    heads, plain, value = (config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    tensors: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem = name.rpartition(".")[0]
        if stem in TOP:
            tensors[f"{TOP[stem]}.weight"] = tensor
            continue
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        assert match is not None
        layer, part = match[1], match[2]
        expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)_proj\.weight", part)
        if expert is not None:
            stacks.setdefault(f"blk.{layer}.ffn_{expert[2]}_exps.weight", {})[int(expert[1])] = tensor
        elif part in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
            tensors[f"blk.{layer}.ffn_{part.rpartition('.')[2].removesuffix('_proj')}_exps.weight"] = tensor
        elif part == "self_attn.kv_b_proj.weight":
            whole = tensor.reshape(heads, plain + value, rank)
            keys = np.ascontiguousarray(whole[:, :plain].swapaxes(1, 2))
            values = np.ascontiguousarray(whole[:, plain:])
            if parts != "two":
                tensors[f"blk.{layer}.attn_kv_b.weight"] = tensor
            if parts != "one":
                flat = parts == "flat"
                tensors[f"blk.{layer}.attn_k_b.weight"] = keys.reshape(-1, plain) if flat else keys
                tensors[f"blk.{layer}.attn_v_b.weight"] = values.reshape(-1, rank) if flat else values
        else:
            tensors[f"blk.{layer}.{NAMES[part]}"] = tensor
    tensors |= {name: np.stack([stack[i] for i in sorted(stack)]) for name, stack in stacks.items()}
    rope = config["rope_parameters"]
    latents = parts == "two"
    metadata: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": 1 if latents else heads,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotary if latents else plain + rotary,
        "attention.value_length": rank if latents else value,
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": rotary,
    }
    if "n_routed_experts" in config:
        kinds = config.get("mlp_layer_types")
        metadata |= {
            "leading_dense_block_count": kinds.count("dense") if kinds else config["first_k_dense_replace"],
            "expert_count": config["n_routed_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
        }
    if "index_topk" in config:
        for ours, theirs in (("n_heads", "head_count"), ("head_dim", "key_length"), ("topk", "top_k")):
            metadata[f"attention.indexer.{theirs}"] = config[f"index_{ours}"]
    if "indexer_types" in config:
        metadata["attention.indexer.types"] = [kind == "full" for kind in config["indexer_types"]]
    if "llama_4_scaling_beta" in rope:
        metadata["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        metadata |= {"expert_weights_norm": config["norm_topk_prob"]}
    if latents:
        metadata |= {"attention.key_length_mla": plain + rotary, "attention.value_length_mla": value}
        if config["model_type"] == "deepseek_v2":
            metadata["expert_gating_func"] = 1
    if config["q_lora_rank"] is not None:
        metadata["attention.q_lora_rank"] = config["q_lora_rank"]
    if config.get("n_group"):
        metadata |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    if config["model_type"] in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"):
        metadata["expert_gating_func"] = 2
        if config["norm_topk_prob"]:
            metadata["expert_weights_norm"] = True
    if rope.get("rope_type") == "yarn":
        metadata |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    further = sum(name.endswith("nextn.eh_proj.weight") for name in tensors)
    if further:
        metadata |= {"nextn_predict_layers": further, "block_count": config["num_hidden_layers"] + further}
    metadata = {key: value for key, value in (metadata | changed).items() if key not in leave_out}
    few = {} if quantized is None else {n: quantized for n, t in tensors.items() if t.ndim > 1 and not t.shape[-1] % 32}
    keys = {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in metadata.items()}}
    return write_gguf(folder / f"model-{parts}.gguf", keys, tensors, few)


ARCHITECTURES = {
    "v32": "deepseek32", "glm-dsa": "glm-dsa", "mistral4": "mistral4", "minicpm3": "minicpm3", "youtu": "deepseek2",
}  # fmt: skip
PROMPT = [23 * i % 199 for i in range(150)]


@pytest.mark.parametrize("name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("v2-groups", "dense")), "v3"])
def test_every_layout_gives_the_tokens_of_the_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(name, tmp_path, monkeypatch)
    expected = generate(make_engine(folder), greedy("a", PROMPT, 16))
    for parts in ("two", "one", "flat"):
        assert generate(make_engine(convert(folder, parts=parts)), greedy("a", PROMPT, 16)) == expected, parts


@pytest.mark.parametrize("name", MODELS)
def test_configuration_and_tensors_are_those_of_the_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(name, tmp_path, monkeypatch)
    theirs, arch = open_checkpoint(folder), ARCHITECTURES.get(name, "deepseek2")
    theirs = with_stacks(theirs, family_of(theirs.config["model_type"]).names)
    for parts in ("one",) if name == "minicpm3" else ("two", "one"):
        ours = GGUFCheckpoint(convert(folder, arch=arch, parts=parts))
        wanted = read_config(theirs.config)
        # Files of Youtu-LLM say that they are DeepSeek V2's, and so they are, without experts.
        assert read_config(ours.config) == (replace(wanted, family="deepseek_v2") if name == "youtu" else wanted), parts
        assert set(ours.names()) == set(theirs.names())
        for tensor in theirs.names():
            assert torch.equal(ours.tensor(tensor), theirs.tensor(tensor)), tensor


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_newer_architectures_give_the_tokens_of_the_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(name, tmp_path, monkeypatch)
    expected = generate(make_engine(folder), greedy("a", PROMPT, 16))
    file = convert(folder, arch=ARCHITECTURES[name], parts="one" if name == "minicpm3" else "two")
    assert generate(make_engine(file), greedy("a", PROMPT, 16)) == expected


def test_what_newer_files_leave_to_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much queries of Mistral Small 4 grow, and which layers of GLM-5 have an indexer."""
    folder = write("mistral4", tmp_path / "mistral", monkeypatch)
    left_out = GGUFCheckpoint(convert(folder, arch="mistral4", leave_out=("attention.temperature_scale",)))
    assert left_out.config["rope_scaling"]["llama_4_scaling_beta"] == 0.1
    kinds = ["full", "full", "full", "shared", "shared", "shared", "full"]
    several = {**MODELS["glm-dsa"][1], "num_hidden_layers": 7, "indexer_types": kinds}
    monkeypatch.setitem(MODELS, "glm-dsa", (MODELS["glm-dsa"][0], several))
    folder = write("glm-dsa", tmp_path / "glm", monkeypatch)
    types = {"leave_out": ("attention.indexer.types",), "arch": "glm-dsa"}
    assert GGUFCheckpoint(convert(folder, **types)).config["indexer_types"] == ["full"] * 7
    long = GGUFCheckpoint(convert(folder, **types, context_length=1 << 20)).config
    assert long["indexer_types"] == kinds
    with pytest.raises(CheckpointError, match=r"indexer\.types must say true or false for each of 7 layers"):
        GGUFCheckpoint(convert(folder, arch="glm-dsa", **{"attention.indexer.types": [True]}))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mistral4", {"expert_gating_func": 2}, "expert_gating_func is 2"),
        ("mistral4", {"attention.temperature_length": 7}, "temperature_length is 7"),
        ("v32", {"attention.q_lora_rank": 0}, "q_lora_rank is missing"),
        ("v32", {"expert_gating_func": 1}, "expert_gating_func is 1"),
        ("minicpm3", {"attention.key_length": 8}, "heads of 8 with 8 rotated"),
        ("minicpm3", {"attention.temperature_scale": 0.1}, "temperature_scale"),
    ],
)
def test_newer_files_that_cannot_be_honoured_are_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(name, tmp_path, monkeypatch)
    with pytest.raises(CheckpointError, match=message):
        GGUFCheckpoint(convert(folder, arch=ARCHITECTURES[name], parts="one", **changes))


def test_a_quantized_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that make keys and values are widened; the other matrices stay in eight bits."""
    monkeypatch.setitem(MODELS, "wide", (MODELS["v3"][0], {**MODELS["v3"][1], "qk_nope_head_dim": 32}))
    folder = write("wide", tmp_path, monkeypatch)
    file = convert(folder, quantized=gguf.GGMLQuantizationType.Q8_0)
    dense, few = open_checkpoint(folder), GGUFCheckpoint(file)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    assert few.groups(name) is None
    assert few.groups("model.layers.1.self_attn.o_proj.weight") is None  # rows of 80: stored in float32
    assert few.groups("model.layers.1.self_attn.kv_a_proj_with_mqa.weight") is not None
    assert torch.allclose(few.tensor(name), dense.tensor(name), atol=0.01)
    assert len(generate(make_engine(file), greedy("a", PROMPT, 8))["a"]) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.key_length": 99}, "latents make them 40 and 32"),
        ({"attention.value_length_mla": 0}, "belong together"),
        ({"attention.kv_lora_rank": 0, "attention.key_length": 0, "attention.value_length": 0}, "damaged"),
        ({"expert_gating_func": 3}, "expert_gating_func"),
        ({"expert_gating_func": 1}, "does not normalize"),
        ({"rope.scaling.yarn_log_multiplier": 0.0}, "yarn_log_multiplier"),
        ({"attention.temperature_scale": 0.1}, "temperature_scale"),
        ({"nextn_predict_layers": 3}, "nextn_predict_layers is 3 of 3 layers"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write("v3", tmp_path, monkeypatch)
    with pytest.raises(CheckpointError, match=message):
        GGUFCheckpoint(convert(folder, **changes))


def test_files_from_before_groups_choose_among_all_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write("v3", tmp_path, monkeypatch)
    config = GGUFCheckpoint(convert(folder, leave_out=("expert_group_count", "expert_group_used_count"))).config
    assert (config["n_group"], config["topk_group"]) == (1, 1)


@pytest.mark.slow
def test_the_layer_for_multi_token_prediction_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the converter writes it for GLM-4.7-Flash, whose files are of this architecture."""
    monkeypatch.setitem(FAMILIES, "converted", MODELS["v3"])
    folder = write_mtp("converted", tmp_path)
    request = greedy("a", [23 * i % 199 for i in range(40)], 12)
    expected = generate(make_engine(folder), request)
    file = convert(folder)
    assert generate(make_engine(file), request) == expected
    alone, engine = (eager_engine(source, speculation="mtp") for source in (folder, file))
    assert generate(engine, request) == generate(alone, request) == expected
    assert engine.load_snapshot().accepted_tokens == alone.load_snapshot().accepted_tokens
    assert engine.load_snapshot().draft_tokens > 5
