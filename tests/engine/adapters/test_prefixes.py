"""Prefix tuning and cartridges: stored keys and values before those of every prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.backends import select
from penstock.engine.request import Request
from tests.engine.adapters.company import (
    TIGHT,
    assert_same_in_company,
    assert_same_in_deterministic_company,
    one_by_one,
)
from tests.engine.adapters.files import write_adapter
from tests.engine.adapters.test_end_rows import failure
from tests.engine.adapters.test_equals_merging import TIE, ask, prompts
from tests.engine.adapters.test_virtual_tokens import first_delta
from tests.engine.adapters.virtual_files import KEYS, WithCache, write_prefix, write_prompt
from tests.engine.harness import assert_idle, generate, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference, write_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("prefixes") / "base")


@pytest.fixture(scope="module")
def specs(base: Path) -> tuple[AdapterSpec, ...]:
    """With a LoRA and a tuned prompt among them."""
    folders = {name: write_prefix(base.parent / name, base, name, seed=seed) for seed, name in enumerate(KEYS)}
    folders["lora"] = write_adapter(base.parent / "lora", base, rank=4)
    folders["tuned"] = write_prompt(base.parent / "tuned", base, "tuned")
    return tuple(AdapterSpec(name, str(folder)) for name, folder in folders.items())


def mixed(count: int = 10) -> list[Request]:
    names = ["prefix", "", "cartridge", "lora", "tuned"]
    return [ask(f"r{i}", prompt, names[i % 5], 8) for i, prompt in enumerate(prompts(count))]


@pytest.fixture(scope="module")
def alone(base: Path, specs: tuple[AdapterSpec, ...]) -> dict[str, list[int]]:
    return one_by_one(make_engine(base, adapters=specs), mixed())


def test_answers_are_those_behind_the_prefix(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]]
) -> None:
    references = {spec.name: WithCache(base, Path(spec.source)) for spec in specs[:2]}
    plain, different = Reference(base), 0
    for request in mixed():
        if request.adapter in references:
            got = alone[request.request_id]
            margins = references[request.adapter].margins(request.prompt, got)
            assert float(margins.max()) <= TIE, (request.adapter, margins)
            different += not plain.agrees(request.prompt, got, TIE)
    assert different >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings", "tie"),
    [
        ("gemma2", {}, TIE),
        ("qwen3-qknorm", {}, TIE),
        ("laguna", {}, TIE),
        ("llama-gqa", {"reference": True}, TIE),
        ("llama-gqa", {"kv_dtype": "int8"}, 0.3),
        ("llama-gqa", {"weights": "int8", "activations": "int16"}, 0.5),
    ],
    ids=str,
)
def test_of_other_families_and_caches_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, settings: dict[str, Any], tie: float
) -> None:
    base = write_checkpoint(family, tmp_path / "base")
    folders = {name: write_prefix(tmp_path / name, base, name, seed=3) for name in KEYS}
    if settings == {"reference": True}:
        settings = {}
        monkeypatch.setattr(select.cpu, "load", lambda threads: None)
    engine = make_engine(base, adapters=tuple(AdapterSpec(name, str(one)) for name, one in folders.items()), **settings)
    for name, folder in folders.items():
        reference = WithCache(base, folder)
        for i, prompt in enumerate(prompts(2)):
            got = generate(engine, ask(f"{name} {i}", prompt, name, 6))[f"{name} {i}"]
            assert float(reference.margins(prompt, got).max()) <= tie, (name, reference.margins(prompt, got))


def test_in_company_each_request_gets_what_it_gets_alone(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]]
) -> None:
    assert_same_in_company(base, specs, mixed(), alone, TIGHT | {"num_blocks": 30})


@pytest.mark.slow
def test_in_deterministic_company_too(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    assert_same_in_deterministic_company(base, specs, mixed)


@pytest.mark.parametrize("grid", [(2, 2), pytest.param((1, 3), marks=pytest.mark.slow)], ids=str)
def test_ranks_give_the_same(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]], grid: tuple[int, int]
) -> None:
    with threaded_engine(base, *grid, adapters=specs, token_budget=16) as engine:
        assert generate(engine, *mixed()) == alone


def test_blocks_are_shared_by_the_requests_of_an_adapter(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    engine = make_engine(base, adapters=specs, block_size=4)
    generate(engine, ask("first", [5, 6, 7], "cartridge", 2))
    before = engine.load_snapshot().prefix_hit_tokens
    delta = first_delta(engine, ask("second", [8, 9, 10, 11], "cartridge", 2))
    assert engine.load_snapshot().prefix_hit_tokens - before == 16, "the whole blocks of 19 tokens"
    assert delta.cached_tokens == 0, "none of the prompt"
    assert_idle(engine)


def test_what_cannot_be_applied_is_refused(base: Path, tmp_path: Path) -> None:
    folder = write_prefix(tmp_path / "other", base, "prefix", token_dim=None, num_layers=None)
    save_file({"prompt_embeddings": torch.ones(7, 96)}, folder / "adapter_model.safetensors")
    assert "keys and values of this model's" in failure(base, folder)
    save_file({"prompt_embeddings": torch.full((7, 2 * 2 * 32), torch.inf)}, folder / "adapter_model.safetensors")
    assert "prompt_embeddings" in failure(base, folder)
    wrong = write_prefix(tmp_path / "wrong", base, "prefix", num_layers=9)
    assert "and adapter_config.json says (7, " in failure(base, wrong)
    hybrid = write_checkpoint("bamba", tmp_path / "hybrid")
    assert "whose layers all have attention" in failure(hybrid, write_prefix(tmp_path / "of", hybrid, "prefix"))
