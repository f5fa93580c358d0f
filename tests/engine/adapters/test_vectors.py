"""DoRA, biases and norms of adapters: what the model with all of it merged into its weights answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.adapters import vectors
from penstock.engine.adapters.layout import PlacedSite, Site
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.adapters.vectors import SiteVectors, VectorBank
from penstock.engine.request import Request
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
from tests.engine.tiny import Reference, write_checkpoint

FILE = "adapter_model.safetensors"
FAMILIES = ["gemma3-two-ropes", "glm4", "olmo2", "cohere", "falcon-h1", "nemotron-h", "qwen3-next"]
KINDS: dict[str, dict[str, Any]] = {
    "dora": {"dora": True},
    "both": {"dora": True, "bias": "all", "targets": ("q_proj", "o_proj", "down_proj")},
    "biases": {"bias": "lora_only"},
    "of-b": {"lora_bias": True, "targets": ("k_proj", "o_proj")},
    "norms": {"modules_to_save": ["input_layernorm", "norm"], "targets": ("v_proj",)},
}


def write_vectors(
    folder: Path, base: Path, *, dora: bool = False, bias: str = "none", spread: float = 0.4, **settings: Any
) -> Path:
    """As PEFT saves an adapter with DoRA, whose magnitudes differ from the lengths of rows by `spread`, or with trained
    biases, those of `lora_B` with `lora_bias` among them."""
    write_adapter(folder, base, **settings)
    generator = torch.Generator().manual_seed(9 + settings.get("seed", 0))
    tensors, weights = load_file(folder / FILE), load_file(base / "model.safetensors")
    for key in list(tensors):
        module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if not key.endswith(".lora_A.weight"):
            continue
        weight = weights[f"{module}.weight"]
        outputs = weight.shape[0]
        if dora:
            times = 1 + spread * torch.randn(outputs, generator=generator)
            tensors[f"base_model.model.{module}.lora_magnitude_vector"] = weight.norm(dim=1) * times
        if settings.get("lora_bias"):
            tensors[key.replace("lora_A.weight", "lora_B.bias")] = 0.3 * torch.randn(outputs, generator=generator)
    targets = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in tensors}
    for name, own in weights.items():
        module = name.removesuffix(".bias")
        if not name.endswith(".bias") or bias == "none" or (bias == "lora_only" and module not in targets):
            continue
        at = f"{module}.base_layer" if module in targets else module
        tensors[f"base_model.model.{at}.bias"] = own + 0.4 * torch.randn(own.shape, generator=generator)
    for name, own in weights.items():
        if name.removesuffix(".weight").endswith(tuple(settings.get("modules_to_save", ()))) and own.dim() == 1:
            tensors[f"base_model.model.{name}"] = own + 0.5 * torch.randn(own.shape, generator=generator)
    save_file(tensors, folder / FILE)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": dora, "bias": bias}))
    return folder


def merged(base: Path, adapter: Path, folder: Path) -> Path:
    """The checkpoint with all of it; what has no bias gets one."""
    shutil.copytree(base, folder)
    config, lora = json.loads((adapter / "adapter_config.json").read_text()), load_file(adapter / FILE)
    weights, scale = load_file(base / "model.safetensors"), config["lora_alpha"] / config["r"]
    weights |= {name: lora[f"base_model.model.{name}"] for name in weights if f"base_model.model.{name}" in lora}
    for name in [name for name in weights if name.endswith(".weight")]:
        module = name.removesuffix(".weight")
        key = f"base_model.model.{module}"
        if f"{key}.lora_A.weight" in lora:
            weight = weights[name] + scale * lora[f"{key}.lora_B.weight"] @ lora[f"{key}.lora_A.weight"]
            if f"{key}.lora_magnitude_vector" in lora:
                weight = weight * (lora[f"{key}.lora_magnitude_vector"] / weight.norm(dim=1)).unsqueeze(1)
            weights[name] = weight
        for bias in (f"{key}.base_layer.bias", f"{key}.bias"):
            if bias in lora:
                weights[f"{module}.bias"] = lora[bias]
        if f"{key}.lora_B.bias" in lora:
            own = weights.get(f"{module}.bias", torch.zeros(len(lora[f"{key}.lora_B.bias"])))
            weights[f"{module}.bias"] = own + scale * lora[f"{key}.lora_B.bias"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-mha-bias", tmp_path_factory.mktemp("vectors") / "base")


@pytest.fixture(scope="module")
def specs(base: Path) -> tuple[AdapterSpec, ...]:
    kinds = {**KINDS, "plain": {}}
    return tuple(
        AdapterSpec(name, str(write_vectors(base.parent / name, base, seed=seed, **settings)))
        for seed, (name, settings) in enumerate(kinds.items())
    )


def mixed(count: int = 12) -> list[Request]:
    names = ["", *KINDS, "plain"]
    return [ask(f"r{i}", prompt, names[i % len(names)]) for i, prompt in enumerate(prompts(count))]


@pytest.fixture(scope="module")
def alone(base: Path, specs: tuple[AdapterSpec, ...]) -> dict[str, list[int]]:
    return one_by_one(make_engine(base, adapters=specs), mixed())


def test_they_equal_merging_them(base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]]) -> None:
    folders = {spec.name: Path(spec.source) for spec in specs}
    references = {
        name: Reference(merged(base, folder, base.parent / f"{name} merged")) for name, folder in folders.items()
    }
    plain = Reference(base)
    different = 0
    for request in mixed():
        got, name = alone[request.request_id], request.adapter
        assert (references[name] if name else plain).agrees(request.prompt, got, TIE), (request.request_id, name)
        different += bool(name) and not plain.agrees(request.prompt, got, TIE)
    assert different >= 6, "the adapters make no difference"


def test_in_company_each_request_gets_what_it_gets_alone(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]]
) -> None:
    assert_same_in_company(base, specs, mixed(), alone)


@pytest.mark.slow
def test_in_deterministic_company_too(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    assert_same_in_deterministic_company(base, specs, mixed)


@on_grids
def test_ranks_give_the_same(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]], grid: tuple[int, int]
) -> None:
    assert_same_on_ranks(base, specs, mixed(), alone, grid)


@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_on_quantized_weights(base: Path, tmp_path: Path, weights: str) -> None:
    adapter = write_vectors(tmp_path / "a", base, dora=True, bias="all")
    same = write_vectors(tmp_path / "same", base, dora=True, spread=0.0, alpha=0)
    specs = (AdapterSpec("a", str(adapter)), AdapterSpec("same", str(same)))
    engine = make_engine(base, adapters=specs, weights=weights, activations="int16")
    prompt = prompts(1)[0]
    got = generate(engine, ask("base", prompt), ask("a", prompt, "a"), ask("same", prompt, "same"))
    assert got["same"] == got["base"] != got["a"]
    if weights == "int8":
        assert Reference(merged(base, adapter, tmp_path / "merged")).agrees(prompt, got["a"][:1], 1.0)


def test_other_steps_stay_recorded(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    engine = make_engine(base, adapters=specs, weights="int8")
    executor: Any = engine.runner.executor
    adapted = executor.adapted
    generate(engine, ask("a", [1, 2, 3], "dora"), ask("b", [1, 2, 3], "plain"))
    assert executor.adapted is adapted is not None
    assert executor.further is None


def test_prefixes_and_reloads_know_them(base: Path, tmp_path: Path) -> None:
    """An adapter that differs in its magnitudes, biases or norms alone is another one."""
    first = write_vectors(tmp_path / "a", base, dora=True, bias="all", modules_to_save=["norm"])
    config = json.loads((first / "adapter_config.json").read_text())
    # Of linears PEFT takes it for false, with a warning.
    (first / "adapter_config.json").write_text(json.dumps({**config, "fan_in_fan_out": True}))
    tensors = load_file(first / FILE)
    engine = make_engine(base, adapters=(AdapterSpec("a", str(first)),))
    prompt = prompts(1)[0]
    before = generate(engine, ask("1", prompt, "a"))["1"]
    pool: Any = engine.runner.adapters.pool  # type: ignore[union-attr]
    versions = {pool.version("a")}
    for end in ("norm.weight", "q_proj.base_layer.bias", "magnitude_vector"):
        changed = {key: value.flip(0).contiguous() for key, value in tensors.items() if key.endswith(end)}
        tensors |= changed
        save_file(tensors, first / FILE)
        pool.load(AdapterSpec("a", str(first)), lambda status: None)
        after = generate(engine, ask(end, prompt, "a"))[end]
        assert changed and pool.version("a") not in versions, end
        versions.add(pool.version("a"))
    assert before != after
    assert Reference(merged(base, first, tmp_path / "merged")).agrees(prompt, after, TIE)


def test_what_cannot_be_applied_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    adapter = write_vectors(tmp_path / "a", base, dora=True, bias="all", targets=("q_proj",))
    file, tensors = adapter / "adapter_config.json", load_file(adapter / FILE)
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "use_dora": False}))
    assert "use_dora: False" in failure(base, adapter)
    file.write_text(json.dumps({**config, "lora_bias": True}))
    assert "has no lora_B.bias, but adapter_config.json has lora_bias: True" in failure(base, adapter)
    file.write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    for changes, words in (
        ({f"{name}.lora_magnitude_vector": torch.ones(3)}, "is (3,); on this model it must be (64,)"),
        ({f"{name}.base_layer.bias": torch.ones(64, 1)}, "is (64, 1); on this model it must be (64,)"),
        ({f"{name}.base_layer.bias": torch.full((64,), float("nan"))}, "not finite"),
        ({"base_model.model.model.layers.0.input_layernorm.bias": torch.ones(64)}, "is not the model's own"),
        ({"base_model.model.model.layers.1.mlp.up_proj.lora_magnitude_vector": torch.ones(9)}, "no lora_A and lora_B"),
    ):
        save_file({**tensors, **changes}, adapter / FILE)
        assert words in failure(base, adapter), words


def test_other_modules_must_be_the_models_own(base: Path, tmp_path: Path) -> None:
    adapter = write_vectors(tmp_path / "a", base, modules_to_save=["up_proj", "norm"])
    tensors, weights = load_file(adapter / FILE), load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, f"base_model.model.{name}": weights[name]}, adapter / FILE)
    engine = make_engine(base, adapters=(AdapterSpec("a", str(adapter)),))
    assert generate(engine, ask("r", [1, 2, 3], "a", 2))["r"]
    for changes, words in (
        ({name: weights[name] + 1}, f"cannot apply 'base_model.model.{name}'"),
        ({"model.norm.weight": torch.ones(3)}, "is (3,), not"),
        ({"model.norm.weight": torch.full((64,), float("inf"))}, "not finite"),
    ):
        save_file({**tensors, **{f"base_model.model.{key}": value for key, value in changes.items()}}, adapter / FILE)
        assert words in failure(base, adapter), words
    save_file({key: value for key, value in tensors.items() if "norm" not in key}, adapter / FILE)
    assert "modules_to_save has norm, and" in failure(base, adapter)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3-qknorm",
        pytest.param("gemma3-two-ropes", marks=pytest.mark.slow),
        pytest.param("qwen3-next", marks=pytest.mark.slow),
    ],
)
def test_norms_of_queries_and_keys(family: str, tmp_path: Path) -> None:
    """In company, which has other norms or none of its own, on ranks too, as the model has them with these norms."""
    base = write_checkpoint(family, tmp_path / "base")
    saved = {"both": ["q_norm", "k_norm", "input_layernorm"], "keys": ["k_norm"], "plain": []}
    folders = {
        name: write_vectors(tmp_path / name, base, modules_to_save=norms, seed=seed, targets=("q_proj", "o_proj"))
        for seed, (name, norms) in enumerate(saved.items())
    }
    specs = tuple(AdapterSpec(name, str(folder)) for name, folder in folders.items())
    names = ["", *folders]
    made = [ask(f"r{i}", prompt, names[i % 4], 10) for i, prompt in enumerate(prompts(8))]
    alone = one_by_one(make_engine(base, adapters=specs), made)
    for name in ("both", "keys"):
        reference = Reference(merged(base, folders[name], tmp_path / f"{name} merged"))
        for request in (one for one in made if one.adapter == name):
            got = alone[request.request_id]
            assert reference.agrees(request.prompt, got, TIE), (name, reference.margins(request.prompt, got))
    assert_same_in_company(base, specs, made, alone)
    assert_same_on_ranks(base, specs, made, alone, (2, 1))


def test_norms_of_all_queries_together_must_be_the_models_own(tmp_path: Path) -> None:
    base = write_checkpoint("olmo2", tmp_path / "base")
    adapter = write_vectors(tmp_path / "a", base, modules_to_save=["q_norm"])
    assert "those of the heads of queries and keys may be changed" in failure(base, adapter)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gemma3-two-ropes", "glm4", "olmo2", "cohere", "falcon-h1", "nemotron-h", "qwen3-next", "lfm2"]
)
def test_norms_of_other_families(family: str, tmp_path: Path) -> None:
    base = write_checkpoint(family, tmp_path / "base")
    settings: dict[str, Any] = {"targets": ("q_proj", "in_proj_qkvz"), "spread": 0.2}
    saved = ["layernorm", "model.norm", ".norm_f", "norm"] if family != "nemotron-h" else ["backbone.norm_f", "norm"]
    adapter = write_vectors(tmp_path / "a", base, modules_to_save=saved, **settings)
    tensors = load_file(adapter / FILE)
    stored = load_file(base / "model.safetensors")
    for key, value in tensors.items():  # norms inside of attention and mixers stay as they are
        inner = key.removeprefix("base_model.model.")
        if any(part in inner for part in ("q_norm", "k_norm", "mamba.norm", "mixer.norm", "linear_attn.norm")):
            tensors[key] = stored[inner].to(value.dtype)
    save_file(tensors, adapter / FILE)
    engine = make_engine(base, adapters=(AdapterSpec("a", str(adapter)),), token_budget=40)
    plain, reference = Reference(base), Reference(merged(base, adapter, tmp_path / "merged"))
    different = 0
    for i, prompt in enumerate(prompts(3)):
        got = generate(engine, ask(f"a{i}", prompt, "a"), ask(f"b{i}", prompt))
        assert reference.agrees(prompt, got[f"a{i}"], TIE), (family, i)
        assert plain.agrees(prompt, got[f"b{i}"], TIE), (family, i)
        different += got[f"a{i}"] != got[f"b{i}"]
    assert different


def test_a_step_of_many_slots_changes_each_token_as_its_own_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_AT_ONCE", 6 * 700)
    bank, generator = VectorBank(3, torch.device("cpu")), torch.Generator().manual_seed(0)
    placed = PlacedSite(Site("x", ("x",), (6,), 4), layer=1, index=2, start=0, column=3)
    held = [SiteVectors(torch.randn(2, 12, generator=generator), frozenset({(1, 2)})) for _ in range(2)]
    untouched = SiteVectors(torch.randn(2, 12, generator=generator), frozenset({(0, 2)}))
    for slot, each in enumerate([*held, untouched]):
        bank.put(slot, each)
    for slots in ([0, -1, 1, 2, 0], [1, 1, 1], [-1, 2], [0] * 2000, [0, 1] * 1000):
        y = torch.randn(len(slots), 6, generator=generator).to(torch.bfloat16)
        expected = y.float()
        for token, slot in enumerate(slots):
            if slot in (0, 1):
                scale, shift = held[slot].data[:, 3:9]
                expected[token] = (expected[token] * scale + shift).to(torch.bfloat16)
        bank.begin(np.array(slots, np.int32))
        bank.alter(y, placed)
        assert torch.equal(y.float(), expected)
