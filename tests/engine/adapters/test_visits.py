"""DoRA, biases, IA3, OFT and BOFT on experts and on the matrix that makes keys and values of latents: what the model
with them merged into it answers, in one batch with others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.adapters.model_sites import layout_of
from penstock.engine.adapters.peft import read_adapter
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.backends import select
from penstock.engine.models.families import read_config
from penstock.engine.request import Request
from tests import parts
from tests.engine.adapters import kind_files, test_vectors
from tests.engine.adapters.company import (
    assert_same_in_company,
    assert_same_in_deterministic_company,
    assert_same_on_ranks,
    on_grids,
    one_by_one,
)
from tests.engine.adapters.files import write_adapter
from tests.engine.adapters.test_end_rows import failure
from tests.engine.adapters.test_equals_merging import TIE, ask, prompts
from tests.engine.harness import generate, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference, write_checkpoint

TARGETS = ("gate_proj", "up_proj", "down_proj", "kv_b_proj", "o_proj")
"""Experts, the shared one and dense layers alike."""
NAMES = ("dora", "of-b", "ia3", "ia3-inputs", "oft-small", "boft-small", "beft")


def write(folder: Path, base: Path, name: str, seed: int, targets: tuple[str, ...] = TARGETS) -> Path:
    if name in ("dora", "of-b"):
        settings: dict[str, Any] = {"dora": True} if name == "dora" else {"lora_bias": True}
        return test_vectors.write_vectors(folder, base, seed=seed, targets=targets, rank=4, **settings)
    kind_files.write_kind(folder, base, name, targets=targets, seed=seed)
    return folder


def merged(base: Path, adapter: Path, folder: Path) -> Path:
    config = json.loads((adapter / "adapter_config.json").read_text())
    return (test_vectors if config["peft_type"] == "LORA" else kind_files).merged(base, adapter, folder)


class BiasedExperts(torch.nn.Module):
    """The library's stacks have no biases: experts one by one, as releases before them had."""

    def __init__(self, weights: dict[str, torch.Tensor], at: str, count: int) -> None:
        super().__init__()
        self.linears = [
            {part: (weights[f"{at}.{n}.{part}.weight"], weights.get(f"{at}.{n}.{part}.bias")) for part in TARGETS[:3]}
            for n in range(count)
        ]

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        linear = torch.nn.functional.linear
        for token, row in enumerate(x):
            for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
                of = self.linears[expert]
                inner = torch.nn.functional.silu(linear(row, *of["gate_proj"])) * linear(row, *of["up_proj"])
                out[token] += weight * linear(inner, *of["down_proj"])
        return out


