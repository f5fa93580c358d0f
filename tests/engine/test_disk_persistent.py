"""Conversations that outlive their engine: the next one finds them on disk, and nothing else (R-ENG-4)."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.kv import app as kv_commands
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.core import Engine
from penstock.engine.kv import block_file, block_index
from penstock.engine.kv.block_hash import owner_tag
from penstock.engine.kv.kept_folder import erase
from penstock.engine.request import Request
from penstock.engine.sleep.sleep import EngineSleep
from penstock.engine.startup import part
from penstock.errors import ConfigError
from tests.engine.adapters.files import write_adapter
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import write_checkpoint

BLOCK = 12288
"""Bytes of a block of the model below."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama"), spread=0.5)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    """Of four conversations."""
    engine = make_engine(folder)
    return generate(engine, *(greedy(f"{number}", text(number), 5) for number in range(4)))


def text(number: int, length: int = 100) -> list[int]:
    return [(number * 31 + 7 * i * i + 3 * i) % 199 for i in range(length)]


def start(folder: Path, disk: Path, **settings: Any) -> Engine:
    tiers = {"host_memory": 16 * BLOCK, "disk_memory": 60 * BLOCK, "disk_path": str(disk), "disk_persistent": True}
    return make_engine(folder, **{"num_blocks": 40, "max_model_len": 256} | tiers | settings)


def converse(engine: Engine, expected: dict[str, list[int]], salt: str = "", numbers: range = range(4)) -> list[int]:
    """Have conversations, the tokens of which are checked; how many tokens each took from the cache."""
    cached = []
    for number in numbers:
        request = greedy(f"{number}", text(number), 5)
        engine.submit(Request(request.request_id, request.prompt, request.params, cache_salt=salt))
        deltas = drain(engine)
        assert collect(deltas)[f"{number}"] == expected[f"{number}"]
        cached.append(deltas[0].cached_tokens)
    assert_idle(engine)
    return cached


def kill(engine: Engine) -> None:
    """End an engine as a signal would: nothing is saved, its files and its lock are closed."""
    persistence = engine.persistence
    assert persistence is not None
    engine.persistence = None
    engine.close()
    persistence.close()


def settle(engine: Engine) -> None:
    """What an engine without work does all the time."""
    while engine.settle():
        pass


def files(disk: Path, name: str) -> list[Path]:
    return sorted(disk.glob(f"kv-cache/*/*/{name}"))


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


