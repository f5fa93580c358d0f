"""Several caches behind one allocator: a sequence is in one of them, where its prefix is or where there is room."""

from __future__ import annotations

from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.kv.partition import PartitionedAllocator
from penstock.engine.kv.pool import BlockPool
from penstock.engine.request import Request, SamplingParams
from penstock.engine.sequence import Sequence

SIZE, BLOCKS = 4, 7


def sequence(first: int, tokens: int) -> Sequence:
    prompt = list(range(first, first + tokens))
    return Sequence(Request("s", prompt, SamplingParams(max_tokens=50)), 0.0, (0.0, 1))


def start(into: PartitionedAllocator, seq: Sequence) -> int:
    """Compute all of it; which cache it is in."""
    cached = into.match(seq)
    assert into.shortfall(cached, seq.length, seq) <= 0
    into.attach(seq, cached)
    assert into.grow(seq, seq.length)
    seq.computed = seq.length
    into.publish(seq)
    return seq.base // BLOCKS


def make() -> PartitionedAllocator:
    return PartitionedAllocator([BlockAllocator(BlockPool(BLOCKS), SIZE) for _ in range(3)])


def test_sequences_go_where_most_blocks_are_free() -> None:
    into = make()
    assert [start(into, sequence(100 * i, 9)) for i in range(4)] == [0, 1, 2, 0]
    assert into.pool.used == 12 and into.pool.capacity == 18 and into.pool.free == 6
    into.pool.check()


def test_a_prefix_is_found_in_its_own_cache_and_decides() -> None:
    into = make()
    seqs = [sequence(0, 9), sequence(100, 9)]
    assert [start(into, seq) for seq in seqs] == [0, 1]
    again = sequence(100, 9)
    assert start(into, again) == 1 and again.blocks[:2] == seqs[1].blocks[:2]
    for seq in (*seqs, again):
        into.free(seq)
    assert into.pool.used == 0 and into.pool.cached == 4
    into.pool.forget_all()
    assert into.pool.cached == 0
    into.pool.check()


def test_where_there_is_no_room_a_prefix_does_not_help() -> None:
    into = make()
    first = sequence(0, 16)
    assert start(into, first) == 0
    again = sequence(0, 24)
    again.tokens[8:] = range(900, 916)
    assert start(into, again) == 1, "two blocks are there already, but four more do not fit"
    assert into.free_for(first) == 2 and into.free_for(again) == 0


def test_what_fits_nowhere_waits() -> None:
    into = make()
    held = [sequence(100 * i, 20) for i in range(3)]
    assert [start(into, seq) for seq in held] == [0, 1, 2]
    waiting = sequence(500, 9)
    assert into.shortfall(into.match(waiting), waiting.length, waiting) == 2
    into.free(held[1])
    assert start(into, waiting) == 1
