"""Persistent blocks on a disk that is damaged, full or failing, and engines that fail with them (R-ENG-4)."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.startup import part
from penstock.errors import ConfigError
from tests.engine.harness import generate, greedy
from tests.engine.persistent import BLOCK, answers, converse, files, kill, settle, start, text, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    return answers(folder)


def test_damage_is_noticed(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(folder, tmp_path)
    converse(engine, expected)
    engine.close()
    (data,), (index,) = files(tmp_path, "rank0.blocks"), files(tmp_path, "rank0.blocks.index")
    whole, records = data.read_bytes(), index.read_bytes()

    def again(**settings: Any) -> tuple[int, list[int]]:
        engine = start(folder, tmp_path, **settings)
        cached = converse(engine, expected)
        kill(engine)
        data.write_bytes(whole)
        index.write_bytes(records)
        return engine.load_snapshot().disk_restored_blocks, cached

    data.write_bytes(bytes(len(whole)))
    assert again() == (24, [0] * 4), "zeros"
    data.write_bytes(whole[BLOCK:] + whole[:BLOCK])
    assert again() == (24, [0] * 4), "blocks at other places"
    data.write_bytes(whole[: BLOCK // 2])
    assert again() == (24, [0] * 4), "cut"
    data.write_bytes(bytes(byte ^ (at % BLOCK == 5000) for at, byte in enumerate(whole)))
    assert again() == (24, [0] * 4), "a bit of each"
    index.write_bytes(records[: 4096 + 64 * 12 + 30])
    restored, cached = again()
    assert restored <= 12 and sum(cached) <= 16 * 12, "a record is cut"
    index.write_bytes(records[:4096] + records[4096 + 64 :] + records[4096 : 4096 + 64])
    assert again() == (0, [0] * 4), "records at other places"
    caplog.clear()
    index.write_bytes(records[:20] + b"?" + records[21:])
    assert again() == (0, [0] * 4)
    assert "its index is damaged" in caplog.text
    index.unlink()
    assert again() == (0, [0] * 4)
    assert again() == (24, [96] * 4), "and without any"


def test_after_a_failed_step_the_rest_is_found(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    engine = start(folder, tmp_path)
    converse(engine, expected)
    settle(engine)
    launch = engine.runner.executor.run

    def failing(*args: Any) -> Any:
        engine.runner.executor.run = launch  # type: ignore[method-assign]
        raise RuntimeError("broken")

    engine.runner.executor.run = failing  # type: ignore[method-assign, assignment]
    generate(engine, greedy("x", text(9), 3))
    assert converse(engine, expected) == [96] * 4
    kill(engine)
    engine = start(folder, tmp_path)
    assert engine.load_snapshot().disk_restored_blocks == 4 * 6
    engine.close()


def test_when_the_device_fails_nothing_is_found(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    engine = start(folder, tmp_path)
    converse(engine, expected)
    settle(engine)
    engine.scheduler.allocator.pool.forget_all()
    kill(engine)
    engine = start(folder, tmp_path)
    assert engine.load_snapshot().disk_restored_blocks == 0
    engine.close()


def test_without_a_usable_folder_it_goes_on(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    for wrong in ({"disk_path": "/proc/nowhere"}, {"disk_memory": 1 << 60}):
        caplog.clear()
        engine = start(folder, tmp_path, **wrong)
        assert converse(engine, expected) == [0] * 4 and engine.load_snapshot().total_disk_blocks == 0
        assert "goes on without blocks on disk" in caplog.text
        engine.close()
    assert sum(file.stat().st_size for file in files(tmp_path, "rank0.blocks")) == 0
    with pytest.raises(ConfigError, match="disk_persistent keeps what is in disk_memory"):
        start(folder, tmp_path, disk_memory=0)


def test_a_disk_that_fails_later_is_reported_once(
    folder: Path,
    tmp_path: Path,
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = start(folder, tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", full)
        assert converse(engine, expected) == [0] * 4
        settle(engine)
    assert engine.load_snapshot().disk_failures > 0 and engine.load_snapshot().disk_blocks == 0
    assert caplog.text.count("No space left on device") == 1
    engine.close()
    engine = start(folder, tmp_path)
    assert engine.load_snapshot().disk_restored_blocks == 0
    engine.close()


def test_an_engine_that_could_not_start_leaves_no_lock(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(folder, tmp_path)
    converse(engine, expected)
    engine.close()

    def fail(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr("penstock.engine.startup.engine._warm_up", fail)
        with pytest.raises(MemoryError):
            start(folder, tmp_path)
    engine = start(folder, tmp_path)
    assert converse(engine, expected) == [96] * 4, "in the same slot"
    monkeypatch.setattr(engine, "save", fail)  # a rank is lost, say
    engine.close()
    engine = start(folder, tmp_path)
    assert converse(engine, expected) == [96] * 4
    engine.close()


def test_weights_that_change_while_they_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copy = shutil.copytree(folder, tmp_path / "model")
    (weights,) = copy.glob("*.safetensors")
    read = part.load_part

    def replaced(*args: Any, **settings: Any) -> part.Part:
        found = read(*args, **settings)
        os.utime(weights, ns=(1, 1))
        return found

    monkeypatch.setattr("penstock.engine.startup.engine.load_part", replaced)
    engine = start(copy, tmp_path / "disk")
    assert "the checkpoint changed while it was read" in caplog.text
    assert engine.load_snapshot().total_disk_blocks == 0 and engine.persistence is None
    engine.close()
