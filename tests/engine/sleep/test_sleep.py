"""An engine that sleeps gives its memory back, and wakes as it was (R-ENG-14)."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from penstock.bench.soak.engines import verify_everything
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.backends.reference.backend import ReferenceBackend
from penstock.engine.backends.reference.linear import DenseLinear
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.models.layers.linear import Linear
from penstock.engine.parallel import launch
from penstock.engine.parallel.rank import RankServer
from penstock.engine.request import Request
from penstock.engine.sleep.memory import storages_of, walk
from penstock.engine.sleep.offload import offload
from penstock.engine.sleep.sleep import EngineSleep
from penstock.errors import ConfigError
from tests.engine.adapters.files import write_adapter
from tests.engine.harness import assert_idle, drain, generate, greedy, make_engine
from tests.engine.parallel.threads import _spawn, threaded_engine
from tests.engine.tiny import write_checkpoint

REQUEST = greedy("a", [5, 9, 2, 77, 31, 8, 8, 1, 4, 60, 61, 62, 63, 64, 65, 66, 67], 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("sleeper") / "model")


def test_a_sleeping_engine_is_gone_and_a_woken_one_answers_the_same(folder: Path) -> None:
    config = EngineConfig(str(folder), device="cpu", dtype="float32", threads=1, max_model_len=256)
    sleeper = EngineSleep(config, Engine.load)
    not_loaded = sleeper.not_loaded()
    assert (not_loaded.info.max_model_len, not_loaded.info.vocab_size, not_loaded.info.num_blocks) == (256, 199, 0)
    engine = sleeper.wake(not_loaded)
    expected = generate(engine, REQUEST)
    kv, decoder = weakref.ref(engine.runner.kv), weakref.ref(engine)
    sleeping = sleeper.sleep(engine)
    assert sleeping.info == engine.info and not sleeping.has_work and sleeping.step() is None
    del engine
    gc.collect()
    assert kv() is None and decoder() is None, "something still holds the memory"
    woken = sleeper.wake(sleeping)
    assert generate(woken, REQUEST) == expected
    assert_idle(woken)


class PlainBackend(ReferenceBackend):
    """As on CUDA: dense weights in ordinary tensors, which sleep moves."""

    offloads = True

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return DenseLinear(weight.clone(), bias)


@pytest.fixture
def plain() -> Iterator[None]:
    with (
        patch("penstock.engine.startup.part.pick_backend", lambda device, threads: PlainBackend()),
        patch("penstock.engine.kv.kinds.zeros", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype)),
    ):
        yield


@pytest.fixture
def plain_engine(folder: Path, plain: None) -> Engine:
    return make_engine(folder)


@contextmanager
def seen_servers() -> Iterator[list[RankServer]]:
    """The worker ranks of engines that are started meanwhile."""
    found: list[RankServer] = []
    serve = RankServer.serve

    def noted(server: RankServer) -> None:
        found.append(server)
        serve(server)

    with patch.object(RankServer, "serve", noted):
        yield found


def test_offloaded_memory_is_empty_and_comes_back_under_the_same_tensors(plain_engine: Engine) -> None:
    expected = generate(plain_engine, REQUEST)
    tensors = [item for item in walk(plain_engine) if isinstance(item, Tensor)]
    weight, cache = plain_engine.runner.decoder.layers[0].mixer.output.weight, plain_engine.runner.kv.layers[1].v  # type: ignore[attr-defined]
    assert any(weight is tensor for tensor in tensors) and any(cache is tensor for tensor in tensors)
    before = weight.clone()
    size = sum(storage.nbytes() for storage in storages_of(tensors).values())
    offloaded = offload(plain_engine)
    assert sum(storage.nbytes() for storage in storages_of(tensors).values()) < size / 100
    assert weight.untyped_storage().nbytes() == cache.untyped_storage().nbytes() == 0
    woken = offloaded.restore()
    assert torch.equal(weight, before) and not cache.any()
    assert generate(woken, REQUEST) == expected, "and nothing of the old cache was taken for a prefix"
    assert_idle(woken)


def test_a_wake_without_room_takes_nothing_and_can_be_tried_again(plain_engine: Engine) -> None:
    expected = generate(plain_engine, REQUEST)
    tensors = [item for item in walk(plain_engine) if isinstance(item, Tensor)]
    offloaded = offload(plain_engine)
    asleep = sum(storage.nbytes() for storage in storages_of(tensors).values())
    with (
        patch.object(PlainBackend, "synchronize", side_effect=MemoryError("no room")),
        pytest.raises(MemoryError, match="no room"),
    ):
        offloaded.restore()
    assert sum(storage.nbytes() for storage in storages_of(tensors).values()) == asleep
    assert generate(offloaded.restore(), REQUEST) == expected


def test_every_rank_sleeps_and_wakes_with_what_it_knew(folder: Path, plain: None) -> None:
    with seen_servers() as others, threaded_engine(folder, 2, 2) as engine:
        expected = generate(engine, REQUEST)
        tensors = [item for server in others for item in walk(server) if isinstance(item, Tensor)]
        size = sum(storage.nbytes() for storage in storages_of(tensors).values())
        assert len(others) == 3 and size
        sleeper = EngineSleep(engine.config, Engine.load)
        for _ in range(2):
            sleeping = sleeper.sleep(engine)
            assert sum(storage.nbytes() for storage in storages_of(tensors).values()) < size / 100
            assert sleeper.wake(sleeping) is engine
            assert sum(storage.nbytes() for storage in storages_of(tensors).values()) == size
            for table in (server.models[0].tables for server in others):
                assert torch.equal(table, engine.runner.rows.block_tables), "the ranks no longer agree on the tables"
            assert generate(engine, REQUEST) == expected
        assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("moved", [True, False], ids=["moved", "dropped"])
def test_ranks_with_a_draft_model_and_adapters_wake_as_they_were(
    folder: Path, tmp_path: Path, request: pytest.FixtureRequest, moved: bool
) -> None:
    """Also an adapter that was loaded at run time; and nothing of the draft's old cache is taken for a prefix."""
    if moved:
        request.getfixturevalue("plain")
    listed, later = (write_adapter(tmp_path / name, folder, seed=seed) for name, seed in (("listed", 1), ("later", 2)))
    asked = [replace(REQUEST, request_id=name, adapter=name) for name in ("", "listed", "later")]
    specs = AdapterSpec("listed", str(listed)), AdapterSpec("later", str(later))
    settings = {"speculation": "draft", "draft_model": str(folder), "adapters": specs[:1]}
    with threaded_engine(folder, 2, 2, **settings) as engine:
        assert engine.adapters is not None
        engine.adapters.load(specs[1], lambda status: None)
        drain(engine)
        expected = answers_of(engine, asked)
        assert expected == generate(make_engine(folder, adapters=specs), *asked)
        sleeper = EngineSleep(engine.config, Engine.load)
        with patch.object(launch, "_spawn", _spawn):
            woken = sleeper.wake(sleeper.sleep(engine))
        try:
            assert (woken is engine) is moved
            assert answers_of(woken, asked) == expected
            assert_idle(woken)
        finally:
            woken.close()


