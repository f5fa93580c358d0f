"""Adapters of experts, routers and shared experts answer as the model that they are merged into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.adapters.model_sites import layout_of
from penstock.engine.adapters.peft import read_adapter
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.models.families import read_config
from penstock.errors import CheckpointError
from tests import parts
from tests.engine.adapters.expert_files import merge_experts, write_expert_adapter
from tests.engine.adapters.test_equals_merging import TIE, ask, prompts
from tests.engine.harness import assert_idle, generate, make_engine
from tests.engine.tiny import Reference, write_checkpoint

STACKS = ("gate_up_proj", "down_proj")
UP_DOWN = ("up_proj", "down_proj")
DELTA = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
V4 = (
    *STACKS, "gate", "gate_proj", "up_proj", "q_a_proj", "q_b_proj", "kv_proj", "o_b_proj", "weights_proj",
)  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral, one by one": ("mixtral", {"split": True, "experts_at": "block_sparse_moe."}),
    "mixtral, stacked, with the router": ("mixtral", {"targets": (*STACKS, "gate"), "fused_rank": 2}),
    "qwen3, one by one": ("qwen3-moe-some-dense", {"split": True}),
    "qwen3, stacked": ("qwen3-moe", {"fused_rank": 2, "targets": (*STACKS, "q_proj", "o_proj")}),
    "gpt-oss": ("gpt-oss", {"targets": (*STACKS, "router", "q_proj")}),
    "deepseek": ("deepseek-v3", {"targets": (*STACKS, "gate_proj", "up_proj", "gate")}),
    "deepseek v4": ("deepseek-v4", {"targets": V4, "size": 0.2}),
    "deepseek v3.2": ("deepseek-v32", {"targets": ("wq_b", "wk", "weights_proj", "q_b_proj", "o_proj")}),
    "llama 4": ("llama4", {"targets": (*STACKS, "router", "gate_proj", "down_proj")}),
    "granite": ("granite-moe-shared", {"targets": (*STACKS, "router", "input_linear", "output_linear")}),
    "qwen2, shared": ("qwen2-moe", {"targets": ("gate_proj", "up_proj", "down_proj", "shared_expert_gate")}),
    "qwen3-next": ("qwen3-next", {"targets": (*STACKS, "shared_expert_gate", "gate", *DELTA)}),
    "qwen3.5, dense": ("qwen3.5", {"targets": (*DELTA, "q_proj", "up_proj")}),
    "nemotron": ("nemotron-h-experts", {"targets": ("up_proj", "down_proj", "gate", "in_proj")}),
    "nemotron, one by one": ("nemotron-h-experts", {"targets": UP_DOWN, "split": True, "experts_at": "mixer."}),
    "nemotron, narrow": ("nemotron-h-narrow-experts", {"targets": (*UP_DOWN, "fc1_latent_proj", "fc2_latent_proj")}),
    "step 3.5": ("step3.5", {"targets": (*STACKS, "gate", "gate_proj", "down_proj", "g_proj")}),
    "qwen3.5, experts": ("qwen3.5-moe", {"targets": (*DELTA, "gate")}),
}
QUICK = ("mixtral, one by one", "qwen3, stacked", "gpt-oss", "deepseek", "qwen3.5, dense")


@pytest.mark.parametrize(
    "case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_an_adapter_of_experts_equals_merging_it(tmp_path: Path, case: str) -> None:
    family, settings = CASES[case]
    base = write_checkpoint(family, tmp_path / "base")
    plain, merged = Reference(base), Reference(base)
    adapter = write_expert_adapter(tmp_path / "adapter", plain.model, **settings)
    merge_experts(merged.model, adapter)
    engine = make_engine(base, adapters=(AdapterSpec("tuned", str(adapter)),), token_budget=40, num_blocks=60)
    asked = {f"r{i}": (prompt, "tuned" if i % 2 else "") for i, prompt in enumerate(prompts(6))}
    got = generate(engine, *(ask(id, prompt, adapter) for id, (prompt, adapter) in asked.items()))
    for id, (prompt, name) in asked.items():
        assert (merged if name else plain).agrees(prompt, got[id], TIE), id
    assert any(not plain.agrees(prompt, got[id], TIE) for id, (prompt, name) in asked.items() if name)
    assert_idle(engine)


def test_adapters_of_experts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    base = write_checkpoint("mixtral", tmp_path / "base")
    model = Reference(base).model
    config = read_config(json.loads((base / "config.json").read_text()))

    def read(folder: Path, experts: bool = True, rank: int = 16) -> None:
        layout = layout_of(config, experts=experts)
        read_adapter("a", folder, layout, max_rank=rank, dtype=torch.float32, pin=False)

    folder = write_expert_adapter(tmp_path / "a", model, fused_rank=2)
    read(folder)
    with pytest.raises(CheckpointError, match="set adapter_experts: true"):
        read(folder, experts=False)
    with pytest.raises(CheckpointError, match="rank 8 is above adapter_rank 4"):
        read(folder, rank=4)
    settings = json.loads((folder / "adapter_config.json").read_text())
    for change, message in (
        ({"target_parameters": ["experts.down_proj"]}, "leaves out"),
        ({"rank_pattern": {}}, "rank 4 on this model needs"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps({**settings, **change}))
        with pytest.raises(CheckpointError, match=message):
            read(folder)
    wide = write_checkpoint("mixtral", tmp_path / "wide", intermediate_size=80)
    with pytest.raises(CheckpointError, match="fit no experts here"):
        read(write_expert_adapter(tmp_path / "b", Reference(wide).model))
    many = write_checkpoint("mixtral", tmp_path / "many", num_local_experts=5)
    with pytest.raises(CheckpointError, match="needs"):
        read(write_expert_adapter(tmp_path / "c", Reference(many).model))
    more = write_expert_adapter(tmp_path / "d", Reference(many).model, split=True, experts_at="block_sparse_moe.")
    with pytest.raises(CheckpointError, match="does not have"):
        read(more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mixtral", {"target_modules": ["w1", "w2", "w3"]}),
        ("mixtral", {"target_modules": "all-linear"}),
        ("qwen3-moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"], "use_rslora": True}),
        ("gpt-oss", {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "router.weight"]}),
        ("deepseek-v3", {"target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"]}),
        ("llama4", {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
        ("llama4", {"target_modules": "all-linear"}),
        ("qwen3-next", {"target_modules": "all-linear"}),
        ("qwen3.5", {"target_modules": "all-linear"}),
        ("granite-moe-shared", {"target_modules": [], "target_parameters": ["experts.down_proj", "router.weight"]}),
        ("qwen2-moe", {"target_modules": "all-linear"}),
        ("glm4-moe", {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    ],
)
def test_adapters_of_experts_that_peft_saves(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    peft = parts.library("peft")
    base = write_checkpoint(family, tmp_path / "base")
    plain, merged = Reference(base), Reference(base)
    theirs = peft.get_peft_model(merged.model, peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **settings))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0, 0.15)
    theirs.save_pretrained(tmp_path / "adapter")
    merged.model = theirs.merge_and_unload().eval()
    engine = make_engine(base, adapters=(AdapterSpec("tuned", str(tmp_path / "adapter")),))
    prompt = prompts(1)[0]
    got = generate(engine, ask("x", prompt, "tuned"))["x"]
    assert got and merged.agrees(prompt, got, TIE)
    assert not plain.agrees(prompt, got, TIE)
