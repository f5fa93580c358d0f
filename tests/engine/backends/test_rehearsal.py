"""Before a step is captured, a few layers stand for all: those that launch every kernel there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.engine.backends import cpu
from penstock.engine.backends.cuda.rehearsal import Makes, shortened
from penstock.engine.core import Engine
from penstock.engine.runner.eager import EagerExecutor
from tests.engine.harness import make_engine
from tests.engine.tiny import write_checkpoint


@pytest.fixture(autouse=True)
def reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "load", lambda threads: None)


def _kept(engine: Engine) -> list[int]:
    executor = engine.runner.executor
    assert isinstance(executor, EagerExecutor)
    decoder, kv = executor._decoder, executor._kv
    few, cache = shortened(decoder, kv)
    assert len(cache.layers) == len(few.layers)
    kept = [next(i for i, layer in enumerate(decoder.layers) if layer is one) for one in few.layers]
    assert [kv.layers[index] for index in kept] == cache.layers
    return kept


def test_of_layers_that_are_alike_the_first_two_and_the_last(tmp_path: Path) -> None:
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path, num_hidden_layers=6), num_blocks=8)
    assert _kept(engine) == [0, 1, 5]


def test_one_of_each_make_behind_one_of_each_make(tmp_path: Path) -> None:
    """Three layers with a window, then one without, twice."""
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 2
    engine = make_engine(
        write_checkpoint("olmo3", tmp_path, num_hidden_layers=8, layer_types=kinds), num_blocks=8, max_running=4
    )
    assert _kept(engine) == [0, 1, 2, 3, 4, 7]


def test_tensors_of_another_shape_or_type_or_place_make_another_layer() -> None:
    number, numbers = Makes(), torch.zeros(8, 16)
    assert number.of([numbers]) == number.of([torch.ones(8, 16)])
    others = [numbers[:4], numbers.t(), numbers.double(), torch.zeros(129)[1:].view(8, 16), None]
    assert all(number.of([numbers]) != number.of([other]) for other in others)
    assert number.of({"window": 3}) != number.of({"window": 4})


def test_parts_that_have_each_other_are_alike_by_what_they_have_besides() -> None:
    number = Makes()

    def inside_itself(first: int) -> list[object]:
        made: list[object] = [first]
        made.append(made)
        return made

    assert number.of(inside_itself(1)) == number.of(inside_itself(1)) != number.of(inside_itself(2))


def test_modules_and_parts_that_many_have_are_looked_at_once(tmp_path: Path) -> None:
    """Operations of a Hopper device have a module, whose names lead to all others."""
    shared: list[object] = [0]
    for _ in range(100):
        shared = [shared, shared]
    assert Makes().of(shared) == 101
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path, num_hidden_layers=6), num_blocks=8)
    executor = engine.runner.executor
    assert isinstance(executor, EagerExecutor)
    executor._decoder.layers[0].mixer.ops.hopper_prefill = torch  # type: ignore[attr-defined]
    assert _kept(engine) == [0, 1, 5]
