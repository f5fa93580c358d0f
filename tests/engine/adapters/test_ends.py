"""Adapters on embedding and head: what the model with the adapter merged into its weights answers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.backends.cpu.executor import RecordedExecutor
from penstock.engine.core import Engine
from penstock.engine.request import Request, SamplingParams
from tests.engine.adapters.company import (
    assert_same_in_company,
    assert_same_in_deterministic_company,
    assert_same_on_ranks,
    on_grids,
    one_by_one,
)
from tests.engine.adapters.test_equals_merging import TIE, ask, prompts
from tests.engine.harness import assert_idle, drain, generate, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference, write_checkpoint

LINEARS = ("q_proj", "down_proj")


def write_ends(
    folder: Path,
    base: Path,
    *,
    ends: tuple[str, ...] = ("embed_tokens", "lm_head"),
    linears: tuple[str, ...] = LINEARS,
    rank: int = 6,
    seed: int = 0,
    size: float = 0.25,
    whole: bool = False,
    **config: Any,
) -> Path:
    """As PEFT saves an adapter on embedding, head and some linears; `whole`: with the matrices of its base."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(base / "model.safetensors")
    found = next(name for name in weights if name.endswith(("embed_tokens.weight", "embeddings.weight")))
    embedding = found.removesuffix(".weight")
    spread, tensors = size / math.sqrt(rank), {}

    def pair(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = (torch.randn(shape, generator=generator) * spread for shape in ((rank, inputs), (outputs, rank)))
        return next(made), next(made)

    vocab, hidden = weights[found].shape
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in linears:
            tensors |= dict(
                zip((f"base_model.model.{module}.lora_{s}.weight" for s in "AB"), pair(*weight.shape), strict=True)
            )
    if "embed_tokens" in ends:
        a, b = pair(hidden, vocab)
        tensors |= {
            f"base_model.model.{embedding}.lora_embedding_A": a * 4,
            f"base_model.model.{embedding}.lora_embedding_B": b,
        }
    if "lm_head" in ends:
        a, b = pair(vocab, hidden)
        tensors |= {"base_model.model.lm_head.lora_A.weight": a, "base_model.model.lm_head.lora_B.weight": b * 4}
    if whole:
        for module, weight in ((embedding, weights[found]), ("lm_head", weights.get("lm_head.weight", weights[found]))):
            tensors[f"base_model.model.{module}.base_layer.weight"] = weight.clone()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 12, "target_modules": [*linears, *ends], "bias": "none"}
    settings["target_modules"] = [*settings["target_modules"], embedding.rpartition(".")[2]]  # type: ignore[misc]
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return folder


