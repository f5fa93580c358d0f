"""Adapters that replace rows of embedding and head: matrices trained as a whole, and rows of single tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.adapters.rows import EndRows, ReplacedRows, RowBank
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.request import Request, SamplingParams
from tests.engine.adapters.company import (
    assert_same_in_company,
    assert_same_in_deterministic_company,
    assert_same_on_ranks,
    on_grids,
    one_by_one,
)
from tests.engine.adapters.test_ends import merged, write_ends
from tests.engine.adapters.test_equals_merging import TIE, ask, prompts
from tests.engine.harness import assert_idle, drain, generate, make_engine
from tests.engine.tiny import Reference, write_checkpoint

BOTH = ("embed_tokens", "lm_head")


def noisy(matrix: torch.Tensor, seed: int, size: float) -> torch.Tensor:
    return matrix + size * torch.randn(matrix.shape, generator=torch.Generator().manual_seed(seed)) * matrix.std()


def write_saved(
    folder: Path,
    base: Path,
    *,
    modules: tuple[str, ...] = BOTH,
    tokens: dict[str, list[int]] | list[int] | None = None,
    ends: tuple[str, ...] = (),
    rows: slice = slice(None),
    count: int | None = None,
    declared: bool = True,
    seed: int = 0,
    size: float = 0.7,
    **config: Any,
) -> Path:
    """As PEFT saves an adapter of some linears with whole modules (`modules_to_save`, only `rows` of which were
    changed) or rows of `tokens`. `ends`: with matrices of rank 6 on these too; `count`: resized to so many tokens;
    `declared`: or else PEFT saves whole matrices only since they were resized."""
    write_ends(folder, base, ends=ends, seed=seed, **config)
    tensors, weights = load_file(folder / "adapter_model.safetensors"), load_file(base / "model.safetensors")
    found = next(name for name in weights if name.endswith(("embed_tokens.weight", "embeddings.weight")))
    own = {"embed_tokens": weights[found], "lm_head": weights.get("lm_head.weight", weights[found])}
    paths = {"embed_tokens": found.removesuffix(".weight"), "lm_head": "lm_head"}
    for number, module in enumerate(modules):
        matrix = own[module].clone()
        matrix[rows] = noisy(matrix, 100 * seed + number, size)[rows]
        if count is not None:
            more = noisy(matrix, 7 + seed, 1.0)[: max(0, count - len(matrix))]
            matrix = torch.cat((matrix, more))[:count].contiguous()
        tensors[f"base_model.model.{paths[module]}.weight"] = matrix
    for key in list(tensors) if count is not None else ():
        if not key.endswith(("lora_embedding_A", "lm_head.lora_B.weight")):
            continue
        matrix = tensors[key].t() if key.endswith("A") else tensors[key]
        matrix = torch.cat((matrix, 2 * matrix[: max(0, (count or 0) - len(matrix))]))[:count]
        tensors[key] = (matrix.t() if key.endswith("A") else matrix).contiguous()
    named = {"embed_tokens": tokens} if isinstance(tokens, list) else tokens or {}
    for number, (module, ids) in enumerate(named.items()):
        values = noisy(own[module], 100 * seed + 50 + number, 2 * size)[ids]
        tensors[f"base_model.model.{paths[module]}.token_adapter.trainable_tokens_delta"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    file = folder / "adapter_config.json"
    settings = json.loads(file.read_text())
    saved = [paths[module].rpartition(".")[2] for module in modules] if declared else []
    settings |= {"modules_to_save": saved or None, "trainable_token_indices": tokens}
    file.write_text(json.dumps(settings))
    return folder


def replaced(base: Path, adapter: Path, folder: Path) -> Path:
    """The checkpoint with the adapter in its weights, as PEFT merges it."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors, weights = load_file(adapter / "adapter_model.safetensors"), load_file(base / "model.safetensors")
    found = next(name for name in weights if name.endswith(("embed_tokens.weight", "embeddings.weight")))
    tied = "lm_head.weight" not in weights
    weights.setdefault("lm_head.weight", weights[found].clone())
    tokens = config["trainable_token_indices"] or {}
    named = {"embed_tokens": tokens} if isinstance(tokens, list) else dict(tokens)
    for name, module in ((found, "embed_tokens"), ("lm_head.weight", "lm_head")):
        key = f"base_model.model.{name.removesuffix('.weight')}"
        weights[name] = tensors.get(f"{key}.weight", weights[name])
        of = "embed_tokens" if tied and module not in named else module
        if of in named:
            path = found.removesuffix(".weight") if of == "embed_tokens" else of
            rows = tensors[f"base_model.model.{path}.token_adapter.trainable_tokens_delta"]
            weights[name] = weights[name].index_copy(0, torch.tensor(named[of]), rows)
    between = folder.parent / f"{folder.name} between"
    shutil.copytree(base, between)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, between / "model.safetensors")
    settings = json.loads((base / "config.json").read_text())
    settings |= {"vocab_size": len(weights[found]), "tie_word_embeddings": False}
    (between / "config.json").write_text(json.dumps(settings))
    made = merged(between, adapter, folder)
    shutil.rmtree(between)
    return made


