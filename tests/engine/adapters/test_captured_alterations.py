"""Decodes with DoRA, biases and norms of adapters run as captured steps (R-ENG-8).

Without a GPU: a "captured" step is one that is called again, on the reference backend."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from penstock.engine.adapters.apply import TABLES
from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.backends.cuda.decode_graphs import DecodeGraphs, Kind
from penstock.engine.backends.cuda.graphs import GraphExecutor
from penstock.engine.backends.reference.backend import ReferenceBackend
from penstock.engine.backends.reference.lora import ReferenceLora
from tests.engine.adapters.files import write_adapter
from tests.engine.adapters.test_equals_merging import TIE, ask, prompts
from tests.engine.adapters.test_vectors import merged, write_vectors
from tests.engine.harness import assert_idle, generate, make_engine
from tests.engine.parallel.test_captured_steps import captured as captured
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference, write_checkpoint


class CapturedLora(ReferenceLora):
    """Reads the slots of a captured step from its tables, as `GraphLora` says."""

    def tables(self, slots: np.ndarray, tokens: int) -> dict[str, np.ndarray]:
        return {name: slots if name == "lora_tokens" else np.zeros(0, np.int32) for name in TABLES}

    def use(self, tables: dict[str, Tensor], tokens: int, *, alters: bool = False) -> None:
        slots = tables["lora_tokens"].numpy().copy()
        self.begin(slots)
        self.begin_head(slots)
        of = self.banks
        for bank in (of.rows, *(() if alters else (of.vectors, of.norms))):
            if bank is not None:
                bank.clear()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch, captured: object) -> Counter[Kind]:
    """How often rank 0 replays steps of each kind."""
    counted: Counter[Kind] = Counter()
    replay = DecodeGraphs.replay

    def counting(self: DecodeGraphs, batch: Any) -> tuple[Tensor, Tensor]:
        counted[self.kind] += 1
        return replay(self, batch)

    def lora_kernel(self: ReferenceBackend, layout: AdapterLayout, slots: int, rank: int, dtype: Any) -> CapturedLora:
        return CapturedLora(layout, slots, self.device)

    monkeypatch.setattr(DecodeGraphs, "replay", counting)
    monkeypatch.setattr(ReferenceBackend, "lora_kernel", lora_kernel)
    return counted


def written(root: Path, family: str) -> tuple[Path, tuple[AdapterSpec, ...], dict[str, Reference]]:
    """A model, its adapters, and what requests for each of them should get."""
    base = write_checkpoint(family, root / "base")
    made = {
        "dora": write_vectors(root / "dora", base, dora=True, bias="all", seed=1),
        "norms": write_vectors(root / "norms", base, modules_to_save=["layernorm", "norm"], seed=2, rank=3),
        "lora": write_adapter(root / "lora", base, seed=3),
    }
    references = {name: Reference(merged(base, path, root / f"merged-{name}")) for name, path in made.items()}
    specs = tuple(AdapterSpec(name, str(path)) for name, path in made.items())
    return base, specs, {"": Reference(base), **references}


SETTINGS: dict[str, Any] = {"max_running": 6, "token_budget": 64, "max_model_len": 128, "num_blocks": 100}


@pytest.mark.parametrize("family", ["llama-mha-bias", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_each_request_gets_its_adapter_from_captured_steps(tmp_path: Path, family: str, replays: Counter[Kind]) -> None:
    base, specs, references = written(tmp_path, family)
    engine = make_engine(base, adapters=specs, adapter_slots=3, **SETTINGS)
    executor = engine.runner.executor
    assert isinstance(executor, GraphExecutor) and executor.altered_graphs is not None
    assert not executor.altered_graphs._captured, "captured when a step needs it"
    # Alone, beside each other, and beside requests that change nothing of the kind.
    for names in (["dora"], ["norms"], ["dora", "norms", "lora", "", "dora"], ["lora", ""]):
        replays.clear()
        asked = {f"{i}-{name}": (prompt, name) for i, (name, prompt) in enumerate(zip(names, prompts(5), strict=False))}
        got = generate(engine, *(ask(id, prompt, name, 8) for id, (prompt, name) in asked.items()))
        for id, (prompt, name) in asked.items():
            assert references[name].agrees(prompt, got[id], TIE), (family, names, id)
        altered = bool({"dora", "norms"} & set(names))
        assert (replays[Kind.ALTERED] > 5) is altered, (names, replays)
        assert altered or replays[Kind.ADAPTED] > 5, (names, replays)
    assert_idle(engine)


@pytest.mark.parametrize("grid", [None, pytest.param((2, 1), marks=pytest.mark.slow)])
def test_where_nothing_is_reserved_they_are_launched_one_by_one(
    tmp_path: Path, replays: Counter[Kind], grid: tuple[int, int] | None
) -> None:
    """`adapter_vectors: false`: the same answers, without captured steps of this kind; others stay captured."""
    base, specs, references = written(tmp_path, "llama-mha-bias")
    settings = SETTINGS | {"adapters": specs, "adapter_vectors": False}
    with contextlib.ExitStack() as stack:
        if grid is None:
            engine = make_engine(base, **settings)
        else:
            engine = stack.enter_context(threaded_engine(base, *grid, **settings))
        asked = {f"r{name}": (prompt, name) for name, prompt in zip(references, prompts(4), strict=True)}
        got = generate(engine, *(ask(id, prompt, name, 8) for id, (prompt, name) in asked.items()))
        for id, (prompt, name) in asked.items():
            assert references[name].agrees(prompt, got[id], TIE), id
        assert replays[Kind.ALTERED] == 0
        generate(engine, ask("alone", prompts(1)[0], "lora", 8))
        assert replays[Kind.ADAPTED] > 5


def test_other_ranks_replay_the_same_steps(
    tmp_path: Path, replays: Counter[Kind], captured: list[tuple[int, tuple[int, int]]]
) -> None:
    base, specs, references = written(tmp_path, "llama-mha-bias")
    captured.clear()
    with threaded_engine(base, 2, 1, adapters=specs, **SETTINGS) as engine:
        asked = {name: (prompt, name) for name, prompt in zip(references, prompts(4), strict=True)}
        got = generate(engine, *(ask(f"r{id}", prompt, name, 8) for id, (prompt, name) in asked.items()))
        for id, (prompt, name) in asked.items():
            assert references[name].agrees(prompt, got[f"r{id}"], TIE), id
        assert_idle(engine)
    assert replays[Kind.ALTERED] == sum(kind == Kind.ALTERED for kind, _ in captured) > 0
