"""Conversations that outlive their engine: the next one finds them on disk, and nothing else (R-ENG-4)."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.core import Engine
from penstock.engine.kv import block_file
from penstock.engine.sleep.sleep import EngineSleep
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.persistent import BLOCK, answers, converse, files, kill, settle, start, text, wait, write_model
from tests.engine.tiny import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    return answers(folder)


def test_conversations_outlive_the_engine(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    engine = start(folder, tmp_path)
    assert converse(engine, expected) == [0] * 4
    engine.close()
    for path in (tmp_path / "kv-cache").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    engine = start(folder, tmp_path)
    assert engine.load_snapshot().disk_restored_blocks == engine.load_snapshot().disk_blocks == 4 * 6
    assert converse(engine, expected) == [96] * 4
    load = engine.load_snapshot()
    assert load.disk_hit_tokens == 4 * 96 and load.disk_failures == 0
    settle(engine)
    assert engine.load_snapshot().disk_written_blocks == 0, "what is there is not written again"
    kill(engine)
    (identity,) = tmp_path.glob("kv-cache/*/identity")
    text = identity.read_text()
    identity.write_text("")  # it was killed when it had just made the file
    engine = start(folder, tmp_path, disk_memory=90 * BLOCK)
    assert identity.read_text() == text
    assert converse(engine, expected) == [96] * 4, "also with more room"
    engine.close()
    engine = start(folder, tmp_path, disk_memory=6 * BLOCK)
    assert engine.load_snapshot().disk_restored_blocks <= 6
    converse(engine, expected)
    engine.close()
    assert sum(file.stat().st_size for file in files(tmp_path, "rank0.blocks")) == 6 * BLOCK


def test_little_is_lost_when_it_is_killed(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    engine = start(folder, tmp_path)
    converse(engine, expected)
    settle(engine)
    kill(engine)
    engine = start(folder, tmp_path)
    assert converse(engine, expected) == [96] * 4
    engine.close()


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"kv_dtype": "int8"}, "KV dtype"),
        ({"block_size": 32}, "block size"),
        ({"weights": "int8"}, "form of weights"),
        ({"max_model_len": 200}, "window"),
    ],
)
def test_other_settings_do_not_find_them(
    folder: Path,
    tmp_path: Path,
    expected: dict[str, list[int]],
    change: dict[str, Any],
    changed: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = start(folder, tmp_path)
    converse(engine, expected)
    engine.close()
    caplog.set_level(logging.INFO)
    other = start(folder, tmp_path, **change)
    assert other.load_snapshot().disk_restored_blocks == 0
    assert f"they differ in {changed}" in caplog.text
    other.close()
    engine = start(folder, tmp_path)
    assert engine.load_snapshot().disk_restored_blocks == 24, "nor does it cost them"
    engine.close()


def test_other_weights_do_not_find_them(
    tmp_path: Path, expected: dict[str, list[int]], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    engine = start(folder, disk, name="m")
    converse(engine, expected)
    engine.close()
    (old,) = disk.glob("kv-cache/*/")
    other = write_checkpoint("llama-gqa", tmp_path / "other", spread=0.4)
    engine = start(other, disk, name="m")
    assert engine.load_snapshot().disk_restored_blocks == 0
    assert "they differ in weights" in caplog.text and not old.exists(), "they are deleted"
    generate(engine, greedy("a", text(0), 5))
    engine.close()
    (weights,) = other.glob("*.safetensors")
    os.utime(weights, ns=(1, 1))
    engine = start(other, disk, name="m")
    assert engine.load_snapshot().disk_restored_blocks == 0, "changed in place, it seems"
    engine.close()


def test_two_engines_have_a_slot_each(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    first, second = start(folder, tmp_path), start(folder, tmp_path)
    assert converse(first, expected) == converse(second, expected) == [0] * 4
    first.close()
    second.close()
    assert len(files(tmp_path, "rank0.blocks")) == 2
    first, second = start(folder, tmp_path), start(folder, tmp_path)
    assert converse(first, expected) == converse(second, expected) == [96] * 4
    first.close()
    second.close()
    now = time.time() - 60
    for number, slot in enumerate(sorted(tmp_path.glob("kv-cache/*/*/"))):
        for file in slot.iterdir():
            os.utime(file, (now + number, now + number))
    engine = start(folder, tmp_path)
    assert engine.persistence is not None and engine.persistence._slot.number == 1, "the one used last"
    engine.close()


def test_blocks_and_index_are_synced(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_file, "SYNC_S", 0.01)
    synced: list[int] = []
    sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: (synced.append(file), sync(file)))
    engine = start(folder, tmp_path)
    converse(engine, expected)
    settle(engine)
    wait(lambda: len(synced) >= 2)
    blocks, index = synced[:2]
    assert os.readlink(f"/proc/self/fd/{blocks}").endswith(".blocks")
    assert os.readlink(f"/proc/self/fd/{index}").endswith(".blocks.index")
    engine.close()


def test_what_is_unused_for_long_is_deleted(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    engine = start(folder, tmp_path, name="gone")
    converse(engine, expected)
    engine.close()
    (lock,) = files(tmp_path, "rank0.lock")
    start(folder, tmp_path, name="other").close()
    assert lock.exists()
    os.utime(lock, (1, 1))
    start(folder, tmp_path, name="other").close()
    assert lock.exists(), "an engine that ran for long and was killed"
    for file in lock.parent.iterdir():
        os.utime(file, (1, 1))
    start(folder, tmp_path, name="other").close()
    assert not lock.exists() and len(list(tmp_path.glob("kv-cache/*/"))) == 1


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_with_several_ranks(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]], tensor: int, pipeline: int
) -> None:
    share = BLOCK * 2 // 3 // tensor
    settings = {
        "num_blocks": 40, "host_memory": 16 * share, "disk_memory": 60 * share, "disk_path": str(tmp_path),
        "disk_persistent": True,
    }  # fmt: skip
    for found in (0, 96):
        with threaded_engine(folder, tensor, pipeline, **settings) as engine:
            assert converse(engine, expected) == [found] * 4
            assert engine.load_snapshot().disk_restored_blocks == found // 16 * 4
            engine.save()
    data = files(tmp_path, "rank1.blocks")[0]
    data.write_bytes(bytes(data.stat().st_size))
    with threaded_engine(folder, tensor, pipeline, **settings) as engine:
        assert converse(engine, expected) == [0] * 4, "one rank has lost its part"
        engine.save()
    files(tmp_path, "rank1.blocks.index")[0].unlink()
    with threaded_engine(folder, tensor, pipeline, **settings) as engine:
        assert engine.load_snapshot().disk_restored_blocks == 0


def recurrent(folder: Path, disk: Path) -> Engine:
    tiers = {"host_memory": 4 << 20, "disk_memory": 16 << 20, "disk_path": str(disk), "disk_persistent": True}
    return make_engine(folder, **{"num_blocks": 60, "max_running": 2, "state_interval": 32} | tiers)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3-next-dense",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("granite4-hybrid", "falcon-h1", "nemotron-h", "mamba2", "deepseek-v2-lite", "mistral-window")
        ),
    ],
)
def test_states_outlive_the_engine(family: str, tmp_path: Path) -> None:
    folder, disk = write_checkpoint(family, tmp_path / "model"), tmp_path / "disk"
    expected = generate(make_engine(folder, prefix_cache=False), *(greedy(f"{n}", text(n), 5) for n in range(4)))
    engine = recurrent(folder, disk)
    assert converse(engine, expected) == [0] * 4
    engine.close()
    engine = recurrent(folder, disk)
    load = engine.load_snapshot()
    assert load.disk_restored_blocks == 24 and bool(load.disk_restored_states) == bool(load.total_disk_states)
    assert converse(engine, expected) == [96] * 4
    settle(engine)
    kill(engine)
    engine = recurrent(folder, disk)
    assert converse(engine, expected) == [96] * 4
    engine.close()
    for file in files(disk, "rank0.states"):
        file.write_bytes(bytes(file.stat().st_size))
        engine = recurrent(folder, disk)
        assert converse(engine, expected) == [0] * 4, "states are damaged"
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_states_of_several_ranks(tmp_path: Path, tensor: int, pipeline: int) -> None:
    folder, disk = write_checkpoint("qwen3-next", tmp_path / "model"), tmp_path / "disk"
    expected = generate(make_engine(folder, prefix_cache=False), *(greedy(f"{n}", text(n), 5) for n in range(4)))
    settings = {
        "num_blocks": 60, "max_running": 2, "state_interval": 32, "host_memory": 4 << 20, "disk_memory": 16 << 20,
        "disk_path": str(disk), "disk_persistent": True,
    }  # fmt: skip
    for found in (0, 96):
        with threaded_engine(folder, tensor, pipeline, **settings) as engine:
            assert converse(engine, expected) == [found] * 4
            engine.save()


def test_an_engine_that_slept_has_its_conversations(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    engine = start(folder, tmp_path)
    sleeper = EngineSleep(engine.config, Engine.load)
    converse(engine, expected)
    engine = sleeper.wake(sleeper.sleep(engine))
    assert converse(engine, expected) == [96] * 4
    engine.save()
    engine.forget_caches(keep_disk=True)  # as where device memory is moved
    assert engine.load_snapshot().host_blocks == 0
    assert converse(engine, expected) == [96] * 4
    engine.close()


def test_what_is_being_written_at_sleep_is_not_lost(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(folder, tmp_path)
    converse(engine, expected, numbers=range(2))
    settle(engine)
    slow, pwritev = threading.Event(), os.pwritev
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", lambda *args: slow.wait(120) and pwritev(*args))
        converse(engine, expected, numbers=range(2, 3))
        engine.settle()
        engine.settle()
        host = engine.scheduler.allocator.pool.host
        assert host is not None and host.disk is not None and host.disk.writing, "a slow disk"
        engine.save(1e6, hurry=lambda: True)
        assert host.disk.writing, "told to stop at once"
        engine.forget_caches(keep_disk=True)
        host.check()
        slow.set()
        settle(engine)
    assert converse(engine, expected, numbers=range(3)) == [96] * 3
    host.check()
    kill(engine)
    engine = start(folder, tmp_path)
    assert converse(engine, expected, numbers=range(3)) == [96] * 3
    engine.close()


def test_where_space_is_needed_other_slots_go(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(folder, tmp_path), start(folder, tmp_path)
    converse(second, expected)
    first.close()
    time.sleep(0.05)  # times of files have coarse ticks
    second.close()
    reserve, full = block_file._reserve, [True]

    def reserve_once(file: int, size: int) -> None:
        if full and full.pop():
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(file, size)

    monkeypatch.setattr(block_file, "_reserve", reserve_once)
    engine = start(folder, tmp_path)
    assert engine.load_snapshot().total_disk_blocks == 60
    assert converse(engine, expected) == [96] * 4, "not its own"
    assert len(files(tmp_path, "rank0.blocks")) == 1
    engine.close()