KINDS: dict[str, dict[str, Any]] = {
    "both": {},
    "some rows and matrices on top": {"rows": slice(5, 40), "ends": BOTH},
    "embedding": {"modules": ("embed_tokens",)},
    "tokens": {"modules": (), "tokens": [9, 3, 70]},
    "tokens of both": {"modules": (), "tokens": {"embed_tokens": [9, 3], "lm_head": [5, 3, 100]}},
    "tokens and a head": {"modules": ("lm_head",), "tokens": [11, 2]},
}


@pytest.mark.parametrize(
    "family",
    [
        "llama-gqa",
        pytest.param("llama-mqa-tied", marks=pytest.mark.slow),
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("cohere", marks=pytest.mark.slow),
        pytest.param("granite", marks=pytest.mark.slow),
    ],
)
def test_replaced_rows_equal_merging_them(tmp_path: Path, family: str) -> None:
    base = write_checkpoint(family, tmp_path / "base")
    plain, references, specs = Reference(base), {}, []
    more: dict[str, Any] = {"size": 3.0} if family == "gemma2" else {}
    for seed, (name, settings) in enumerate(KINDS.items()):
        adapter = write_saved(tmp_path / name, base, seed=seed, **{**settings, **more})
        references[name.replace(" ", "-")] = Reference(replaced(base, adapter, tmp_path / f"merged {name}"))
        specs.append(AdapterSpec(name.replace(" ", "-"), str(adapter)))
    engine = make_engine(base, adapters=tuple(specs), token_budget=40, num_blocks=80)
    names = ["", *references]
    asked = {f"r{i}": (prompt, names[i % len(names)]) for i, prompt in enumerate(prompts(2 * len(names)))}
    got = generate(engine, *(ask(id, prompt, adapter) for id, (prompt, adapter) in asked.items()))
    for id, (prompt, name) in asked.items():
        assert (references[name] if name else plain).agrees(prompt, got[id], TIE), (id, name)
    different = {name for id, (prompt, name) in asked.items() if name and not plain.agrees(prompt, got[id], TIE)}
    assert len(different) >= 4, different
    assert_idle(engine)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("rows") / "base")


@pytest.fixture(scope="module")
def specs(base: Path) -> tuple[AdapterSpec, ...]:
    kinds: dict[str, dict[str, Any]] = {
        "both": {"ends": BOTH},
        "head": {"modules": (), "tokens": {"lm_head": list(range(110, 190))}},
        "tokens": KINDS["tokens"],
    }
    return tuple(
        AdapterSpec(name, str(write_saved(base.parent / name, base, seed=seed, **settings)))
        for seed, (name, settings) in enumerate(kinds.items())
    )


def mixed(count: int = 12) -> list[Request]:
    names = ["", "both", "head", "tokens"]
    return [ask(f"r{i}", prompt, names[i % 4]) for i, prompt in enumerate(prompts(count))]


@pytest.fixture(scope="module")
def alone(base: Path, specs: tuple[AdapterSpec, ...]) -> dict[str, list[int]]:
    return one_by_one(make_engine(base, adapters=specs), mixed())


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
def test_on_quantized_weights_what_is_replaced_is_not_quantized(base: Path, tmp_path: Path, weights: str) -> None:
    adapter = write_saved(tmp_path / "a", base, modules=("lm_head",), linears=("q_proj",), size=3.0, lora_alpha=0)
    engine = make_engine(base, adapters=(AdapterSpec("a", str(adapter)),), weights=weights, activations="int16")
    prompt = prompts(1)[0]
    got = generate(engine, ask("base", prompt), ask("a", prompt, "a"))
    assert got["base"] != got["a"]
    reference = Reference(replaced(base, adapter, tmp_path / "merged"))
    assert reference.agrees(prompt, got["a"][:1], 1.0)


def test_steps_without_them_stay_recorded(base: Path, specs: tuple[AdapterSpec, ...], tmp_path: Path) -> None:
    ends = write_ends(tmp_path / "ends", base)
    engine = make_engine(base, adapters=(*specs, AdapterSpec("ends", str(ends))), weights="int8")
    generate(engine, ask("a", [1, 2, 3], "both"))
    executor: Any = engine.runner.executor
    assert executor.further is None
    generate(engine, ask("b", [1, 2, 3], "ends"))
    assert executor.further.has_head


def test_fewer_tokens_than_the_model_has(base: Path, tmp_path: Path) -> None:
    """`resize_token_embeddings(len(tokenizer))` cuts off the padding of a model's vocabulary."""
    count = 90
    adapter = write_saved(tmp_path / "a", base, count=count, ends=())
    reference = Reference(replaced(base, adapter, tmp_path / "merged"))
    engine = make_engine(base, adapters=(AdapterSpec("a", str(adapter)),))
    for i, prompt in enumerate(prompts(3)):
        prompt = [token % count for token in prompt]
        got = generate(engine, ask(f"r{i}", prompt, "a"))[f"r{i}"]
        assert max(got) < count and reference.agrees(prompt, got, TIE)


