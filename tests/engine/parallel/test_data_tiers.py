"""Tiers behind the caches of shards that have sequences of their own: host memory, disk, and what outlives the engine
(R-ENG-4). Every conversation comes back where it was, on whichever shard, and says what one device says."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.core import Engine
from penstock.engine.kv.partition import PartitionedAllocator
from penstock.engine.request import Request
from penstock.engine.sleep.sleep import EngineSleep
from penstock.errors import ReplicaLost
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.speculative.forced import verify_everything
from tests.engine.speculative.heads import noted_drafts
from tests.engine.speculative.mtp_layers import PlainMtp, write_mtp
from tests.engine.tiny import write_checkpoint
from tests.engine_host.client import eventually

DATA: dict[str, Any] = {"expert_parallel": True, "attention_parallel": "data", "expert_rebalance_s": 0.0}
CONVERSATIONS = 6
slow = pytest.mark.slow
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folders: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in folders:
            folders[family] = write_checkpoint(family, tmp_path_factory.mktemp(family), spread=0.3)
        return folders[family]

    return find


def text(number: int, length: int = 100) -> list[int]:
    return [(number * 31 + 7 * i * i + 3 * i) % 190 for i in range(length)]


def conversations(name: str, count: int = CONVERSATIONS) -> list[Request]:
    return [greedy(f"{name}.{number}", text(number), 5) for number in range(count)]


class Alone:
    """One device with room for everything, and the bytes of a block and of a state."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        engine = make_engine(folder, prefix_cache=False, **settings)
        self.says = list(generate(engine, *conversations("alone")).values())
        shape = engine.runner.kv.shape
        self.block, self.state = shape.block_bytes, shape.state_bytes

    def tiers(self, disk: Path | None = None, **settings: Any) -> dict[str, Any]:
        """Room for one conversation on each shard's device; for two in its host memory with a disk, else for all."""
        device = {"num_blocks": 10, "max_running": 2, "kept_states": 2, "state_interval": 16, "host_idle_s": 0.0}
        most = max(12 * self.block, 3 * self.state) * (2 if self.state else 1)
        if disk is None:
            return DATA | device | {"host_memory": 4 * most} | settings
        return DATA | device | {"host_memory": most, "disk_memory": 8 * most, "disk_path": str(disk)} | settings


def settle(engine: Engine) -> None:
    """Until nothing more is written."""
    for host in engine.scheduler.allocator.hosts:
        if host.disk is None:
            continue
        before = -1
        while host.disk.written > before or host.disk._jobs:
            before = host.disk.written
            for job in list(host.disk._jobs):
                for answer in job.answers:
                    answer.result(100)
            host.write_ahead()


def converse(engine: Engine, alone: Alone, name: str) -> list[int]:
    """All conversations, one after the other; how many tokens of each were found."""
    cached: list[int] = []
    for request, expected in zip(conversations(name), alone.says, strict=True):
        engine.submit(request)
        deltas = drain(engine)
        assert collect(deltas)[request.request_id] == expected
        cached.append(deltas[0].cached_tokens or 0)
        settle(engine)
    assert_idle(engine)
    return cached


def shards_used(engine: Engine) -> list[bool]:
    """Whether each has something in its host memory or on its disk."""
    allocator = engine.scheduler.allocator
    assert isinstance(allocator, PartitionedAllocator)
    found = []
    for part in allocator.parts:
        host = part.pool.host
        assert host is not None
        host.check()
        found.append(host.used > 0 or (host.disk is not None and host.disk.used > 0))
    return found


@slow
@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"),
    [
        ("qwen3-moe", 2, 1),
        ("qwen3-moe", 2, 2),
        ("mixtral", 3, 1),
        ("deepseek-v3", 2, 1),
        ("qwen3-next", 2, 1),
        ("qwen3-next", 2, 2),
    ],
)
def test_conversations_leave_their_shard_and_come_back(
    folder_of: Folders, family: str, tensor: int, pipeline: int
) -> None:
    alone = Alone(folder_of(family))
    with threaded_engine(folder_of(family), tensor, pipeline, **alone.tiers()) as engine:
        assert converse(engine, alone, "first") == [0] * CONVERSATIONS
        assert converse(engine, alone, "again") == [96] * CONVERSATIONS
        load = engine.load_snapshot()
        assert load.restored_blocks >= 6 * (CONVERSATIONS - tensor) and load.host_hit_tokens > 0
        assert all(shards_used(engine))
        requests = conversations("together")
        assert list(generate(engine, *requests).values()) == alone.says
        assert_idle(engine)


