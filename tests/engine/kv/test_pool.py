"""The block pool under any interleaving: no leak, no double free, names only on blocks that keep their content."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.engine.kv.host import HostTier
from penstock.engine.kv.pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Holders allocate, share, name and release blocks in any order; a model tracks what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.held: list[int] = []
        self.content: dict[bytes, int] = {}
        self.counter = 0

    @precondition(lambda self: self.pool.free > 0)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        assert block != 0 and block not in self.held
        self.content = {name: b for name, b in self.content.items() if b != block}
        self.held.append(block)

    @precondition(lambda self: self.pool.free == 0)
    @rule()
    def allocating_from_a_full_pool_fails(self) -> None:
        with pytest.raises(MemoryError):
            self.pool.allocate()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        if block not in self.content.values():
            self.counter += 1
            name = str(self.counter).encode()
            assert self.pool.name(block, name)
            self.content[name] = block

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.content)))
        block = self.pool.find(name)
        assert block == self.content[name], "a name led to a block with other content"
        assert block is not None
        self.pool.share(block)
        self.held.append(block)

    @rule()
    def forget(self) -> None:
        self.pool.forget_all()
        self.content.clear()

    @invariant()
    def accounts_balance(self) -> None:
        self.pool.check()
        assert self.pool.used == len(set(self.held))
        assert self.pool.free == self.pool.capacity - len(set(self.held))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_releasing_a_free_block_is_an_error() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release(block)


def test_a_block_is_held_until_its_last_release() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    assert pool.name(block, b"prefix") is True
    pool.share(block)
    pool.release(block)
    assert pool.is_held(block)
    pool.release(block)
    assert not pool.is_held(block) and pool.find(b"prefix") == block


def test_the_first_block_with_a_content_keeps_its_name() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    assert pool.name(first, b"prefix") is True and pool.name(second, b"prefix") is False
    assert pool.find(b"prefix") == first


def test_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.name(block, bytes([block]))
        pool.release(block)
    pool.share(blocks[0])
    pool.release(blocks[0])
    pool.allocate()
    assert pool.find(bytes([blocks[1]])) is None
    assert pool.find(bytes([blocks[0]])) == blocks[0]


def test_a_pool_has_at_least_one_block_to_give() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(1)
    pool = BlockPool(2)
    assert (pool.capacity, pool.free, pool.cached, pool.allocate()) == (1, 1, 0, 1)


STEP = st.tuples(st.sampled_from(["take", "give", "share", "name", "alike"]), st.integers(0, 6))


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(STEP, max_size=30), tier=st.booleans())
def test_many_at_once_are_the_same_as_one_after_the_other(steps: list[tuple[str, int]], tier: bool) -> None:
    many, single = (BlockPool(9, HostTier(3, 1.0) if tier else None) for _ in range(2))
    held: list[int] = []
    named: dict[int, bytes] = {}
    for number, (what, count) in enumerate(steps):
        if what == "take":
            taken = many.allocate_many(min(count, many.free))
            assert taken == [single.allocate() for _ in range(min(count, single.free))]
            held += taken
            named = {block: name for block, name in named.items() if block not in taken}
        elif what == "give":
            given_back, held = held[:count], held[count:]
            many.release_many(given_back)
            for block in given_back:
                single.release(block)
        elif what == "share":
            for block in list(named)[:count]:
                many.share(block)
                single.share(block)
                held.append(block)
        else:
            blocks = [block for block in dict.fromkeys(held) if block not in named][:count]
            names = [b"alike" if what == "alike" else f"{number}.{block}".encode() for block in blocks]
            many.name_many(blocks, names)
            for block, name in zip(blocks, names, strict=True):
                if single.name(block, name):
                    named[block] = name
        many.check()
        assert (many.free, many.cached, many.used) == (single.free, single.cached, single.used)
        assert all(many.find(name) == single.find(name) == block for block, name in named.items())


def test_taking_more_than_there_are_is_an_error() -> None:
    pool = BlockPool(4)
    assert pool.allocate_many(3) == [1, 2, 3]
    with pytest.raises(MemoryError):
        pool.allocate_many(1)
    pool.release_many([2, 1])
    assert pool.allocate_many(2) == [1, 2] and pool.allocate_many(0) == []


@pytest.mark.parametrize("seed", range(20))
def test_many_at_once_are_the_same_as_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    bulk, single = BlockPool(20), BlockPool(20)
    held: list[list[int]] = []
    named = 0
    for _ in range(60):
        if held and (rng.random() < 0.5 or bulk.free < 4):
            blocks = held.pop(rng.randrange(len(held)))
            bulk.release_many(blocks)
            for block in blocks:
                single.release(block)
        else:
            count = rng.randint(1, min(bulk.free, 6))
            blocks = bulk.allocate_many(count)
            assert blocks == [single.allocate() for _ in range(count)]
            held.append(blocks)
            full = blocks[: rng.randint(0, count)]
            names = [b"%d" % rng.randrange(named + 1, named + 3) for _ in full]
            named += len(full)
            bulk.name_many(full, names)
            for block, name in zip(full, names, strict=True):
                single.name(block, name)
        bulk.check()
        assert (bulk.free, bulk.cached) == (single.free, single.cached)
        names = [b"%d" % name for name in range(named + 3)]
        assert [bulk.find(name) for name in names] == [single.find(name) for name in names]