def test_log_probabilities_are_those_of_the_adapter(base: Path, tmp_path: Path) -> None:
    adapter = write_saved(tmp_path / "a", base, count=150)
    merged_base = replaced(base, adapter, tmp_path / "merged")
    prompt = [token % 150 for token in [*prompts(1, seed=5)[0], 3, 1, 4]]

    def scored(engine: Any, name: str) -> list[float]:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        engine.submit(Request("r", prompt, params, adapter=name))
        found = [delta.prompt_logprobs for delta in drain(engine) if delta.prompt_logprobs]
        return [position.logprob for position in found[0] if position is not None]

    ours = scored(make_engine(base, adapters=(AdapterSpec("a", str(adapter)),)), "a")
    assert ours == pytest.approx(scored(make_engine(merged_base), ""), abs=2e-3)


def failure(base: Path, adapter: Path, **settings: Any) -> str:
    engine = make_engine(base, adapters=(AdapterSpec("a", str(adapter)),), **settings)
    engine.submit(ask("r", [1, 2, 3], "a"))
    return next(delta.error for delta in drain(engine) if delta.error)


def test_what_cannot_be_applied_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    many = write_saved(tmp_path / "many", base)
    assert "set adapter_rows: " in failure(base, many, adapter_rows=10)
    longer = write_saved(tmp_path / "longer", base, count=600)
    assert "adapter_tokens" in failure(base, longer, adapter_tokens=9)
    missing = write_saved(tmp_path / "missing", base, modules=(), modules_to_save=["embed_tokens"])
    file = missing / "adapter_config.json"
    config = json.loads(file.read_text())
    for change, words in (
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save has embed_tokens"),
        ({"modules_to_save": "embed_tokens"}, "modules_to_save must be a list of names"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices has rows of the embedding"),
        ({"trainable_token_indices": ["x"]}, "trainable_token_indices must be one or more integers"),
    ):
        file.write_text(json.dumps({**config, **change}))
        assert words in failure(base, missing), change
    tokens = write_saved(tmp_path / "tokens", base, modules=(), tokens=[1, 2])
    file = tokens / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "trainable_token_indices": [1, 2, 3]}))
    assert "does not fit trainable_token_indices" in failure(base, tokens)
    layers = write_saved(tmp_path / "layers", base, modules=())
    tensors = load_file(layers / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.0.mlp.up_proj.weight"] = torch.ones(4, 4)
    save_file(tensors, layers / "adapter_model.safetensors")
    assert "cannot apply 'base_model.model.model.layers.0.mlp.up_proj.weight'" in failure(base, layers)


def test_a_slot_takes_the_rows_of_one_adapter_after_the_other() -> None:
    """With memory of its own, as devices have it."""
    generator = torch.Generator().manual_seed(1)

    def rows(*ids: int) -> ReplacedRows:
        return ReplacedRows(torch.tensor(ids), torch.randn(len(ids), 8, generator=generator))

    bank = RowBank(2, 20, 8, torch.float32, torch.device("cpu"), most=3)
    first, second = EndRows(rows(1, 5, 7), rows(2, 3)), EndRows(rows(5), rows(19, 4, 0), tokens=15)
    own, x, logits = (torch.randn(n, m, generator=generator) for n, m in ((20, 8), (4, 8), (4, 20)))
    ids, slots = torch.tensor([5, 1, 5, 9]), np.array([1, 1, -1, 1], np.int32)
    for ends in (first, second, None):
        bank.put(1, ends)
        bank.begin(slots)
        stream, expected = own[ids], own[ids]
        bank.replace_embedding(ids, stream)
        bank.begin_head(slots)
        y, wanted = logits.clone(), logits.clone()
        bank.replace_logits(x, y)
        y = bank.bound_logits(x, y, lambda logits: logits)
        for t in range(4):
            if slots[t] < 0 or ends is None or ends.embedding is None or ends.head is None:
                continue
            at = (ends.embedding.ids == ids[t]).nonzero().flatten()
            if len(at):
                expected[t] = ends.embedding.values[at[0]]
            wanted[t, ends.head.ids] = ends.head.values @ x[t]
            wanted[t, ends.tokens or 20 :] = float("-inf")
        torch.testing.assert_close(stream, expected)
        torch.testing.assert_close(y, wanted)


def test_a_model_with_another_table_of_tokens_takes_none_of_an_adapters_own(tmp_path: Path) -> None:
    base = write_checkpoint("gemma4-small", tmp_path / "base")
    message = failure(base, write_saved(tmp_path / "longer", base, count=203), adapter_tokens=9)
    assert "an adapter of this family cannot bring tokens of its own" in message