@slow
def test_preempted_sequences_come_back_to_their_shard(folder_of: Folders) -> None:
    folder = folder_of("qwen3-moe")
    requests = [greedy(f"r{i}", text(i, 45), 60) for i in range(5)]
    expected = generate(make_engine(folder), *requests)
    settings = {"num_blocks": 12, "host_memory": 1 << 20, "host_idle_s": 0.0}
    with threaded_engine(folder, 2, 1, **DATA, **settings) as engine:
        assert generate(engine, *requests) == expected
        load = engine.load_snapshot()
        assert load.preemptions > 0 and load.restored_blocks > 0
        assert_idle(engine)


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"),
    [
        ("qwen3-moe", 2, 1),
        pytest.param("mixtral", 3, 1, marks=slow),
        pytest.param("qwen3-moe", 2, 2, marks=slow),
        pytest.param("qwen3-next", 2, 1, marks=slow),
        pytest.param("qwen3-next", 2, 2, marks=slow),
    ],
)
@pytest.mark.parametrize("persistent", [pytest.param(False, marks=slow), True])
def test_conversations_come_back_from_the_disk_of_their_shard(
    folder_of: Folders, tmp_path: Path, family: str, tensor: int, pipeline: int, persistent: bool
) -> None:
    folder = folder_of(family)
    alone = Alone(folder)
    settings = alone.tiers(tmp_path, disk_persistent=persistent)
    with threaded_engine(folder, tensor, pipeline, **settings) as engine:
        assert converse(engine, alone, "first") == [0] * CONVERSATIONS
        again = converse(engine, alone, "again")
        # What leaves so small a host before it could be written is lost, unless the disk keeps everything.
        assert again == [96] * CONVERSATIONS if persistent else sum(again) >= 96 * (CONVERSATIONS - 2)
        load = engine.load_snapshot()
        assert load.disk_failures == 0 and load.disk_written_blocks > 0
        if (tensor, pipeline) == (2, 1):  # elsewhere the host has room for all
            assert load.disk_read_blocks + load.disk_read_states > 0
        assert all(shards_used(engine))
    with threaded_engine(folder, tensor, pipeline, **settings) as engine:
        load = engine.load_snapshot()
        if not persistent:
            assert load.disk_restored_blocks == 0
            return
        assert load.disk_restored_blocks >= 6 * CONVERSATIONS and all(shards_used(engine))
        assert converse(engine, alone, "after a restart") == [96] * CONVERSATIONS
        assert engine.load_snapshot().disk_hit_tokens > 0
        engine.forget_caches()  # as after a failed step: for those that come after, too
    with threaded_engine(folder, tensor, pipeline, **settings) as engine:
        assert engine.load_snapshot().disk_restored_blocks == 0
        assert converse(engine, alone, "forgotten") == [0] * CONVERSATIONS


@slow
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("disk", [False, True])
def test_what_a_drafter_reads_leaves_and_comes_back_too(tmp_path: Path, pipeline: int, disk: bool) -> None:
    """An MTP layer drafts behind a prompt from host memory, or from before a restart, as behind any other."""
    folder = write_mtp("glm4-moe", tmp_path)
    alone, reference = Alone(folder), PlainMtp(folder)
    settings = alone.tiers(tmp_path / "disk" if disk else None, disk_persistent=disk, speculation="mtp")
    for memory in ("host_memory", "disk_memory"):
        settings[memory] = 4 * settings.get(memory, 0)  # it takes more for each block
    for turn in range(2):
        with threaded_engine(folder, 2, pipeline, **settings) as engine:
            assert engine.speculation is not None
            verify_everything(engine.speculation)
            cached = converse(engine, alone, f"first-{turn}")
            assert cached == [96 if turn and disk else 0] * CONVERSATIONS
            drafts = noted_drafts(engine)
            assert converse(engine, alone, f"again-{turn}") == [96] * CONVERSATIONS
            right = [draft == reference.draft(tokens, len(draft)) for tokens, draft in drafts]
            assert len(right) > 10 and all(right), right
            load = engine.load_snapshot()
            assert load.restored_blocks > 0 and load.disk_failures == 0


