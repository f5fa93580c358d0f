"""Adapters that PEFT saves for DeepSeek V4: those of attention, of what makes and chooses entries, of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.adapters.spec import AdapterSpec
from tests import parts
from tests.engine.adapters.test_equals_merging import TIE, ask, prompts
from tests.engine.harness import assert_idle, drain, generate, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference, write_checkpoint

ATTENTION = ["q_a_proj", "q_b_proj", "kv_proj", "o_b_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {**LORA, "target_modules": [*ATTENTION, "gate_proj", "up_proj", "weights_proj"]}),
    "experts": ("LoraConfig", {**LORA, "target_modules": ["q_b_proj"], "target_parameters": EXPERTS}),
    "dora": ("LoraConfig", {**LORA, "target_modules": [*ATTENTION, "gate_proj", "weights_proj"], "use_dora": True}),
    "ia3": ("IA3Config", {"target_modules": ATTENTION, "feedforward_modules": [], "init_ia3_weights": False}),
    "ia3, bounded": (
        "IA3Config",
        {"target_modules": ["down_proj"], "feedforward_modules": ["down_proj"], "init_ia3_weights": False},
    ),
    "oft": ("OFTConfig", {"target_modules": [*ATTENTION, "gate_proj"], "oft_block_size": 4, "init_weights": False}),
}  # fmt: skip
QUICK = ("lora", "dora")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("deepseek-v4", tmp_path_factory.mktemp("v4"))


def trained(base: Path, folder: Path, kind: str) -> Reference:
    """The model with a random adapter, which is saved to `folder`."""
    peft = parts.library("peft")
    name, settings = KINDS[kind]
    reference = Reference(base)
    theirs = peft.get_peft_model(reference.model, getattr(peft, name)(**settings))
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".lora_A" in name or ".lora_B" in name or ".oft_R" in name:
                parameter.normal_(0, 0.2)
            elif "magnitude" in name or "ia3" in name:
                parameter.mul_(1 + 0.4 * torch.rand_like(parameter))
    theirs.save_pretrained(folder)
    reference.model = theirs.merge_and_unload().eval()
    return reference


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_an_adapter_equals_merging_it(base: Path, tmp_path: Path, kind: str) -> None:
    plain, merged = Reference(base), trained(base, tmp_path, kind)
    engine = make_engine(base, adapters=(AdapterSpec("tuned", str(tmp_path)),), token_budget=40, num_blocks=90)
    asked = {f"r{i}": (prompt, "tuned" if i % 2 else "") for i, prompt in enumerate(prompts(6, longest=90))}
    got = generate(engine, *(ask(id, prompt, adapter) for id, (prompt, adapter) in asked.items()))
    for id, (prompt, name) in asked.items():
        assert (merged if name else plain).agrees(prompt, got[id], TIE), id
    assert any(not plain.agrees(prompt, got[id], TIE) for id, (prompt, name) in asked.items() if name)
    assert_idle(engine)


@pytest.mark.parametrize(
    ("kind", "grid"), [("lora", (2, 2)), pytest.param("experts", (2, 1), marks=pytest.mark.slow)], ids=str
)
def test_ranks_give_the_same(base: Path, tmp_path: Path, kind: str, grid: tuple[int, int]) -> None:
    trained(base, tmp_path, kind)
    specs = (AdapterSpec("tuned", str(tmp_path)),)
    requests = [ask(f"r{i}", prompt, "tuned" if i % 2 else "", 8) for i, prompt in enumerate(prompts(4, longest=90))]
    alone = generate(make_engine(base, adapters=specs), *requests)
    with threaded_engine(base, *grid, adapters=specs, token_budget=40) as ranks:
        assert generate(ranks, *requests) == alone


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("PromptTuningConfig", {"num_virtual_tokens": 3}, "virtual tokens have no rows"),
        ("PrefixTuningConfig", {"num_virtual_tokens": 3}, "prefix tuning needs a model"),
    ],
)
def test_what_cannot_be_applied_fails_alone(
    base: Path, tmp_path: Path, name: str, settings: dict[str, Any], message: str
) -> None:
    peft = parts.library("peft")
    peft.get_peft_model(Reference(base).model, getattr(peft, name)(task_type="CAUSAL_LM", **settings)).save_pretrained(
        tmp_path
    )
    engine = make_engine(base, adapters=(AdapterSpec("tuned", str(tmp_path)),))
    engine.submit(ask("x", [1, 2, 3], "tuned"))
    assert message in str(drain(engine)[-1].error)
