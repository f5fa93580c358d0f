"""Blocks of a sequence, to the token: what is held, shared, named and let go behind a window."""

from __future__ import annotations

import pytest

from penstock.engine.kv.allocator import BlockAllocator, Found, SlidingWindow, held_at_once
from penstock.engine.kv.host import HostTier
from penstock.engine.kv.pool import NULL_BLOCK, BlockPool
from penstock.engine.request import Request, SamplingParams
from penstock.engine.sequence import Sequence

SIZE = 4


def sequence(tokens: int, salt: str = "", **params: int) -> Sequence:
    prompt = list(range(tokens))
    return Sequence(Request("s", prompt, SamplingParams(max_tokens=50, **params), cache_salt=salt), 0.0, (0.0, 1))


def allocator(blocks: int = 12, window: SlidingWindow | None = None, **more: object) -> BlockAllocator:
    return BlockAllocator(BlockPool(blocks + 1, **more), SIZE, window=window)  # type: ignore[arg-type]


def computed(into: BlockAllocator, seq: Sequence, tokens: int) -> Sequence:
    """As after steps that computed the first `tokens` tokens."""
    assert into.grow(seq, tokens)
    seq.computed = tokens
    into.publish(seq)
    return seq


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_table_grows_by_what_is_missing(tokens: int, blocks: int) -> None:
    into, seq = allocator(), sequence(9)
    assert into.blocks_for(tokens) == into.held_at_once(tokens) == blocks
    assert into.grow(seq, tokens) and len(seq.blocks) == blocks == into.pool.used
    assert into.grow(seq, tokens) and len(seq.blocks) == blocks


def test_what_does_not_fit_takes_nothing() -> None:
    into, seq = allocator(blocks=3), sequence(20)
    assert into.grow(seq, 5)
    assert not into.grow(seq, 13) and len(seq.blocks) == 2
    assert into.grow(seq, 12) and len(seq.blocks) == 3 and into.pool.free == 0