@slow
@pytest.mark.parametrize(("family", "tensor", "pipeline"), [("qwen3-next", 2, 2), ("glm4-moe with MTP", 2, 1)])
def test_what_is_erased_is_gone_on_all_ranks(
    folder_of: Folders, tmp_path: Path, family: str, tensor: int, pipeline: int
) -> None:
    """Blocks, states, and what a drafter reads."""
    drafts = family.endswith("with MTP")
    folder = write_mtp("glm4-moe", tmp_path) if drafts else folder_of(family)
    alone, disk = Alone(folder), tmp_path / "disk"
    settings = alone.tiers(disk, disk_persistent=True) | ({"speculation": "mtp"} if drafts else {})
    for memory in ("host_memory", "disk_memory"):
        settings[memory] *= 4
    with threaded_engine(folder, tensor, pipeline, **settings) as engine:
        assert converse(engine, alone, "first") == [0] * CONVERSATIONS
        while engine.settle():
            pass
        kept = [file for file in disk.glob("kv-cache/*/*/rank*") if file.suffix not in (".index", ".lock")]
        assert len(kept) >= tensor * pipeline and all(any(file.read_bytes()) for file in kept)
        erasure = engine.erase("")
        assert erasure.blocks >= 6 * CONVERSATIONS and eventually(erasure.advance) and not erasure.failed
        assert not any(any(file.read_bytes()) for file in kept)
        assert not any(any(file.read_bytes()[4096:]) for file in disk.glob("kv-cache/*/*/rank*.index"))
        assert converse(engine, alone, "again") == [0] * CONVERSATIONS


@slow
def test_a_rank_that_is_killed_costs_nothing_on_disk(folder_of: Folders, tmp_path: Path) -> None:
    """Ranks that are processes: the engine ends with the one that is killed, and the next one finds what both had."""
    folder = folder_of("qwen3-moe")
    alone = Alone(folder)
    settings = {"tensor_parallel": 2, **alone.tiers(tmp_path, disk_persistent=True)}
    engine = make_engine(folder, **settings)
    try:
        assert converse(engine, alone, "first") == [0] * CONVERSATIONS
        while engine.settle():
            pass
        assert engine.ranks is not None
        engine.submit(greedy("cut off", text(9), 50))
        engine.step()
        os.kill(engine.ranks.pids[0], signal.SIGKILL)
        with pytest.raises(ReplicaLost, match="killed by SIGKILL"):
            drain(engine)
    finally:
        engine.close(save_s=0.0)
    engine = make_engine(folder, **settings)
    try:
        assert all(shards_used(engine))
        assert converse(engine, alone, "again") == [96] * CONVERSATIONS
        assert engine.load_snapshot().disk_failures == 0
    finally:
        engine.close()


@slow
def test_sequences_that_are_aborted_leave_nothing(folder_of: Folders, tmp_path: Path) -> None:
    """Whether they run, wait for their shard's disk, or are asleep with the engine afterwards."""
    folder = folder_of("qwen3-moe")
    alone = Alone(folder)
    settings = alone.tiers(tmp_path, disk_persistent=True)
    with threaded_engine(folder, 2, 1, **settings) as engine:
        converse(engine, alone, "first")
        for steps in range(1, 8):
            for request in conversations(f"aborted-{steps}"):
                engine.submit(request)
            for _ in range(steps):
                engine.step()
            for request_id in list(engine.scheduler.live):
                engine.abort(request_id)
            drain(engine)
            assert_idle(engine)
        sleeper = EngineSleep(engine.config, Engine.load)
        with closing(sleeper.wake(sleeper.sleep(engine))) as woken:
            assert converse(woken, alone, "after a sleep") == [96] * CONVERSATIONS
            assert woken.load_snapshot().disk_hit_tokens > 0
