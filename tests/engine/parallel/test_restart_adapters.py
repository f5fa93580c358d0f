"""A rank that is started again has every adapter in the slot where it was (R-ENG-8 with R-ENG-10)."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from penstock.engine.adapters.spec import AdapterSpec, AdapterStatus
from penstock.engine.core import Engine
from penstock.engine.parallel import launch
from penstock.engine.parallel.adapters import FollowingAdapters
from penstock.errors import ReplicaLost
from tests.engine.harness import assert_idle, collect, drain, generate, make_engine
from tests.engine.parallel.lost_rank import lose, run_losing
from tests.engine.parallel.test_adapters import adapters_for, ask, load, requests
from tests.engine.parallel.threads import _spawn, threaded_engine
from tests.engine.tiny import write_checkpoint
from tests.engine_host.client import eventually

SETTINGS: dict[str, Any] = {"token_budget": 32, "rank_restarts": 3, "kv_dtype": "full", "watchdog_s": 120}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("restart") / "llama-gqa")


@pytest.fixture(scope="module")
def specs(base: Path) -> tuple[AdapterSpec, ...]:
    return adapters_for(base, base.parent, "llama-gqa")


@pytest.fixture(scope="module")
def expected(base: Path, specs: tuple[AdapterSpec, ...]) -> dict[str, list[int]]:
    return generate(make_engine(base, adapters=specs, token_budget=32, kv_dtype="full"), *requests(specs, 16))


@pytest.fixture
def followers(monkeypatch: pytest.MonkeyPatch) -> list[FollowingAdapters]:
    """What the other ranks keep, in the order of their start."""
    found: list[FollowingAdapters] = []
    handlers = FollowingAdapters.handlers

    def seen(self: FollowingAdapters) -> Any:
        found.append(self)
        return handlers(self)

    monkeypatch.setattr(FollowingAdapters, "handlers", seen)
    return found


@contextmanager
def restartable(base: Path, tensor: int, pipeline: int, **settings: Any) -> Iterator[Engine]:
    with (
        threaded_engine(base, tensor, pipeline, **SETTINGS, **settings) as engine,
        patch.object(launch, "_spawn", _spawn),
    ):
        assert engine.ranks is not None
        engine.ranks.watch(lambda why: None, exit_after_s=None)
        yield engine


@pytest.mark.parametrize(
    ("tensor", "pipeline", "rank"),
    [
        (2, 1, 1),
        pytest.param(2, 2, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, 2, marks=pytest.mark.slow),
        pytest.param(1, 3, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("slots", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_streams_with_adapters_go_on(
    base: Path,
    specs: tuple[AdapterSpec, ...],
    expected: dict[str, list[int]],
    followers: list[FollowingAdapters],
    tensor: int,
    pipeline: int,
    rank: int,
    slots: int,
) -> None:
    with restartable(base, tensor, pipeline, adapters=specs, adapter_slots=slots) as engine:
        generate(engine, *requests(specs, 1))  # all have been read
        held = set(followers[0]._adapters)
        assert collect(run_losing(engine, requests(specs, 16), rank, at=12)) == expected
        assert engine.load_snapshot().preemptions > 0
        again = followers[-1]
        assert len(followers) == tensor * pipeline
        assert eventually(lambda: set(again._adapters) == held)
        assert generate(engine, *requests(specs, 16)) == expected
        assert_idle(engine)
        for spec in specs:
            engine.unload_adapter(spec.name)
        generate(engine, ask("last", [1, 2], ""))
        assert sum(bool(follower._adapters) for follower in followers) == 1, "only the one that was lost"


@pytest.mark.slow
def test_an_adapter_that_is_being_read_is_read_again(
    base: Path,
    specs: tuple[AdapterSpec, ...],
    expected: dict[str, list[int]],
    followers: list[FollowingAdapters],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading = threading.Event()
    read = FollowingAdapters.read

    def never_answered(self: FollowingAdapters, *what: Any) -> Any:
        answer = read(self, *what)
        if what[1] != "outputs" or len(followers) > 1:
            return answer
        reading.set()
        return Future()

    monkeypatch.setattr(FollowingAdapters, "read", never_answered)
    *some, last = specs
    with restartable(base, 1, 2, adapters=tuple(some), adapter_slots=2, adapter_rank=20) as engine:
        assert engine.adapters is not None and engine.ranks is not None
        generate(engine, *(ask(spec.name, [1, 2], spec.name, 2) for spec in some))
        statuses: list[AdapterStatus] = []
        engine.adapters.load(last, statuses.append)
        for request in requests(specs, 16):
            engine.submit(request)
        assert reading.wait(60)
        lose(engine, 1)
        assert collect(drain(engine)) == expected
        assert [status.state for status in statuses] == ["ready"]
        load = engine.load_snapshot().adapters
        assert load is not None and load.failures == 0
        assert len(followers) == 2 and eventually(lambda: len(followers[1]._adapters) == 3)
        assert_idle(engine)


def test_streams_do_not_wait_for_adapters_that_are_in_no_slot(
    base: Path, specs: tuple[AdapterSpec, ...], followers: list[FollowingAdapters], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, asked = threading.Event(), threading.Event()
    read = FollowingAdapters.read
    *some, idle = specs

    def slowly(self: FollowingAdapters, number: int, name: str, *where: str) -> Any:
        if name != idle.name or len(followers) < 2:
            return read(self, number, name, *where)
        asked.set()
        done: Future[str] = Future()

        def work() -> None:
            assert go_on.wait(60)
            done.set_result(read(self, number, name, *where).result())

        threading.Thread(target=work, daemon=True).start()
        return done

    monkeypatch.setattr(FollowingAdapters, "read", slowly)
    with restartable(base, 1, 2, adapters=specs, adapter_slots=2) as engine:
        wanted = [ask(spec.name, [1, 2, 3], spec.name, 12) for spec in some]
        generate(engine, ask("idle", [1, 2], idle.name, 2))
        expected, held = generate(engine, *wanted), set(followers[0]._adapters)
        assert collect(run_losing(engine, wanted, 1, at=3)) == expected
        assert asked.wait(60)
        assert len(followers[1]._adapters) == len(some)
        engine.submit(ask("again", [1, 2], idle.name, 2))
        go_on.set()
        assert len(collect(drain(engine))["again"]) == 2
        assert eventually(lambda: set(followers[1]._adapters) == held)
        assert_idle(engine)


@pytest.mark.slow
def test_what_was_read_by_all_but_a_lost_rank_is_dropped_by_the_others(
    base: Path, specs: tuple[AdapterSpec, ...], followers: list[FollowingAdapters], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 reads more slowly than the others: by then another rank has died and is there again."""
    *some, last = specs
    with restartable(base, 1, 3, adapters=tuple(some), adapter_slots=2, adapter_rank=20) as engine:
        assert engine.adapters is not None and engine.runner.adapters is not None and engine.ranks is not None
        model, go_on, answered = engine.runner.adapters.model, threading.Event(), threading.Event()
        read = model.read

        def slowly(name: str, folder: Path) -> Any:
            answered.set()
            assert go_on.wait(60)
            return read(name, folder)

        object.__setattr__(model, "read", slowly)
        statuses: list[AdapterStatus] = []
        engine.adapters.load(last, statuses.append)
        assert answered.wait(60)
        assert eventually(lambda: [len(follower._adapters) for follower in followers] == [1, 1])
        lose(engine, 2)
        while not engine.ranks.generation:
            engine.step()
        go_on.set()
        while not statuses:
            engine.step()
        assert statuses[0].state == "ready"
        assert eventually(lambda: sorted(len(follower._adapters) for follower in followers) == [1, 1, 1])
        numbers = [set(follower._adapters) for follower in followers]
        assert numbers[2] in numbers[:2] and numbers[0] != numbers[1], "the lost one has the first number"
        assert_idle(engine)


