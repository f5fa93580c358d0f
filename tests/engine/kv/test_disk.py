"""The disk tier under any interleaving: nothing leaks, no name leads to another content, whatever the disk does."""

from __future__ import annotations

import random
from concurrent.futures import Future

import pytest
import torch

from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.kv.disk import DiskTier
from penstock.engine.kv.host import HostTier
from penstock.engine.kv.mover import HostBlockMover
from penstock.engine.kv.pool import BlockPool

SHAPE = CacheShape.of_paged_kv(layers=2, kv_heads=1, head_dim=4, block_size=2, dtype=torch.int8)


class FakeDisk:
    """A `BlockStore` that makes its copies when told to, in any order."""

    def __init__(self, mover: HostBlockMover) -> None:
        self.pending: list[tuple[bool, list[tuple[int, int]], Future[list[bool]]]] = []
        self._mover = mover
        self._content: dict[int, list[bytes]] = {}

    def write(self, pairs: list[tuple[int, int]]) -> list[Future[list[bool]]]:
        return self._begin(False, pairs)

    def read(self, pairs: list[tuple[int, int]]) -> list[Future[list[bool]]]:
        return self._begin(True, pairs)

    def close(self) -> None: ...

    def _begin(self, reads: bool, pairs: list[tuple[int, int]]) -> list[Future[list[bool]]]:
        self.pending.append((reads, pairs, Future()))
        return [self.pending[-1][2]]

    def work(self, at: int, fine: bool) -> None:
        reads, pairs, answer = self.pending.pop(at)
        for slot, place in pairs:
            pieces = self._mover.memory(slot)
            if not reads and fine:
                self._content[place] = [bytes(piece) for piece in pieces]
            elif reads:
                for piece, there in zip(pieces, self._content[place], strict=True):
                    piece[:] = there if fine else bytes(len(piece))
        answer.set_result([fine] * len(pairs))


class World:
    """Blocks whose content follows from their name, on a device of three, a host of six and a disk of nine."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.kv = KVCache(SHAPE, 4, torch.device("cpu"))
        self.mover = HostBlockMover(self.kv, 6)
        self.store = FakeDisk(self.mover)
        self.disk = DiskTier(9, self.store)
        self.host = HostTier(6, idle_s=3.0, disk=self.disk)
        self.pool = BlockPool(4, self.host)
        self.names: dict[bytes, int] = {}

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
        world.pool.check()
    assert world.disk.written > 30 and world.disk.read > 10 and world.host.restored > 10
    while world.store.pending:
        world.disk_works()
    world.host.write_ahead()
    world.pool.check()
    assert not world.disk.slots


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
