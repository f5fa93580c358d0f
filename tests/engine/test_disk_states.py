"""States of recurrent layers that leave host memory: they come back from disk with their blocks, and conversations go
on with the same tokens (R-ENG-4). A state that cannot be read is computed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.core import Engine
from penstock.engine.kv.block_file import BlockFile, OneFile
from penstock.engine.kv.host import HostTier
from penstock.errors import ConfigError
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import write_checkpoint

CONVERSATIONS = 8
LENGTH = 100
"""Of a prompt: six blocks, with a state behind the last of them at least."""
Tokens = dict[int, list[int]]


def text(number: int) -> list[int]:
    return [(number * 31 + 7 * i * i + 3 * i) % 199 for i in range(LENGTH)]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in folders:
            folders[name] = write_checkpoint(name, tmp_path_factory.mktemp(name))
        return folders[name]

    return find


def alone(folder: Path, count: int = CONVERSATIONS, **settings: Any) -> tuple[Tokens, int, int]:
    """What an engine with room for everything says, and the bytes of a block and of a state."""
    engine = make_engine(folder, prefix_cache=False, **settings)
    found = generate(engine, *(greedy(f"{number}", text(number), 3) for number in range(count)))
    shape = engine.runner.kv.shape
    return {int(name): tokens for name, tokens in found.items()}, shape.block_bytes, shape.state_bytes


def small(path: Path, block: int, state: int, **settings: Any) -> dict[str, Any]:
    """Room for one conversation on the device, for less than all of them on the host, for all on disk."""
    half = max(28 * block, 6 * state)
    device = {"num_blocks": 10, "max_running": 1, "kept_states": 2, "state_interval": 16 if state < 2 * block else 64}
    tiers = {"host_memory": 2 * half, "disk_memory": 8 * half, "disk_path": str(path), "host_idle_s": 0.0}
    return device | tiers | settings


def hosts(engine: Engine) -> list[HostTier]:
    allocator = engine.scheduler.allocator
    assert allocator.states is not None
    found = [host for host in (allocator.pool.host, allocator.states.pool.host) if host is not None]
    assert len(found) == 2
    return found


def settle(engine: Engine) -> None:
    """Until nothing more is written: time passes between conversations."""
    for host in hosts(engine):
        assert host.disk is not None
        before = -1
        while host.disk.written > before or host.disk._jobs:
            before = host.disk.written
            for job in list(host.disk._jobs):
                for answer in job.answers:
                    answer.result(100)
            host.write_ahead()


def converse(engine: Engine, expected: Tokens, name: str) -> list[int]:
    """All conversations, one after the other; how many tokens of each were found."""
    cached: list[int] = []
    for number in expected:
        engine.submit(greedy(f"{name}.{number}", text(number), 3))
        deltas = drain(engine)
        assert list(collect(deltas).values()) == [expected[number]]
        cached.append(deltas[0].cached_tokens or 0)
        settle(engine)
    return cached


def test_conversations_come_back_from_disk(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of("qwen3-next-dense")
    expected, block, state = alone(folder, count=7)
    settings = small(tmp_path, block, state)
    engine = make_engine(folder, **settings)
    assert converse(engine, expected, "first") == [0] * 7
    assert converse(engine, expected, "again") == [96] * 7
    load = engine.load_snapshot()
    assert load.disk_read_states > 0 and load.disk_read_blocks > 0 and load.disk_failures == 0
    assert load.disk_written_states >= load.disk_states > 0
    assert load.total_disk_blocks * block + load.total_disk_states * state <= settings["disk_memory"]
    assert os.listdir(tmp_path) == [], "the files have no names"
    assert_idle(engine)
    engine.close()
    assert os.listdir(tmp_path) == []
    engine = make_engine(folder, **settings)
    engine.submit(greedy("after a restart", text(0), 3))
    deltas = drain(engine)
    assert collect(deltas) == {"after a restart": expected[0]}
    assert not deltas[0].cached_tokens, "what tenants said was left behind"
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("family", ["granite4-hybrid", "bamba", "falcon-h1", "qwen3-next", "nemotron-h", "mamba2"])
def test_every_kind_of_state(folder_of: Callable[[str], Path], tmp_path: Path, family: str, kv_dtype: str) -> None:
    folder = folder_of(family)
    expected, block, state = alone(folder, kv_dtype=kv_dtype)
    engine = make_engine(folder, kv_dtype=kv_dtype, **small(tmp_path, block, state))
    converse(engine, expected, "first")
    assert converse(engine, expected, "again") == [96] * CONVERSATIONS
    load = engine.load_snapshot()
    assert load.disk_read_states > 2 and load.disk_failures == 0
    assert load.disk_read_blocks > 2 or load.total_host_blocks >= 6 * CONVERSATIONS, "the host had room for all"
    assert_idle(engine)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("family", ["qwen3-next", "nemotron-h"])
def test_every_rank_has_its_part_on_disk(
    folder_of: Callable[[str], Path], tmp_path: Path, family: str, tensor: int, pipeline: int
) -> None:
    folder = folder_of(family)
    expected, block, state = alone(folder)
    with threaded_engine(folder, tensor, pipeline, **small(tmp_path, block // tensor, state // tensor)) as engine:
        converse(engine, expected, "first")
        assert converse(engine, expected, "again") == [96] * CONVERSATIONS
        load = engine.load_snapshot()
        assert load.disk_failures == 0 and load.disk_written_states > 0
        assert pipeline > 1 or load.disk_read_states > 2


@pytest.mark.slow
@pytest.mark.parametrize("states", [True, False])
def test_what_was_cut_off_is_computed_and_counted(
    folder_of: Callable[[str], Path], tmp_path: Path, states: bool
) -> None:
    folder = folder_of("granite4-hybrid")
    expected, block, state = alone(folder)
    engine = make_engine(folder, **small(tmp_path, block, state))
    converse(engine, expected, "first")
    _truncate(engine, states=states)
    assert min(converse(engine, expected, "again")) < 96
    load = engine.load_snapshot()
    assert load.disk_failures > 0
    converse(engine, expected, "later")
    assert_idle(engine)
    engine.scheduler.allocator.pool.forget_all()  # as when the device fails
    settle(engine)
    load = engine.load_snapshot()
    assert load.disk_states == load.disk_blocks == 0
    assert converse(engine, expected, "forgotten") == [0] * CONVERSATIONS
    engine.close()


def test_settings_that_cannot_work_are_refused(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of("qwen3-next-dense")
    for wrong, why in (
        ({"disk_memory": 2 * 16400}, "half of disk_memory is less than one state"),
        ({"disk_memory": 100}, "less than one KV block"),
        ({"disk_memory": 1 << 60}, "no file of"),
    ):
        with pytest.raises(ConfigError, match=why):
            make_engine(folder, **small(tmp_path, 4096, 40000, **wrong))
    assert os.listdir(tmp_path) == []


def _truncate(engine: Engine, *, states: bool) -> None:
    """Take everything out of a file."""
    disk = hosts(engine)[states].disk
    assert disk is not None and isinstance(disk._store, OneFile)
    file: BlockFile = disk._store._file
    os.ftruncate(file._file, 0)