@pytest.mark.slow
def test_one_that_is_unloaded_while_the_rank_starts_is_gone_everywhere(
    base: Path, specs: tuple[AdapterSpec, ...], followers: list[FollowingAdapters]
) -> None:
    with restartable(base, 1, 3, adapters=specs, adapter_slots=2) as engine:
        generate(engine, *requests(specs, 2))
        assert engine.ranks is not None and len(followers[0]._adapters) == 3
        lose(engine, 1)
        while not engine.reviving:
            engine.step()
        engine.unload_adapter("some")
        while engine.has_work:
            engine.step()
        status = load(engine, AdapterSpec("again", specs[1].source))
        assert status.state == "ready"
        assert eventually(lambda: len(followers[2]._adapters) == 3)
        numbers = [set(follower._adapters) for follower in followers]
        assert numbers[2] in numbers[:2]


@pytest.mark.parametrize("slots", [1, 2], ids=["in no slot", "in a slot"])
def test_one_that_nobody_uses_is_read_anew_where_its_files_have_changed_since(
    base: Path, specs: tuple[AdapterSpec, ...], tmp_path: Path, slots: int
) -> None:
    folder = Path(shutil.copytree(specs[0].source, tmp_path / "a"))
    both = (AdapterSpec("a", str(folder)), AdapterSpec("b", specs[1].source))
    with restartable(base, 1, 2, adapters=both, adapter_slots=slots, adapter_rank=20) as engine:
        pool = engine.adapters
        assert pool is not None
        before = generate(engine, ask("a", [1, 2, 3], "a", 12))["a"]
        expected, version = generate(engine, ask("b", [1, 2, 3], "b", 12)), pool.version("a")
        shutil.rmtree(folder)
        shutil.copytree(specs[1].source, folder)
        assert collect(run_losing(engine, [ask("b", [1, 2, 3], "b", 12)], 1, at=3)) == expected
        assert eventually(lambda: pool.poll(0.0) and pool.version("a") is None)
        assert generate(engine, ask("a", [1, 2, 3], "a", 12))["a"] == expected["b"] != before
        assert pool.version("a") not in (None, version)
        assert_idle(engine)


@pytest.mark.slow
def test_files_that_have_changed_since_end_the_engine(
    base: Path, specs: tuple[AdapterSpec, ...], tmp_path: Path
) -> None:
    folder = shutil.copytree(specs[0].source, tmp_path / "a")
    with restartable(base, 2, 1, adapters=(AdapterSpec("a", str(folder)),)) as engine:
        generate(engine, ask("x", [1, 2, 3], "a"))
        shutil.rmtree(folder)
        with pytest.raises(ReplicaLost, match="the adapter a could not be read again"):
            run_losing(engine, [ask("x", [1, 2, 3], "a", 30)], 1, at=3)