def test_tenants_find_only_their_own(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    engine = start(folder, tmp_path)
    assert converse(engine, expected, "one") == [0] * 4
    engine.close()
    engine = start(folder, tmp_path)
    assert converse(engine, expected, "two", range(2)) == [0] * 2
    assert converse(engine, expected, "one") == [96] * 4
    engine.close()


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


def test_what_an_owner_left_can_be_erased(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    engine = start(folder, tmp_path, num_blocks=100, host_memory=40 * BLOCK)
    salts = ("acme", "acme\0divided", "other")
    for number, salt in enumerate(salts):
        converse(engine, expected, salt, range(number, number + 1))
    settle(engine)
    disk = engine.scheduler.allocator.pool.host.disk  # type: ignore[union-attr]
    assert disk is not None
    (file,) = files(tmp_path, "rank0.blocks")
    acme = [disk._places[name] for name in disk.names if name.startswith(owner_tag("acme"))]
    content = [at_place(file, place) for place in acme]
    assert len(acme) == 12 and all(map(any, content))
    erasure = engine.erase("acme")
    assert erasure.blocks == 12
    wait(erasure.advance)
    assert erasure.failed == 0 and not any(any(at_place(file, place)) for place in acme)
    assert [converse(engine, expected, salts[at], range(at, at + 1)) for at in (2, 0)] == [[96], [0]]
    again = engine.erase("acme")
    assert again.blocks == 6
    wait(again.advance)
    assert engine.erase("nobody").advance()
    kill(engine)
    engine = start(folder, tmp_path)
    assert [converse(engine, expected, salt, range(at, at + 1)) for at, salt in enumerate(salts)] == [[0], [0], [96]]
    engine.close()


def test_callers_without_a_key_are_erased_with_the_default_tenant(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    engine = start(folder, tmp_path)
    for number, salt in enumerate(("default", "", "acme")):
        converse(engine, expected, salt, range(number, number + 1))
    settle(engine)
    engine.close()
    said = CliRunner().invoke(kv_commands, ["erase", "--tenant", "default", "--files", str(tmp_path)])
    assert said.output == "12 blocks erased\n", said.output
    assert erase(tmp_path, "acme").blocks == 6


def test_an_owner_can_be_erased_in_files_that_no_engine_uses(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    engine = start(folder, tmp_path)
    for number, salt in enumerate(("acme", "other")):
        converse(engine, expected, salt, range(number, number + 1))
    settle(engine)
    (file,) = files(tmp_path, "rank0.blocks")
    assert erase(tmp_path, "acme").busy == [file.parent], "its engine must be told"
    before = file.read_bytes()
    engine.close()
    found = erase(tmp_path, "acme")
    assert (found.blocks, found.busy) == (6, []) and erase(tmp_path, "acme").blocks == 0
    after = file.read_bytes()
    gone = [at for at in range(0, len(after), BLOCK) if after[at : at + BLOCK] != before[at : at + BLOCK]]
    assert len(gone) == 6 and not any(any(after[at : at + BLOCK]) for at in gone)
    engine = start(folder, tmp_path)
    assert converse(engine, expected, "acme", range(1)) + converse(engine, expected, "other", range(1, 2)) == [0, 96]
    engine.close()
    with pytest.raises(FileNotFoundError, match="kv-cache"):
        erase(tmp_path / "nowhere", "acme")


@pytest.mark.parametrize("reopened", [True, False])
def test_blocks_of_a_release_without_owners_are_not_kept(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, reopened: bool
) -> None:
    """Their names do not say whose they are, so they could never be erased."""
    with monkeypatch.context() as before:
        before.setattr(block_index, "_MAGIC", b"penstock kv 1\n\0\0")
        engine = start(folder, tmp_path)
        converse(engine, expected, "acme", range(1))
        engine.close()
    (file,) = files(tmp_path, "rank0.blocks")
    assert any(file.read_bytes())
    if reopened:
        engine = start(folder, tmp_path)
        assert not any(file.read_bytes()) and file.stat().st_size
        assert converse(engine, expected, "acme", range(1)) == [0]
        engine.close()
    else:
        assert erase(tmp_path, "other").blocks == 6 and not file.read_bytes() and erase(tmp_path, "acme").blocks == 0
    engine = start(folder, tmp_path)
    assert converse(engine, expected, "acme", range(1)) == [96 if reopened else 0]
    engine.close()


def at_place(file: Path, place: int) -> bytes:
    with file.open("rb") as handle:
        handle.seek(place * BLOCK)
        return handle.read(BLOCK)


def wait(over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not over():
        assert time.monotonic() < deadline
        time.sleep(0.001)


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


def test_when_the_device_fails_nothing_is_found(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    engine = start(folder, tmp_path)
    converse(engine, expected)
    settle(engine)
    engine.scheduler.allocator.pool.forget_all()
    kill(engine)
    engine = start(folder, tmp_path)
    assert engine.load_snapshot().disk_restored_blocks == 0
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


@pytest.mark.slow
def test_adapters_find_only_their_own(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    adapter = AdapterSpec("a", str(write_adapter(tmp_path / "adapter", folder)))

    def ask(engine: Engine, name: str) -> tuple[list[int], int]:
        request = greedy("0", text(0), 5)
        engine.submit(Request("0", request.prompt, request.params, adapter=name))
        deltas = drain(engine)
        return collect(deltas)["0"], next(delta.cached_tokens for delta in deltas if delta.tokens)

    engine = start(folder, tmp_path / "disk", adapters=(adapter,))
    said, cached = ask(engine, "a")
    assert not cached
    engine.close()
    engine = start(folder, tmp_path / "disk", adapters=(adapter,))
    assert ask(engine, "") == (expected["0"], 0)
    assert ask(engine, "a") == (said, 96)
    engine.close()


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


def test_what_is_being_written_at_sleep_is_not_lost(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(folder, tmp_path)
    converse(engine, expected, numbers=range(2))
    settle(engine)
    slow, pwritev = threading.Event(), os.pwritev
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", lambda *args: slow.wait(30) and pwritev(*args))
        converse(engine, expected, numbers=range(2, 3))
        engine.settle()
        engine.settle()
        host = engine.scheduler.allocator.pool.host
        assert host is not None and host.disk is not None and host.disk.writing, "a slow disk"
        begin = time.monotonic()
        engine.save(8.0, hurry=lambda: True)
        assert time.monotonic() - begin < 4, "told to stop at once"
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
