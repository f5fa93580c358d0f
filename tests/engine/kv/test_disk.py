"""The disk tier under any interleaving: nothing leaks, no name leads to another content, whatever the disk does."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.kv.block_file import BlockFile
from penstock.engine.kv.block_index import Entry
from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.kv.disk import DiskTier
from penstock.engine.kv.host import HostTier
from penstock.engine.kv.mover import HostBlockMover
from penstock.engine.kv.pool import BlockPool
from penstock.engine.kv.states import StateStore
from penstock.engine.sequence import Sequence
from tests.engine.harness import greedy

SHAPE = CacheShape.of_paged_kv(layers=2, kv_heads=1, head_dim=4, block_size=2, dtype=torch.int8)


class FakeDisk:
    """A `BlockStore` that makes its copies when told to, in any order."""

    def __init__(self, mover: HostBlockMover) -> None:
        self.pending: list[tuple[bool, list[tuple[int, int]], Future[list[bool]]]] = []
        self._mover = mover
        self._content: dict[int, list[bytes]] = {}
        self.kept: dict[int, bytes] = {}
        """By place: names of blocks that outlive the engine."""
        self._names: dict[int, bytes] = {}

    def write(self, pairs: list[tuple[int, int]], names: Iterable[bytes] = ()) -> list[Future[list[bool]]]:
        for (_, place), name in zip(pairs, names, strict=False):
            self._names[place] = name
        return self._begin(False, pairs)

    def read(self, pairs: list[tuple[int, int]]) -> list[Future[list[bool]]]:
        return self._begin(True, pairs)

    def erase(self, places: Iterable[int]) -> list[Future[list[bool]]]:
        return self._begin(False, [(-1, place) for place in places])

    def found(self) -> list[Entry]:
        return [Entry(name, place) for place, name in self.kept.items()]

    def forget(self) -> None:
        self.kept.clear()
        self._names.clear()

    def reorder(self, places: Iterable[int]) -> None: ...

    def close(self) -> None: ...

    def _begin(self, reads: bool, pairs: list[tuple[int, int]]) -> list[Future[list[bool]]]:
        self.pending.append((reads, pairs, Future()))
        return [self.pending[-1][2]]

    def work(self, at: int, fine: bool) -> None:
        reads, pairs, answer = self.pending.pop(at)
        for slot, place in pairs:
            if slot < 0:
                self.kept.pop(place, None)
                self._names.pop(place, None)
                self._content.pop(place, None)
                continue
            pieces = self._mover.memory(slot)
            if not reads:
                self.kept.pop(place, None)
            if not reads and fine:
                self._content[place] = [bytes(piece) for piece in pieces]
                if place in self._names:
                    self.kept[place] = self._names[place]
            elif reads:
                if not fine:
                    self.kept.pop(place, None)
                for piece, there in zip(pieces, self._content[place], strict=True):
                    piece[:] = there if fine else bytes(len(piece))
        answer.set_result([fine] * len(pairs))


class World:
    """Blocks whose content follows from their name, on a device of three, a host of six and a disk of nine."""

    def __init__(self, seed: int, *, persistent: bool = False) -> None:
        self.chance = random.Random(seed)
        self.kv = KVCache(SHAPE, 4, torch.device("cpu"))
        self.mover = HostBlockMover(self.kv, 6)
        self.store = FakeDisk(self.mover)
        self.persistent = persistent
        self.begin()
        self.names: dict[bytes, int] = {}
        self.gone: set[bytes] = set()
        """Names that were erased."""

    def begin(self) -> None:
        """A new engine, with what is on disk."""
        self.store.pending.clear()
        self.disk = DiskTier(9, self.store, persistent=self.persistent)
        self.host = HostTier(6, idle_s=3.0, disk=self.disk)
        self.pool = BlockPool(4, self.host)
        self.pool.forget_all()  # as after the warm-up
        if self.persistent:
            self.disk.restore()

    def step(self, blocks: dict[int, int]) -> None:
        transfers = self.host.take()
        if transfers is not None:
            self.mover.run(transfers)
        for block, number in blocks.items():
            self.kv.tensors[0][:, :, block] = number
            self.kv.tensors[1][:, :, block] = float(number)

    def compute(self) -> None:
        name, number = str(len(self.names)).encode(), len(self.names) % 120 + 1
        block = self.pool.allocate()
        self.pool.name(block, name)
        self.names[name] = number
        self.step({block: number})
        self.pool.release(block)

    def come_back(self) -> None:
        name = self.chance.choice(list(self.names)[-16:])
        block = self.pool.find(name)
        if block is not None:
            self.pool.share(block)
        elif name in self.host:
            self.host.hold(name)
            block = self.pool.allocate()
            self.pool.name(block, name)
            self.host.restore(name, block)
        else:
            return
        self.step({})
        assert (self.kv.tensors[0][:, :, block] == self.names[name]).all(), "a name leads to another content"
        self.pool.release(block)

    def recall(self) -> None:
        names = self.chance.sample(list(self.names)[-16:], min(len(self.names), 3))
        wanted = [name for name in names if self.pool.find(name) is None and self.host.has(name)]
        assert self.host.recall(wanted) == self.host.is_coming(wanted)

    def settle(self) -> bool:
        """A step without sequences; whether it copied something."""
        self.host.write_ahead()
        self.host.copy_idle()
        transfers = self.host.take()
        if transfers is not None:
            self.mover.run(transfers)
        return transfers is not None

    def fail_step(self) -> None:
        """What the step was to copy is not copied, and what it computed is noise."""
        block = self.pool.allocate()
        self.pool.name(block, b"noise")
        self.host.take()
        self.kv.tensors[0][:, :, block] = 99
        self.pool.distrust()
        self.pool.release(block)

    def erase(self) -> None:
        digit = str(self.chance.randrange(1, 10)).encode()
        count = self.pool.count(digit)
        assert (count == 0) == (not self.of(digit))
        self.pool.erase(digit)
        assert self.of(digit) == [] and self.pool.count(digit) == 0
        for name in [name for name in self.names if name.startswith(digit)]:
            self.gone.add(name)

    def of(self, digit: bytes) -> list[bytes]:
        return [name for name in self.names if name.startswith(digit) and self.finds(name)]

    def finds(self, name: bytes) -> bool:
        return self.pool.find(name) is not None or self.host.has(name) or self.disk.is_writing(name)

    def disk_works(self) -> None:
        if self.store.pending:
            self.store.work(self.chance.randrange(len(self.store.pending)), self.chance.random() < 0.9)


@pytest.mark.parametrize("seed", range(6))
def test_contents_survive_the_way_to_the_disk_and_back(seed: int) -> None:
    world = World(seed)
    world.compute()
    for _ in range(1000):
        what = world.chance.choices(
            (world.compute, world.come_back, world.recall, world.disk_works, world.host.write_ahead), (4, 4, 3, 4, 4)
        )[0]
        what()
        if world.chance.random() < 0.005:
            world.pool.forget_all()
            assert world.disk.used == 0 and world.host.used == 0
        elif world.chance.random() < 0.01:
            world.fail_step()
        elif world.chance.random() < 0.01:
            world.erase()
        world.pool.check()
        assert not any(map(world.finds, world.gone)), "an erased block is found again"
    assert world.disk.written > 30 and world.disk.read > 10 and world.host.restored > 10 and world.disk.failed > 0
    world.host.land()
    while world.store.pending:
        world.disk_works()
        world.host.land()
    world.pool.check()
    assert not world.disk.slots and not world.disk.erasing


@pytest.mark.parametrize("seed", range(4))
def test_contents_outlive_engines(seed: int) -> None:
    world = World(seed, persistent=True)
    restored = 0
    for _ in range(20):
        world.begin()
        world.pool.check()
        restored += world.disk.restored
        world.compute()
        for _ in range(world.chance.randrange(100)):
            what = world.chance.choices(
                (world.compute, world.come_back, world.recall, world.disk_works, world.settle), (3, 4, 4, 6, 4)
            )[0]
            what()
            if world.chance.random() < 0.02:
                world.erase()
            if world.chance.random() < 0.02:
                world.fail_step()
            world.pool.check()
        if world.chance.random() < 0.2:
            world.pool.forget_all(keep_disk=world.chance.random() < 0.5)
            world.pool.check()
        world.host.land()
        while world.disk.erasing:
            world.disk_works()
            world.host.land()
        assert not any(map(world.finds, world.gone)) and not world.gone & set(world.store.kept.values())
    assert restored > 20 and world.host.capacity == 6
    world.begin()
    for _ in range(8):
        world.compute()
    while world.settle() or world.store.pending:
        while world.store.pending:
            world.store.work(0, True)
    newest = list(world.names)[-8:]
    assert world.host.unsaved == 0 and all(name in world.disk for name in newest), "all is saved when there is time"


def test_a_failed_step_costs_what_it_was_to_copy() -> None:
    world = World(0)
    for _ in range(8):
        world.compute()
    before = {name for name in world.names if name in world.host}
    block = world.pool.allocate()
    world.host.take()
    world.pool.distrust()
    world.pool.release(block)
    assert before == {name for name in world.names if name in world.host} and len(before) > 3
    world.pool.check()


def test_a_place_is_free_when_it_has_been_overwritten() -> None:
    world = World(0)
    disk = world.disk
    disk.begin_write([(b"acme", 0), (b"other", 1)])
    world.store.work(0, True)
    disk.poll()
    disk.begin_read([(b"acme", 2)])
    disk.forget([b"acme", b"unknown"])
    assert b"acme" not in disk and disk.erasing and not disk.is_reading(b"acme")
    world.store.work(0, True)
    assert [moved.was_read for moved in disk.poll()] == [False] and disk.erasing
    disk.check()
    world.store.work(0, False)
    assert disk.poll() == [] and not disk.erasing and disk.unerased == 1 and disk.used == 1
    disk.check()
    disk.forget([])
    assert disk.erasing, "what could not be overwritten is tried again"
    world.store.work(0, True)
    assert disk.poll() == [] and not disk.erasing and disk.unerased == 1
    disk.forget([])
    assert not disk.erasing
    disk.check()


def test_what_was_being_read_when_all_was_voided_is_overwritten() -> None:
    world = World(0)
    disk = world.disk
    disk.begin_write([(b"acme", 0)])
    world.store.work(0, True)
    disk.poll()
    disk.begin_read([(b"acme", 2)])
    disk.forget_all()
    disk.forget([])
    world.store.work(0, True)
    assert [moved.was_read for moved in disk.poll()] == [False] and disk.erasing and len(world.store.pending) == 1
    disk.check()


def test_a_small_disk_is_not_written_over_and_over() -> None:
    """Blocks that rest on the host and do not fit the disk are left alone."""
    world = World(0)
    world.host = HostTier(6, idle_s=3.0, disk=DiskTier(2, world.store))
    world.pool = BlockPool(4, world.host)
    for _ in range(9):
        world.compute()
    for _ in range(20):
        world.host.write_ahead()
        while world.store.pending:
            world.store.work(0, True)
    assert world.host.disk is not None and world.host.disk.written == 2
    world.pool.check()


def test_a_damaged_file_is_not_read(tmp_path: Path) -> None:
    kv = KVCache(SHAPE, 4, torch.device("cpu"))
    mover = HostBlockMover(kv, 3)
    file = BlockFile(tmp_path, 3, mover)
    size = sum(map(len, mover.memory(0)))
    for slot in range(3):
        for piece in mover.memory(slot):
            piece[:] = bytes((7 * slot + at) % 251 for at in range(len(piece)))
    pairs = [(slot, 2 - slot) for slot in range(3)]
    assert file.write(pairs).result(100) == file.read(pairs).result(100) == [True] * 3
    os.pwrite(file._file, b"\xff", size + size // 2)
    assert file.read(pairs).result(100) == [True, False, True]
    os.ftruncate(file._file, 0)
    os.ftruncate(file._file, 3 * size)
    assert file.read(pairs).result(100) == [False] * 3, "zeros"
    assert file.write([(0, 1)]).result(100) == file.read([(2, 1)]).result(100) == [True]
    assert mover.memory(2) == mover.memory(0)
    file.close()


class States:
    """A cache of blocks of two tokens, and of states behind some of them, all of which are on disk."""

    def __init__(self, slots: int, states_behind: list[int]) -> None:
        self.seq = Sequence(greedy("a", list(range(13)), 1), 0.0, (0.0, 0))
        self.stores: list[FakeDisk] = []
        tiers = [self._tier(slots), self._tier(1)]
        pools = [BlockPool(20, tiers[0]), BlockPool(4, tiers[1])]
        states = StateStore(pools[1], rows=1, block_size=2, interval=4)
        self.allocator = BlockAllocator(pools[0], 2, states=states)
        names = [self.allocator._name(self.seq, index) for index in range(6)]
        self.names = names
        for tier, held in zip(tiers, (names, [names[end - 1] for end in states_behind]), strict=True):
            assert tier.disk is not None
            for name in held:
                tier.disk.begin_write([(name, 0)])
                self.stores[tiers.index(tier)].pending.pop()[2].set_result([True])
                tier.disk.poll()

    def _tier(self, slots: int) -> HostTier:
        self.stores.append(FakeDisk(HostBlockMover(KVCache(SHAPE, 2, torch.device("cpu")), slots)))
        return HostTier(slots, idle_s=3.0, disk=DiskTier(9, self.stores[-1]))

    def read(self) -> list[int]:
        """How many blocks and states are being read."""
        return [sum(len(pairs) for _, pairs, _ in store.pending) for store in self.stores]

    def arrive(self, *fine: bool) -> None:
        for store, each in zip(self.stores, fine, strict=True):
            for reads, pairs, answer in store.pending:
                assert reads
                answer.set_result([each] * len(pairs))
            store.pending.clear()
        self.allocator.tick(0.0)


@pytest.mark.parametrize(
    ("slots", "behind", "blocks"), [(12, [2, 4], 4), (12, [6, 2], 6), (12, [], 0), (6, [2, 4], 2), (7, [2, 4], 4)]
)
def test_blocks_are_read_up_to_the_last_state(slots: int, behind: list[int], blocks: int) -> None:
    """What is behind it would be computed again; what the host has no room for is not read at all."""
    world = States(slots, behind)
    assert world.allocator.match(world.seq) == []
    names = world.allocator.recall(world.seq)
    assert world.read() == [blocks, int(blocks > 0)]
    if not blocks:
        assert names == []
        return
    assert world.allocator.is_coming(names)
    world.arrive(True, True)
    assert not world.allocator.is_coming(names)
    assert [found.name for found in world.allocator.match(world.seq)] == world.names[:blocks]
    assert world.seq.branch == (12 if blocks < 6 else 0), "a state is kept where known blocks end"


@pytest.mark.parametrize("fine", [(True, False), (False, True)])
def test_blocks_without_their_state_are_of_no_use(fine: tuple[bool, bool]) -> None:
    world = States(12, [4])
    world.allocator.recall(world.seq)
    world.arrive(*fine)
    assert world.allocator.match(world.seq) == [] and world.allocator.pool.host is not None
    disks = [pool.host.disk for pool in (world.allocator.pool, world.allocator.states.pool)]  # type: ignore[union-attr]
    assert [disk.failed for disk in disks] == [0 if fine[0] else 4, 0 if fine[1] else 1]  # type: ignore[union-attr]
