"""An engine that sleeps gives its memory back, and wakes as it was (R-ENG-14)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.models.layers import linear
from penstock.engine.sleep.offload import park, storages_of, walk
from penstock.engine.sleep.sleep import Slumber
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint

REQUEST = greedy("a", [5, 9, 2, 77, 31, 8, 8, 1, 4, 60, 61, 62, 63, 64, 65, 66, 67], 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("slumber") / "model")


def test_a_sleeping_engine_is_gone_and_a_woken_one_answers_the_same(folder: Path) -> None:
    config = EngineConfig(str(folder), device="cpu", dtype="float32", threads=1, max_model_len=256)
    slumber = Slumber(config, Engine.load)
    unborn = slumber.unborn()
    assert (unborn.info.max_model_len, unborn.info.vocab_size, unborn.info.num_blocks) == (256, 199, 0)
    engine = slumber.wake(unborn)
    expected = generate(engine, REQUEST)
    kv, decoder = weakref.ref(engine.runner.kv), weakref.ref(engine)
    dormant = slumber.sleep(engine)
    assert dormant.info == engine.info and not dormant.has_work and dormant.step() is None
    del engine
    gc.collect()
    assert kv() is None and decoder() is None, "somebody still holds the memory"
    woken = slumber.wake(dormant)
    assert generate(woken, REQUEST) == expected
    assert_idle(woken)


@pytest.fixture
def plain_engine(folder: Path) -> Iterator[Engine]:
    """As on CUDA: dense weights in ordinary tensors, PyTorch kernels."""
    with (
        patch("penstock.engine.startup.part.pick_ops", lambda device, threads: ReferenceOps()),
        patch("penstock.engine.models.build.make_linear", lambda w, bias=None: linear.DenseLinear(w.clone(), bias)),
        patch("penstock.engine.kv.kinds.zeros", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype)),
    ):
        yield make_engine(folder)


def test_parked_memory_is_empty_and_comes_back_under_the_same_tensors(plain_engine: Engine) -> None:
    expected = generate(plain_engine, REQUEST)
    tensors = [item for item in walk(plain_engine) if isinstance(item, Tensor)]
    weight, cache = plain_engine.runner.decoder.layers[0].mixer.output.weight, plain_engine.runner.kv.layers[1].v  # type: ignore[attr-defined]
    assert any(weight is tensor for tensor in tensors) and any(cache is tensor for tensor in tensors)
    before = weight.clone()
    size = sum(storage.nbytes() for storage in storages_of(tensors).values())
    parked = park(plain_engine)
    assert sum(storage.nbytes() for storage in storages_of(tensors).values()) < size / 100
    assert weight.untyped_storage().nbytes() == cache.untyped_storage().nbytes() == 0
    woken = parked.restore()
    assert torch.equal(weight, before) and not cache.any()
    assert generate(woken, REQUEST) == expected, "and nothing of the old cache was taken for a prefix"
    assert_idle(woken)


def test_a_wake_without_room_takes_nothing_and_can_be_tried_again(plain_engine: Engine) -> None:
    expected = generate(plain_engine, REQUEST)
    tensors = [item for item in walk(plain_engine) if isinstance(item, Tensor)]
    parked = park(plain_engine)
    asleep = sum(storage.nbytes() for storage in storages_of(tensors).values())
    with (
        patch("penstock.engine.sleep.offload._synchronize", side_effect=MemoryError("no room")),
        pytest.raises(MemoryError, match="no room"),
    ):
        parked.restore()
    assert sum(storage.nbytes() for storage in storages_of(tensors).values()) == asleep
    assert generate(parked.restore(), REQUEST) == expected
