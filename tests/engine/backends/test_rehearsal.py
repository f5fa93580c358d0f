"""Before a step is captured, a few layers stand for all: those that launch every kernel there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.engine.backends import cpu
from penstock.engine.backends.cuda.rehearsal import make_of, shortened
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
    numbers = torch.zeros(8, 16)
    assert make_of([numbers]) == make_of([torch.ones(8, 16)])
    others = [numbers[:4], numbers.t(), numbers.double(), torch.zeros(129)[1:].view(8, 16), None]
    assert all(make_of([numbers]) != make_of([other]) for other in others)
    assert make_of({"window": 3}) != make_of({"window": 4})
    inside_itself: list[object] = [1]
    inside_itself.append(inside_itself)
    assert make_of(inside_itself) == make_of(inside_itself)
