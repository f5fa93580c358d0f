"""The host tier under any interleaving: nothing leaks, no slot serves two names, contents survive the round trip."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.kv.host import HostTier, Transfers
from penstock.engine.kv.mover import HostBlockMover
from penstock.engine.kv.pool import BlockPool

SHAPE = CacheShape.of_paged_kv(layers=2, kv_heads=1, head_dim=4, block_size=2, dtype=torch.int8)


class TierMachine(RuleBasedStateMachine):
    """Blocks are filled, shared, let go and found again; a step makes the copies and then writes what it computes.

    The content of a block is a number that follows from its name, in the values and in the scales.
    """

    returns_at_once: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.host = HostTier(5, idle_s=3.0, returns_at_once=self.returns_at_once)
        self.pool = BlockPool(7, self.host)
        self.kv = KVCache(SHAPE, 7, torch.device("cpu"))
        self.mover = HostBlockMover(self.kv, 5)
        self.held: list[int] = []
        self.count = 0
        self.names: dict[bytes, int] = {}
        self.unwritten: dict[int, int] = {}

    @precondition(lambda self: self.pool.free > 0)
    @rule()
    def compute_a_new_block(self) -> None:
        self.count += 1
        number = self.count % 120 + 1
        name = str(self.count).encode()
        block = self.pool.allocate()
        assert self.pool.name(block, name)
        self.names[name] = number
        self.unwritten[block] = number
        self.held.append(block)

    @precondition(lambda self: self.held and not self.unwritten)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release(block)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.names)))
        block = self.pool.find(name)
        if block is not None:
            self.pool.share(block)
            self.held.append(block)
        elif name in self.host and self.pool.free > 0:
            self.host.hold(name)
            block = self.pool.allocate()
            assert self.pool.name(block, name)
            self.host.restore(name, block)
            self.held.append(block)

    @rule(seconds=st.floats(0, 4))
    def time_passes(self, seconds: float) -> None:
        self.host.now += seconds
        self.host.copy_idle()

    @rule()
    def step(self) -> None:
        self.host.returns.begin_step()
        self.host.bring_back()
        transfers = self.host.take()
        if transfers is not None:
            self.mover.run(transfers)
        for block, number in self.unwritten.items():
            self.kv.tensors[0][:, :, block] = number
            self.kv.tensors[1][:, :, block] = float(number)
        self.unwritten.clear()
        for name, number in self.names.items():
            block = self.pool.find(name)
            if block is not None and block not in self.host.returns:
                assert (self.kv.tensors[0][:, :, block] == number).all(), "a name leads to another content"
                assert (self.kv.tensors[1][:, :, block] == float(number)).all()

    @rule()
    def a_step_fails(self) -> None:
        self.pool.forget_all()
        self.unwritten.clear()
        assert self.host.used == 0 and self.host.take() is None

    @rule()
    def a_step_fails_half_way(self) -> None:
        self.pool.distrust()
        self.unwritten.clear()
        self.names = {name: number for name, number in self.names.items() if name in self.host}
        assert not self.host.returns and self.host.take() is None

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def a_block_is_forgotten(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.names)))
        self.pool.drop(name)
        self.host.forget([name])
        assert name not in self.host and not self.host.has(name)
        del self.names[name]

    @invariant()
    def accounts_balance(self) -> None:
        self.pool.check()
        assert self.pool.used == len(set(self.held))
        assert self.host.used <= self.host.capacity


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=35, stateful_step_count=50, deadline=None)


class SlowTierMachine(TierMachine):
    """A step copies one block back at most."""

    returns_at_once = 1


TestSlowTier = SlowTierMachine.TestCase
TestSlowTier.settings = settings(max_examples=35, stateful_step_count=50, deadline=None)


def filled(pool: BlockPool, count: int) -> list[int]:
    blocks = [pool.allocate() for _ in range(count)]
    for block in blocks:
        pool.name(block, bytes([block]))
    for block in blocks:
        pool.release(block)
    return blocks


def test_the_least_recently_used_leave_the_host_first() -> None:
    host = HostTier(2, idle_s=1e9)
    pool = BlockPool(4, host)
    first, second, third = filled(pool, 3)
    pool.allocate(), pool.allocate()
    host.take()
    assert bytes([first]) in host and bytes([second]) in host
    pool.allocate()
    host.take()
    assert bytes([first]) not in host and bytes([second]) in host and bytes([third]) in host


def test_a_block_on_its_way_back_is_not_pushed_out_by_those_that_make_room_for_it() -> None:
    host = HostTier(1, idle_s=1e9)
    pool = BlockPool(2, host)
    (block,) = filled(pool, 1)
    name = bytes([block])
    pool.release(pool.allocate())  # the only block was given away, its content is on the host
    host.take()
    other = pool.allocate()
    pool.name(other, b"other")
    pool.release(other)
    host.hold(name)
    host.restore(name, pool.allocate())
    transfers = host.take()
    assert transfers is not None and transfers.out == [] and list(transfers.back.values()) == [0]
    assert name in host and b"other" not in host


def test_what_came_back_is_not_copied_out_again() -> None:
    host = HostTier(3, idle_s=1e9)
    pool = BlockPool(2, host)
    (block,) = filled(pool, 1)
    name = bytes([block])
    for _ in range(4):
        pool.release(pool.allocate())
        host.hold(name)
        back = pool.allocate()
        pool.name(back, name)
        host.restore(name, back)
        pool.release(back)
        host.take()
    assert host.offloaded == 1 and host.restored == 4


def test_idle_blocks_are_copied_ahead_and_then_cost_nothing() -> None:
    host = HostTier(8, idle_s=30.0)
    pool = BlockPool(5, host)
    filled(pool, 4)
    host.now = 29.0
    host.copy_idle()
    assert host.take() is None
    host.now = 31.0
    host.copy_idle()
    transfers = host.take()
    assert transfers is not None and len(transfers.out) == 4
    for _ in range(4):
        pool.allocate()
    assert host.take() is None, "they were on the host already"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_whole_blocks_move(dtype: torch.dtype) -> None:
    kv = KVCache(CacheShape.of_paged_kv(3, 2, 6, 4, dtype), 5, torch.device("cpu"))
    for tensor in kv.tensors:
        tensor.view(torch.uint8).random_(0, 255)
    before = [tensor.view(torch.uint8).clone() for tensor in kv.tensors]
    mover = HostBlockMover(kv, 3)
    mover.run(Transfers(out=[(1, 2), (4, 0)]))
    mover.run(Transfers(back={2: 0, 3: 2}))
    for tensor, was in zip(kv.tensors, before, strict=True):
        now = tensor.view(torch.uint8)
        assert torch.equal(now[:, :, 2], was[:, :, 4]) and torch.equal(now[:, :, 3], was[:, :, 1])
        for block in (0, 1, 4):
            assert torch.equal(now[:, :, block], was[:, :, block])


def test_what_is_here_already_is_kept_without_a_copy() -> None:
    tier = HostTier(2, idle_s=1.0)
    assert tier.keep(1, b"a") and tier.keep(1, b"a")
    moved = tier.take()
    assert moved is not None and len(moved.out) == 1 and tier.offloaded == 1
    assert tier.keep(5, b"a") and tier.take() is None and tier.used == 1
    assert tier.keep(2, b"b") and tier.keep(3, b"c"), "the one that rests makes room"
    assert b"a" not in tier and not tier.keep(4, b"d"), "every slot is busy"


def test_what_the_device_has_too_leaves_the_host_first() -> None:
    """Blocks that came back are there twice; those that are only here stay longer, whenever they came."""
    host = HostTier(3, idle_s=30.0)
    for number, name in enumerate((b"a", b"b", b"c"), start=1):
        host.keep(number, name)
    host.take()
    host.hold(b"c")
    host.restore(b"c", 7)
    host.take()
    host.keep(4, b"d")
    host.take()
    assert [name for name in (b"a", b"b", b"c", b"d") if name in host] == [b"a", b"b", b"d"]
    host.check()


def test_conversations_that_fit_into_both_tiers_are_never_lost() -> None:
    """Sixteen of ten blocks each, in any order: 160 blocks in 100 on the device and 80 on the host."""
    host = HostTier(80, idle_s=30.0)
    pool, order = BlockPool(101, host), random.Random(0)
    for name in (b"%d.%d" % (talk, block) for talk in range(16) for block in range(10)):
        block = pool.allocate()
        pool.name(block, name)
        pool.release(block)
        host.take()
    for _ in range(400):
        talk = order.randrange(16)
        names = [b"%d.%d" % (talk, number) for number in range(10)]
        blocks = [pool.find(name) for name in names]
        assert all(block is not None or name in host for name, block in zip(names, blocks, strict=True))
        for name, found in zip(names, blocks, strict=True):
            if found is None:
                host.hold(name)
            else:
                pool.share(found)
        held = [found for found in blocks if found is not None]
        for name, found in zip(names, blocks, strict=True):
            if found is None:
                block = pool.allocate()
                pool.name(block, name)
                host.restore(name, block)
                held.append(block)
        host.take()
        pool.release_many(reversed(held))
    pool.check()