class Biased(Reference):
    """The model with biases that its configuration does not have."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        weights = load_file(folder / "model.safetensors")
        for name, module in self.model.named_modules():
            if name.endswith("mlp") and hasattr(module, "experts"):
                module.experts = BiasedExperts(weights, f"{name}.experts", self.model.config.n_routed_experts)
            elif f"{name}.bias" in weights and isinstance(module, torch.nn.Linear):
                module.bias = torch.nn.Parameter(weights[f"{name}.bias"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("deepseek-v3", tmp_path_factory.mktemp("visits") / "base")


@pytest.fixture(scope="module")
def folders(base: Path) -> dict[str, Path]:
    found = {name: write(base.parent / name, base, name, seed) for seed, name in enumerate(NAMES)}
    found["lora"] = write_adapter(base.parent / "lora", base, rank=4, targets=TARGETS)
    return found


@pytest.fixture(scope="module")
def specs(folders: dict[str, Path]) -> tuple[AdapterSpec, ...]:
    return tuple(AdapterSpec(name, str(folder)) for name, folder in folders.items())


def mixed() -> list[Request]:
    names = ["", *NAMES, "lora"]
    return [ask(f"r{i}", prompt, names[i], 8) for i, prompt in enumerate(prompts(len(names)))]


@pytest.fixture(scope="module")
def alone(base: Path, specs: tuple[AdapterSpec, ...]) -> dict[str, list[int]]:
    return one_by_one(make_engine(base, adapters=specs), mixed())


@pytest.mark.parametrize("names", [("dora", "oft-small"), pytest.param((*NAMES, "lora"), marks=pytest.mark.slow)])
def test_in_one_batch_they_equal_merging_them(base: Path, folders: dict[str, Path], names: tuple[str, ...]) -> None:
    engine = make_engine(base, adapters=tuple(AdapterSpec(name, str(folders[name])) for name in names))
    asked = dict(zip(("", *names), prompts(1 + len(names)), strict=True))
    answers = generate(engine, *(ask(name, prompt, name, 8) for name, prompt in asked.items()))
    plain, different = Reference(base), 0
    for name, prompt in asked.items():
        reference, got = plain, answers[name]
        if name:
            reference = Biased(merged(base, folders[name], base.parent / f"{name} merged {len(names)}"))
        assert reference.agrees(prompt, got, TIE), (name, reference.margins(prompt, got))
        different += bool(name) and not plain.agrees(prompt, got, TIE)
    assert different >= len(names) - 1, "the adapters make no difference"


@pytest.mark.slow
def test_in_company_each_request_gets_what_it_gets_alone(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]]
) -> None:
    assert_same_in_company(base, specs, mixed(), alone)


@pytest.mark.slow
def test_in_deterministic_company_too(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    assert_same_in_deterministic_company(base, specs, mixed)


@pytest.mark.slow
@on_grids
def test_ranks_give_the_same(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]], grid: tuple[int, int]
) -> None:
    assert_same_on_ranks(base, specs, mixed(), alone, grid)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["tensor", "data"])
def test_ranks_with_whole_experts_give_the_same(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]], attention: str
) -> None:
    """With sequences of their own, ranks visit experts for tokens whose adapters only others have: one request after
    another first, so that one of both ranks has none."""
    with threaded_engine(base, 2, 1, adapters=specs, expert_parallel=True, attention_parallel=attention) as engine:
        assert one_by_one(engine, mixed()) == alone
        assert generate(engine, *mixed()) == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "targets"), [("qwen3-moe", TARGETS[:3]), ("mixtral", ("w1", "w2", "w3")), ("deepseek-v2-lite", TARGETS)]
)
@pytest.mark.parametrize("reference", [False, True], ids=["native", "reference"])
def test_of_other_families_and_operations_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, targets: tuple[str, ...], reference: bool
) -> None:
    if reference:
        monkeypatch.setattr(select.cpu, "load", lambda threads: None)
    base = write_checkpoint(family, tmp_path / "base")
    monkeypatch.setitem(kind_files.KINDS["ia3"], "feedforward_modules", ["down_proj", "w2"])
    names = ("dora", "ia3", "oft-small", "boft-small")
    folders = {name: write(tmp_path / name, base, name, seed, targets) for seed, name in enumerate(names)}
    engine = make_engine(base, adapters=tuple(AdapterSpec(name, str(folder)) for name, folder in folders.items()))
    prompt, plain = prompts(1)[0], Reference(base)
    got = generate(engine, *(ask(name, prompt, name, 8) for name in names))
    for name in names:
        other = Reference(merged(base, folders[name], tmp_path / f"{name} merged"))
        assert other.agrees(prompt, got[name], TIE), (name, other.margins(prompt, got[name]))
        assert not plain.agrees(prompt, got[name], TIE), name


@pytest.mark.slow
def test_on_quantized_weights(base: Path, folders: dict[str, Path]) -> None:
    names = ("dora", "ia3", "oft-small")
    specs = tuple(AdapterSpec(name, str(folders[name])) for name in names)
    engine = make_engine(base, adapters=specs, weights="int8", activations="int16")
    prompt = prompts(1)[0]
    got = generate(engine, *(ask(name, prompt, name, 4) for name in names), ask("base", prompt, "", 4))
    for name in names:
        reference = Reference(merged(base, folders[name], base.parent / f"{name} for int8"))
        assert reference.agrees(prompt, got[name][:1], 1.0), name
    assert len({tuple(tokens) for tokens in got.values()}) == 4


def test_steps_with_them_are_launched_from_the_host(base: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """On every rank, also on one that has no layer that they change."""
    layout = layout_of(read_config(json.loads((base / "config.json").read_text())))
    for name in ("ia3", "oft-small", "lora"):
        found = read_adapter(name, folders[name], layout, max_rank=64, dtype=torch.float32, pin=False)
        assert found.by_host is (name != "lora") and found.further, name
        assert (found.visits is not None) is (name != "lora")


def test_what_does_not_fit_is_refused(base: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    for name, key, words in (
        ("ia3", "mlp.experts.99.up_proj.ia3_l", "IA3 cannot change layer 1 mlp.experts.99.up_proj"),
        ("oft-small", "mlp.experts.99.up_proj.oft_R.weight", "OFT cannot change base_model.model.model.layers.1.mlp"),
        ("dora", "mlp.experts.2.up_proj.lora_magnitude_vector", "a vector of layer 1 mlp.experts.2.up_proj is (3,)"),
    ):
        folder = tmp_path / name
        shutil.copytree(folders[name], folder)
        tensors = load_file(folder / "adapter_model.safetensors")
        tensors[f"base_model.model.model.layers.1.{key}"] = torch.ones(3)
        save_file(tensors, folder / "adapter_model.safetensors")
        assert words in failure(base, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LoraConfig", {"r": 4, "use_dora": True, "init_lora_weights": False}),
        ("IA3Config", {"feedforward_modules": ["down_proj"], "init_ia3_weights": False}),
        ("IA3Config", {"feedforward_modules": ["kv_b_proj", "up_proj"], "init_ia3_weights": False}),
        ("OFTConfig", {"oft_block_size": 8, "init_weights": False}),
        ("BOFTConfig", {"boft_block_size": 8, "init_weights": False}),
    ],
)
def test_what_peft_saves_of_them(tmp_path: Path, base: Path, kind: str, settings: dict[str, Any]) -> None:
    """The library keeps experts in stacks, on which PEFT has none of these. Releases before had a linear for each: the
    same tree of linears, as the checkpoint has it, is what PEFT wraps, saves and merges here."""
    peft = parts.library("peft")
    weights = load_file(base / "model.safetensors")
    tree = torch.nn.Module()
    for name, weight in weights.items():
        *path, leaf, _ = name.split(".")
        if leaf in TARGETS:
            at = tree
            for part in path:
                if part not in dict(at.named_children()):
                    at.add_module(part, torch.nn.Module())
                at = at.get_submodule(part)
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = torch.nn.Parameter(weight)
            at.add_module(leaf, linear)
    torch.manual_seed(5)
    config = getattr(peft, kind)(target_modules=list(TARGETS), **settings)
    wrapped = peft.get_peft_model(tree, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "ia3_l" in name or "magnitude" in name:
                parameter *= 1 + 0.4 * torch.randn(parameter.shape)
            elif "boft_R" in name or "oft_R" in name or "lora_" in name:
                parameter.normal_(0, 0.2)
    wrapped.save_pretrained(tmp_path / "adapter")
    found = wrapped.merge_and_unload()
    weights |= {name: value.contiguous() for name, value in found.state_dict().items()}
    shutil.copytree(base, tmp_path / "merged")
    save_file(weights, tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    plain, theirs = Reference(base), Reference(tmp_path / "merged")
    engine = make_engine(base, adapters=(AdapterSpec("tuned", str(tmp_path / "adapter")),))
    for i, prompt in enumerate(prompts(2)):
        got = generate(engine, ask(f"r{i}", prompt, "tuned", 8))[f"r{i}"]
        assert theirs.agrees(prompt, got, TIE), theirs.margins(prompt, got)
        assert not plain.agrees(prompt, got, TIE)