def answers_of(engine: Engine, asked: list[Request]) -> dict[str, list[int]]:
    """With draft tokens of the model itself, all of which must be accepted where no adapter changes what follows."""
    assert engine.speculation is not None
    verify_everything(engine.speculation)
    plain, *adapted = asked
    before = engine.load_snapshot()
    answers = generate(engine, plain)
    load = engine.load_snapshot()
    tried, accepted = load.draft_tokens - before.draft_tokens, load.accepted_tokens - before.accepted_tokens
    assert tried == accepted > 0
    return answers | generate(engine, *adapted)


def test_without_room_on_one_rank_all_ranks_stay_asleep(folder: Path, plain: None) -> None:
    with seen_servers() as others, threaded_engine(folder, 1, 3) as engine:
        expected = generate(engine, REQUEST)
        tensors = [item for root in (*others, engine) for item in walk(root) if isinstance(item, Tensor)]
        offloaded = offload(engine)
        asleep = sum(storage.nbytes() for storage in storages_of(tensors).values())
        (lacking,) = (
            one.part.backend for server in others for one in server.models if one.stage.groups.place.rank == 2
        )
        for moment in (1, 2):  # while memory comes back, and once it has
            calls = itertools.count()

            def synchronize(moment: int = moment, calls: Iterator[int] = calls) -> None:
                if next(calls) == moment:
                    raise MemoryError("no room")

            with (
                patch.object(lacking, "synchronize", synchronize),
                pytest.raises(ConfigError, match=r"rank 2 .*there is no room to wake: no room"),
            ):
                offloaded.restore()
            assert sum(storage.nbytes() for storage in storages_of(tensors).values()) == asleep
        assert generate(offloaded.restore(), REQUEST) == expected
