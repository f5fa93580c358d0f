"""Conversations that leave host memory too: they come back from disk, the same, and no step waits for it (R-ENG-4)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.core import Engine
from penstock.engine.kv.block_file import BlockFile
from penstock.engine.kv.disk import DiskTier
from penstock.errors import ConfigError
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import write_checkpoint

BLOCK = 12288
"""Bytes of a block of the model below."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama"), spread=0.5)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Engine:
    return make_engine(folder)


def text(number: int, length: int) -> list[int]:
    return [(number * 31 + 7 * i * i + 3 * i) % 199 for i in range(length)]


def small(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    """Ten blocks on the device, twenty-eight on the host, eighty on disk; a conversation has seven."""
    tiers = {"num_blocks": 10, "host_memory": 28 * BLOCK, "disk_memory": 80 * BLOCK, "disk_path": str(tmp_path)}
    return tiers | settings


def disk_of(engine: Engine) -> DiskTier:
    host = engine.scheduler.allocator.pool.host
    assert host is not None and host.disk is not None
    return host.disk


def settle(engine: Engine) -> None:
    """Until nothing more is written: time passes between conversations."""
    host = engine.scheduler.allocator.pool.host
    assert host is not None
    for _ in range(200):
        before = disk_of(engine).written
        host.write_ahead()
        for job in list(disk_of(engine)._jobs):
            for answer in job.answers:
                answer.result(100)
        host.write_ahead()
        if disk_of(engine).written == before and not disk_of(engine)._jobs:
            return


def converse(engine: Engine, alone: Engine) -> int:
    """Several conversations, again and again; how many of their tokens were computed once more."""
    computed = 0
    for turn in range(2):
        for number in range(8):
            request = greedy(f"{turn}.{number}", text(number, 100), 5)
            engine.submit(request)
            deltas = drain(engine)
            assert collect(deltas) == generate(alone, request)
            computed += 0 if turn == 0 else 100 - (deltas[0].cached_tokens or 0)
            settle(engine)
    assert_idle(engine)
    return computed


def test_conversations_come_back_from_disk(folder: Path, alone: Engine, tmp_path: Path) -> None:
    engine = make_engine(folder, **small(tmp_path))
    assert converse(engine, alone) == 8 * 4, "all but the block of the last token"
    load = engine.load_snapshot()
    assert load.total_disk_blocks == 80 and load.disk_blocks > 28
    assert load.disk_written_blocks >= load.disk_blocks and load.disk_read_blocks >= 6
    assert os.listdir(tmp_path) == [], "the file has no name"
    engine.close()


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_every_rank_has_its_part_on_disk(
    folder: Path, alone: Engine, tmp_path: Path, tensor: int, pipeline: int
) -> None:
    part = {(1, 2): BLOCK * 2 // 3, (2, 2): BLOCK // 3}[tensor, pipeline]
    sizes = {"host_memory": 28 * part, "disk_memory": 80 * part}
    with threaded_engine(folder, tensor, pipeline, **small(tmp_path, **sizes)) as engine:
        assert converse(engine, alone) == 8 * 4
        load = engine.load_snapshot()
        assert load.total_disk_blocks == 80 and load.disk_read_blocks >= 6


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reads wait until the event is set."""
    free = threading.Event()
    read = BlockFile.read

    def waiting(self: BlockFile, pairs: list[tuple[int, int]]) -> Future[list[bool]]:
        self._reader.submit(free.wait, 30)
        return read(self, pairs)

    monkeypatch.setattr(BlockFile, "read", waiting)
    yield free
    free.set()


def test_others_go_on_while_blocks_are_read(
    folder: Path, alone: Engine, tmp_path: Path, slow_disk: threading.Event
) -> None:
    engine = make_engine(folder, **small(tmp_path))
    for number in range(8):
        generate(engine, greedy(f"{number}", text(number, 100), 2))
        settle(engine)
    waits, aborted, other = greedy("waits", text(0, 100), 4), greedy("gone", text(0, 100), 4), greedy("other", [7], 20)
    for request in (waits, aborted, other):
        engine.submit(request)
    finished: dict[str, list[int]] = {}
    while "other" not in finished or len(finished["other"]) < 20:
        output = engine.step()
        for delta in output.deltas if output is not None else []:
            finished.setdefault(delta.request_id, []).extend(delta.tokens)
    assert engine.scheduler.recalling and "waits" not in finished
    assert finished["other"] == generate(alone, other)["other"]
    engine.abort("gone")
    slow_disk.set()
    deltas = drain(engine)
    assert collect(deltas)["waits"] == generate(alone, waits)["waits"]
    assert next(delta for delta in deltas if delta.request_id == "waits").cached_tokens == 96
    assert_idle(engine)
    engine.close()


@pytest.mark.slow
def test_a_disk_that_hangs_or_fails_costs_only_time(
    folder: Path, alone: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_disk: threading.Event
) -> None:
    engine = make_engine(folder, **small(tmp_path))
    now = 1000.0
    engine.clock = lambda: now
    for number in range(8):
        generate(engine, greedy(f"{number}", text(number, 100), 2))
        settle(engine)
    engine.submit(greedy("hangs", text(0, 100), 4))
    engine.step()
    assert engine.scheduler.recalling
    now += 11
    deltas = drain(engine)
    assert collect(deltas) == generate(alone, greedy("hangs", text(0, 100), 4)) and deltas[0].cached_tokens != 96
    slow_disk.set()
    settle(engine)
    broken = BlockFile._copy

    def failing(self: BlockFile, copy: Any, slot: int, at: int) -> bool:
        return copy is not os.preadv and broken(self, copy, slot, at)

    monkeypatch.setattr(BlockFile, "_copy", failing)
    read = engine.load_snapshot().disk_read_blocks
    assert converse(engine, alone) > 8 * 4
    assert engine.load_snapshot().disk_read_blocks == read
    engine.close()


@pytest.mark.slow
def test_when_the_device_fails_nothing_on_disk_is_trusted(folder: Path, alone: Engine, tmp_path: Path) -> None:
    engine = make_engine(folder, **small(tmp_path))
    for number in range(8):
        generate(engine, greedy(f"{number}", text(number, 100), 2))
    engine.scheduler.allocator.pool.forget_all()
    engine.scheduler.allocator.pool.check()
    assert disk_of(engine).used == 0
    assert converse(engine, alone) == 8 * 4
    engine.close()


def test_a_tilde_is_the_home_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for persistent in (False, True):
        settings = small(tmp_path, disk_path="~/kv", disk_persistent=persistent)
        make_engine(folder, **settings).close()
    assert os.listdir(tmp_path) == ["home"] and os.listdir(tmp_path / "home" / "kv") == ["kv-cache"]


def test_settings_that_cannot_work_are_refused(folder: Path, tmp_path: Path) -> None:
    for wrong, why in (
        ({"host_memory": 0}, "set host_memory too"),
        ({"disk_path": ""}, "needs disk_path"),
        ({"disk_memory": 100}, "less than one KV block"),
        ({"disk_memory": 1 << 60}, "no file of"),
        ({"disk_path": "/proc/nowhere"}, "no file of"),
    ):
        with pytest.raises(ConfigError, match=why):
            make_engine(folder, **small(tmp_path, **wrong))
    for wrong in ({"host_memory": 0}, {"disk_path": ""}, {"disk_memory": 0, "disk_persistent": True}):
        with pytest.raises(ConfigError, match="disk_memory"):  # before the checkpoint is looked at
            make_engine(tmp_path / "none", **small(tmp_path, **wrong))
    (tmp_path / "penstock-kv-left").write_bytes(b"of a process that was killed")
    make_engine(folder, **small(tmp_path)).close()
    assert os.listdir(tmp_path) == []