@pytest.mark.parametrize(
    ("window", "step", "tokens", "most"),
    [(10, 6, 100, 6), (10, 7, 100, 7), (10, 6, 24, 6), (10, 6, 20, 5), (10, 6, 25, 6), (4, 1, 100, 4), (3, 1, 100, 3)],
)
def test_a_window_bounds_what_is_held_at_once(window: int, step: int, tokens: int, most: int) -> None:
    bound = SlidingWindow(window, step)
    assert held_at_once(tokens, SIZE, bound) == allocator(window=bound).held_at_once(tokens) == most
    assert held_at_once(tokens, SIZE, None) == -(-tokens // SIZE)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 9, 10])
@pytest.mark.parametrize("step", [1, 3, 4, 7])
def test_a_sequence_holds_exactly_what_tokens_to_come_can_see(window: int, step: int) -> None:
    into, seq = allocator(40, SlidingWindow(window, step)), sequence(90)
    for end in range(step, 90, step):
        begin = seq.computed
        assert into.grow(seq, end)
        visible = {position // SIZE for position in range(max(0, begin - window + 1), end)}
        held = {index for index, block in enumerate(seq.blocks) if block != NULL_BLOCK}
        assert held == visible, (begin, end)
        assert len(held) == into.pool.used <= into.held_at_once(90)
        assert seq.released == min(visible)
        seq.computed = end
    into.free(seq)
    assert into.pool.used == 0 and (seq.blocks, seq.named, seq.released, seq.computed) == ([], 0, 0, 0)


def test_draft_tokens_may_be_computed_again_so_their_window_is_kept() -> None:
    into, seq = allocator(window=SlidingWindow(4, 8)), sequence(8)
    assert into.grow(seq, 12)
    seq.computed = 12  # four of them draft tokens, which may be refused
    assert into.grow(seq, 12) and seq.released == 1
    assert seq.blocks[0] == NULL_BLOCK != seq.blocks[1]


def test_a_prefix_is_found_in_whole_blocks_and_the_last_token_is_left_to_compute() -> None:
    into = allocator()
    first = computed(into, sequence(12), 11)
    assert first.named == 2, "the third block is not full"
    for tokens, blocks in ((12, 2), (9, 2), (8, 1), (5, 1), (4, 0), (1, 0)):
        assert [found.block for found in into.match(sequence(tokens))] == first.blocks[:blocks]
    assert into.match(sequence(12, salt="other")) == []
    assert into.match(sequence(12, prompt_logprobs=1)) == []
    into.prefix_cache = False
    assert into.match(sequence(12)) == []


def test_only_full_blocks_of_known_tokens_are_named() -> None:
    into, seq = allocator(), sequence(6)
    assert into.grow(seq, 8)
    seq.computed = 8  # two pending tokens are computed, their values are not known yet
    into.publish(seq)
    assert seq.named == 1
    seq.tokens += [6, 7]
    into.publish(seq)
    assert seq.named == 2 and len(into.match(sequence(9))) == 2
    silent = allocator()
    silent.prefix_cache = False
    assert computed(silent, sequence(8), 8).named == 0


def test_a_gap_ends_a_prefix() -> None:
    into = allocator()
    seq = computed(into, sequence(16), 12)
    name = seq.block_names[1]
    into.pool._block_of.pop(name)
    assert [found.block for found in into.match(sequence(16))] == seq.blocks[:1]


def test_the_shortfall_counts_blocks_that_must_be_taken() -> None:
    into = allocator(blocks=4)
    seq = computed(into, sequence(12), 12)
    held = into.match(sequence(12))
    assert len(held) == 2 and into.pool.free == 1
    assert into.shortfall(held, 12) == 0 and into.shortfall(held, 13) == 1 and into.shortfall([], 12) == 2
    into.free(seq)
    assert into.pool.free == 4
    assert into.shortfall(held, 12) == -1, "two are taken out of the free ones again, one is new"
    assert into.shortfall(held, 17) == 1


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    into = allocator(blocks=3)
    into.free(computed(into, sequence(12), 12))
    into.pool.allocate()
    assert len(into.match(sequence(13))) == 2
    into.pool.allocate()
    assert len(into.match(sequence(13))) == 1


def test_attaching_shares_what_was_found_and_goes_on_behind_it() -> None:
    into = allocator()
    first = computed(into, sequence(12), 12)
    second = sequence(11)
    assert into.attach(second, into.match(second)) == 0
    assert second.blocks == first.blocks[:2] and (second.named, second.computed, second.released) == (2, 8, 0)
    into.free(first)
    assert into.pool.used == 2
    into.free(second)
    assert into.pool.used == 0


def test_behind_a_window_a_prefix_needs_only_its_last_window() -> None:
    into = allocator(window=SlidingWindow(5, 16))
    seq = computed(into, sequence(17), 16)
    names = list(seq.block_names)
    assert [found.block for found in into.match(sequence(17))] == [NULL_BLOCK] * 3 + [seq.blocks[3]]
    later = sequence(17)
    into.attach(later, into.match(later))
    assert (later.released, later.named, later.computed) == (3, 4, 16) and into.pool.used == 4
    into.free(later)
    del into.pool._block_of[names[0]]
    assert [found.block for found in into.match(sequence(17))] == [NULL_BLOCK] * 3 + [seq.blocks[3]]
    del into.pool._block_of[names[3]]
    assert [found.block for found in into.match(sequence(17))] == [NULL_BLOCK] * 2 + [seq.blocks[2]]
    del into.pool._block_of[names[2]]
    assert [found.block for found in into.match(sequence(17))] == [NULL_BLOCK, seq.blocks[1]]
    del into.pool._block_of[names[1]]
    assert into.match(sequence(17)) == []
    wide = allocator(window=SlidingWindow(6, 16))
    seq = computed(wide, sequence(17), 16)
    assert [found.block for found in wide.match(sequence(17))] == [NULL_BLOCK] * 2 + seq.blocks[2:4]
    del wide.pool._block_of[seq.block_names[2]]
    assert [found.block for found in wide.match(sequence(17))] == seq.blocks[:2], "its last window has a gap"


def test_what_a_window_has_passed_is_not_named_again() -> None:
    into, seq = allocator(window=SlidingWindow(4, 8)), sequence(16)
    assert into.grow(seq, 8)
    seq.computed = 8
    assert into.grow(seq, 16) and seq.released == 1
    seq.computed = 16
    into.publish(seq)
    assert seq.named == 4 and into.pool.find(seq.block_names[0]) is None
    assert all(into.pool.find(name) is not None for name in seq.block_names[1:4])


def test_a_block_on_the_host_comes_back() -> None:
    host = HostTier(8, idle_s=5.0)
    into = allocator(blocks=3, host=host)
    into.free(computed(into, sequence(12), 12))
    into.tick(4.9)
    assert into.take_transfers() is None
    into.tick(5.0)
    moved = into.take_transfers()
    assert moved is not None and len(moved.out) == 3 and not moved.back
    into.pool.allocate()
    seq = sequence(13)
    cached = into.match(seq)
    assert [found.block is None for found in cached] == [False, False, True]
    assert into.shortfall(cached, 12) == 1, "two are revived, one must be filled again, and two are free"
    into.pool.release(next(block for block in range(1, 4) if into.pool.is_held(block)))
    assert into.shortfall(cached, 12) == 0 and into.shortfall(cached, 13) == 1
    assert into.attach(seq, cached) == 1
    assert len(seq.blocks) == 3 and seq.computed == 12 and host.restored == 1
    moved = into.take_transfers()
    assert moved is not None and list(moved.back) == [seq.blocks[2]]
    assert into.pool.find(cached[2].name) == seq.blocks[2]
    assert allocator().take_transfers() is None
    assert into.match(sequence(13)) == [
        Found(found.name, block) for found, block in zip(cached, seq.blocks, strict=True)
    ]


def test_within_its_window_a_prefix_is_found_as_without_one() -> None:
    into = allocator(window=SlidingWindow(100, 16))
    seq = computed(into, sequence(12), 12)
    for tokens, blocks in ((13, 3), (12, 2), (5, 1), (4, 0)):
        assert [found.block for found in into.match(sequence(tokens))] == seq.blocks[:blocks]


def test_a_block_is_found_by_all_of_its_tokens_and_those_before() -> None:
    into = allocator()
    seq = computed(into, sequence(12), 12)
    for different, blocks in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2)):
        other = sequence(13)
        other.tokens[different] = 99
        assert [found.block for found in into.match(other)] == seq.blocks[:blocks]