def merged(base: Path, adapter: Path, folder: Path) -> Path:
    """The checkpoint with the adapter in its weights; embedding and head are no longer tied."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in base.glob("*.json"):
        shutil.copy(file, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, lora = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    found = next(name for name in weights if name.endswith(("embed_tokens.weight", "embeddings.weight")))
    weights.setdefault("lm_head.weight", weights[found].clone())
    tied = config.get("ensure_weight_tying", False)
    for name in list(weights):
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in lora:
            weights[name] = weights[name] + scale * lora[f"{key}.lora_B.weight"] @ lora[f"{key}.lora_A.weight"]
        if f"{key}.lora_embedding_A" in lora:
            added = scale * (lora[f"{key}.lora_embedding_B"] @ lora[f"{key}.lora_embedding_A"]).t()
            weights[name] = weights[name] + added
            if tied:
                weights["lm_head.weight"] = weights["lm_head.weight"] + added
    settings = json.loads((folder / "config.json").read_text())
    settings["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama-gqa", {"whole": True}),
        ("llama-mqa-tied", {"whole": True}),
        ("gemma2", {"size": 0.5}),
        pytest.param("gemma3-two-ropes", {"size": 0.5}, marks=pytest.mark.slow),
        pytest.param("granite", {"size": 0.5}, marks=pytest.mark.slow),
        pytest.param("cohere", {"size": 0.5}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"linears": ("q_proj",)}, marks=pytest.mark.slow),
        pytest.param("mamba2", {"linears": ("in_proj",), "size": 0.6}, marks=pytest.mark.slow),
        pytest.param("deepseek-v2-lite", {"linears": ("kv_a_proj_with_mqa",), "size": 0.6}, marks=pytest.mark.slow),
    ],
)
def test_an_adapter_of_embedding_and_head_equals_merging_it(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    base = write_checkpoint(family, tmp_path / "base")
    reference, plain = {}, Reference(base)
    specs = []
    kinds = {"both": ("embed_tokens", "lm_head"), "embedding": ("embed_tokens",), "head": ("lm_head",)}
    for seed, (name, ends) in enumerate(kinds.items()):
        adapter = write_ends(tmp_path / name, base, ends=ends, seed=seed, **settings)
        reference[name] = Reference(merged(base, adapter, tmp_path / f"merged {name}"))
        specs.append(AdapterSpec(name, str(adapter)))
    engine = make_engine(base, adapters=tuple(specs), token_budget=40, num_blocks=60)
    names = ["", *kinds]
    asked = {f"r{i}": (prompt, names[i % 4]) for i, prompt in enumerate(prompts(8))}
    got = generate(engine, *(ask(id, prompt, adapter) for id, (prompt, adapter) in asked.items()))
    for id, (prompt, name) in asked.items():
        assert (reference[name] if name else plain).agrees(prompt, got[id], TIE), (id, name)
    different = [id for id, (prompt, name) in asked.items() if name and not plain.agrees(prompt, got[id], TIE)]
    assert len(different) >= 2, "the adapters make no difference"
    assert_idle(engine)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("ends") / "base")


@pytest.fixture(scope="module")
def specs(base: Path) -> tuple[AdapterSpec, ...]:
    return (
        AdapterSpec("both", str(write_ends(base.parent / "both", base, rank=11, whole=True))),
        AdapterSpec("head", str(write_ends(base.parent / "head", base, ends=("lm_head",), rank=3, seed=1))),
        AdapterSpec("linears", str(write_ends(base.parent / "linears", base, ends=(), seed=2))),
    )


def mixed(count: int = 12) -> list[Request]:
    names = ["", "both", "head", "linears"]
    return [ask(f"r{i}", prompt, names[i % 4]) for i, prompt in enumerate(prompts(count))]


@pytest.fixture(scope="module")
def alone(base: Path, specs: tuple[AdapterSpec, ...]) -> dict[str, list[int]]:
    return one_by_one(make_engine(base, adapters=specs), mixed())


def test_steps_with_them_are_recorded(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    engine = make_engine(base, adapters=specs, weights="int8")
    generate(engine, ask("r", [1, 2, 3], "both"))
    executor = engine.runner.executor
    assert isinstance(executor, RecordedExecutor) and executor.further is not None
    assert executor.further.has_head


def test_in_company_each_request_gets_what_it_gets_alone(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]]
) -> None:
    assert_same_in_company(base, specs, mixed(), alone)


def test_in_deterministic_company_too(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    assert_same_in_deterministic_company(base, specs, mixed)


@pytest.mark.slow
@on_grids
def test_ranks_give_the_same(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]], grid: tuple[int, int]
) -> None:
    assert_same_on_ranks(base, specs, mixed(), alone, grid)


@pytest.mark.slow
def test_shards_with_sequences_of_their_own_give_the_same(tmp_path: Path) -> None:
    base = write_checkpoint("mixtral", tmp_path / "base")
    linears = ("q_proj",)
    specs = (
        AdapterSpec("both", str(write_ends(tmp_path / "both", base, linears=linears))),
        AdapterSpec("head", str(write_ends(tmp_path / "head", base, ends=("lm_head",), linears=linears, seed=1))),
        AdapterSpec("linears", str(write_ends(tmp_path / "linears", base, ends=(), linears=linears, seed=2))),
    )
    alone = generate(make_engine(base, adapters=specs), *mixed())
    settings: dict[str, Any] = {"expert_parallel": True, "attention_parallel": "data", "token_budget": 32}
    with threaded_engine(base, 2, 1, adapters=specs, **settings) as engine:
        assert generate(engine, *mixed()) == alone
        assert_idle(engine)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_on_quantized_weights(base: Path, tmp_path: Path, weights: str) -> None:
    tuned = write_ends(tmp_path / "tuned", base, whole=True)
    zero = write_ends(tmp_path / "zero", base, lora_alpha=0)
    specs = (AdapterSpec("tuned", str(tuned)), AdapterSpec("zero", str(zero)))
    engine = make_engine(base, adapters=specs, weights=weights, activations="int16")
    prompt = prompts(1)[0]
    got = generate(engine, ask("base", prompt), ask("zero", prompt, "zero"), ask("tuned", prompt, "tuned"))
    assert got["zero"] == got["base"] != got["tuned"]


def test_log_probabilities_of_prompts_are_those_of_the_adapter(base: Path, tmp_path: Path) -> None:
    adapter = write_ends(tmp_path / "a", base)
    merged_base = merged(base, adapter, tmp_path / "merged")
    prompt = prompts(1, seed=5)[0] + [3, 1, 4]

    def scored(engine: Engine, name: str) -> list[float]:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        engine.submit(Request("r", prompt, params, adapter=name))
        found = [delta.prompt_logprobs for delta in drain(engine) if delta.prompt_logprobs]
        return [position.logprob for position in found[0] if position is not None]

    ours = scored(make_engine(base, adapters=(AdapterSpec("a", str(adapter)),)), "a")
    assert ours == pytest.approx(scored(make_engine(merged_base), ""), abs=2e-3)


def failure(base: Path, adapter: Path) -> str:
    engine = make_engine(base, adapters=(AdapterSpec("a", str(adapter)),), adapter_tokens=0)
    engine.submit(ask("r", [1, 2, 3], "a"))
    return next(delta.error for delta in drain(engine) if delta.error)


def changed(adapter: Path, change: Any) -> Path:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return adapter


def test_tokens_of_its_own_and_other_bases_are_refused(base: Path, tmp_path: Path) -> None:
    embedding, head = "base_model.model.model.embed_tokens", "base_model.model.lm_head"

    def more_tokens(tensors: Any) -> None:
        tensors[f"{embedding}.lora_embedding_A"] = torch.cat([tensors[f"{embedding}.lora_embedding_A"]] * 2, 1)

    def longer_base(tensors: Any) -> None:
        tensors[f"{embedding}.base_layer.weight"] = torch.cat([tensors[f"{embedding}.base_layer.weight"]] * 2)

    def one_row(tensors: Any) -> None:
        tensors[f"{head}.base_layer.weight"][17, 3] += 0.5

    def one_side(tensors: Any) -> None:
        del tensors[f"{head}.lora_B.weight"]

    for change, words in (
        (more_tokens, "tokens of its own unless adapter_tokens"),
        (longer_base, "tokens of its own unless adapter_tokens"),
        (one_row, "is another matrix than the model's own"),
        (one_side, "lm_head has no lora_B"),
    ):
        adapter = changed(write_ends(tmp_path / change.__name__, base, whole=True), change)
        assert words in failure(base, adapter), change.__name__
    left_out = write_ends(tmp_path / "left out", base, target_modules=list(LINEARS))
    assert "leaves out" in failure(base, left_out)
    saved = write_ends(tmp_path / "saved", base, modules_to_save=["lm_head"])
    assert "modules_to_save" in failure(base, saved)


@pytest.mark.slow
def test_tied_adapters_change_both_ends(tmp_path: Path) -> None:
    base = write_checkpoint("llama-mqa-tied", tmp_path / "base")
    adapter = write_ends(tmp_path / "a", base, ends=("embed_tokens",), ensure_weight_tying=True, size=0.5)
    reference = Reference(merged(base, adapter, tmp_path / "merged"))
    engine = make_engine(base, adapters=(AdapterSpec("a", str(adapter)),))
    for i, prompt in enumerate(prompts(3)):
        assert reference.agrees(prompt, generate(engine, ask(f"r{i}", prompt, "a"))[f"r{i}"], TIE)
