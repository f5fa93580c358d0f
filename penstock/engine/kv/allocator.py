"""Blocks of sequences: growing tables, sharing prefixes, releasing what has left a sliding window, freeing the rest.

A full block is named (made shareable) when the step that computes it is scheduled, not when it has finished: steps
run in order on one stream and a layer writes all keys before it reads any, so a sequence that finds the block
later, even in the same step, reads what was written. If a step fails, all names are dropped.

Where every layer has a sliding window, a block that has left the largest of them is released while its sequence runs:
the list of blocks then begins with `NULL_BLOCK`, and kernels read nothing there. Such a sequence holds a bounded number
of blocks however long it gets, and takes up a prefix whose beginning is gone if the last window of it is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from penstock.engine.kv.block_hash import block_name, names_after
from penstock.engine.kv.host import HostTier, Transfers
from penstock.engine.kv.pool import NULL_BLOCK, BlockPool
from penstock.engine.kv.states import StateStore
from penstock.engine.request import EngineLoad
from penstock.engine.sequence import Sequence

_NAMED_AHEAD = 32


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A bound on what running sequences need."""

    size: int
    """The largest window of any layer."""
    step_tokens: int
    """Most tokens of one sequence in one step."""


class Found(NamedTuple):
    """A block of a prefix that need not be computed."""

    name: bytes
    block: int | None
    """On the device; `NULL_BLOCK` when it will not be read; None when it is on the host."""


class BlockAllocator:
    """Gives sequences the blocks they need and finds the prefixes they share."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        prefix_cache: bool = True,
        window: SlidingWindow | None = None,
        states: StateStore | None = None,
    ) -> None:
        """`states`: of models with recurrent layers."""
        self.states = states
        if states is not None:
            pool.states = states.pool
        self.pool = pool
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.window = window

    @property
    def caches(self) -> list[BlockAllocator]:
        """Those with sequences of their own: this is the only one."""
        return [self]

    @property
    def hosts(self) -> list[HostTier]:
        """What is behind the cache: of blocks, and of states."""
        found = (self.pool.host, None if self.states is None else self.states.pool.host)
        return [host for host in found if host is not None]

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def held_at_once(self, tokens: int) -> int:
        """Most blocks that a sequence of `tokens` holds at the same time."""
        return held_at_once(tokens, self.block_size, self.window)

    def needed_from(self, blocks: int) -> int:
        """Which of a sequence's leading `blocks` is the first that it needs to go on behind them."""
        return 0 if self.window is None else self._first_visible(blocks * self.block_size)

    def match(self, seq: Sequence) -> list[Found]:
        """The blocks that already hold the beginning of `seq`; the last token is always left to compute."""
        if not self.prefix_cache or seq.prompt_logprobs is not None:
            return []
        limit = (len(seq.tokens) - 1) // self.block_size
        if self.window is not None:
            return self._match_window(seq, limit)
        found: list[Found] = []
        names, find, host = seq.block_names, self.pool.find, self.pool.host
        for index in range(limit):
            if index >= len(names):  # a few at once; whoever computes these blocks needs their names as well
                self._name(seq, min(index + _NAMED_AHEAD, limit) - 1)
            name = names[index]
            block = find(name)
            if block is None and (host is None or name not in host):
                break
            found.append(Found(name, block))
        if self.states is not None:
            known = len(found)
            if host is not None and host.disk is not None:
                while known < limit and (find(name := self._name(seq, known)) is not None or host.has(name)):
                    known += 1
            del found[self.states.usable(seq, [name for name, _ in found], known) :]
        return found

    def reach(self, seq: Sequence) -> list[bytes]:
        """The blocks at the beginning of `seq` that it could start behind, once those on disk are read; none without a
        disk."""
        host = self.pool.host
        if host is None or host.disk is None or not self.prefix_cache or seq.prompt_logprobs is not None:
            return []
        limit = (len(seq.tokens) - 1) // self.block_size
        names = list[bytes]()
        for index in range(0 if self.window is None else self._first_visible(limit * self.block_size), limit):
            name = self._name(seq, index)
            if self.pool.find(name) is None and not host.has(name):
                break
            names.append(name)
        if self.states is not None:
            del names[self._last_state(self.states, names) :]
        return names

    def recall(self, seq: Sequence) -> list[bytes]:
        """Begin to read what is on disk only of the beginning of `seq`; the blocks to wait for before it is matched."""
        host, names = self.pool.host, self.reach(seq)
        if not names or host is None or host.disk is None:
            return []
        if host.disk.persistent:
            host.disk.touch(names)
        blocks = [name for name in names if self.pool.find(name) is None]
        coming = bool(blocks) and host.recall(blocks)
        seq.recalls = sum(map(host.disk.is_reading, blocks)) if coming else 0
        if self.states is not None:
            coming |= self.states.recall(names[-1])
            blocks.append(names[-1])
        return blocks if coming else []

    def is_coming(self, names: list[bytes]) -> bool:
        """Whether some of these blocks, or states at their ends, are being read from disk."""
        host = self.pool.host
        return (host is not None and host.is_coming(names)) or (
            self.states is not None and self.states.is_coming(names)
        )

    def free_for(self, seq: Sequence) -> int:
        """Blocks that `seq` could be given."""
        return self.pool.free

    def shortfall(self, cached: list[Found], tokens: int, seq: Sequence | None = None) -> int:
        """How many blocks are missing to hold `tokens` when `cached` are reused; zero or less: it fits. `seq`: whose
        tokens they are, where there are several caches (`kv.partition`)."""
        taken = 0  # from the free blocks: those that return from the host, and cached ones that nobody holds
        is_held = self.pool.is_held
        for _, block in cached:
            if block is None or (block != NULL_BLOCK and not is_held(block)):
                taken += 1
        needed = self.blocks_for(tokens) - len(cached) + taken
        return min(needed, self.held_at_once(tokens)) - self.pool.free

    def attach(self, seq: Sequence, cached: list[Found]) -> int:
        """Start `seq` on a prefix that was found; how many of its blocks come from the host."""
        share = self.pool.share
        returning = unread = 0
        for name, block in cached:  # all of them, before a block is taken that could push one of them out
            if block is None:
                assert self.pool.host is not None
                self.pool.host.hold(name)
                returning += 1
            elif block != NULL_BLOCK:
                share(block)
            else:
                unread += 1
        seq.blocks = [self._restore(name) if block is None else block for name, block in cached]
        seq.released = unread
        seq.named = len(cached)
        seq.computed = len(cached) * self.block_size
        if self.states is not None:
            self.states.attach(seq, cached[-1].name if cached else None)
        return returning

    def bring_back(self, steps: int = 1) -> bool:
        """Let the next step make some of the copies that sequences wait for (`HostTier`). Whether there were any."""
        return sum(host.bring_back(steps) for host in self.hosts) > 0

    def awaits(self, seq: Sequence) -> bool:
        """Whether blocks of `seq`, or the state it starts with, are still to be copied back from the host."""
        host = self.pool.host
        if host is not None and host.returns and any(block in host.returns for block in reversed(seq.blocks)):
            return True
        return self.states is not None and self.states.awaits(seq)

    def grow(self, seq: Sequence, tokens: int) -> bool:
        """Make room for the first `tokens` tokens of `seq`. False, and nothing taken, when it does not fit."""
        if self.window is not None:
            self._release_behind(seq)
        if tokens <= len(seq.blocks) * self.block_size:
            return True
        missing = self.blocks_for(tokens) - len(seq.blocks)
        if missing > self.pool.free:
            return False
        if missing == 1:
            seq.blocks.append(self.pool.allocate())
        else:
            seq.blocks.extend(self.pool.allocate_many(missing))
        return True

    def publish(self, seq: Sequence) -> None:
        """Name the blocks of `seq` that are full, computed, and of known content."""
        if not self.prefix_cache:
            return
        full = min(seq.computed, len(seq.tokens)) // self.block_size
        if full <= seq.named:
            return
        self._name(seq, full - 1)
        first = max(seq.named, seq.released)
        self.pool.name_many(seq.blocks[first:full], seq.block_names[first:full])
        seq.named = full

    def advance(self, seq: Sequence, drafts: int) -> tuple[int, tuple[int, ...]]:
        """See `StateStore`."""
        assert self.states is not None
        if self.prefix_cache and seq.computed and seq.computed % self.block_size == 0:
            self._name(seq, seq.computed // self.block_size - 1)  # for a state kept there
        return self.states.advance(seq, drafts)

    def settle(self, seq: Sequence, start: int, accepted: int) -> None:
        """See `StateStore`."""
        assert self.states is not None
        full = min(start + accepted, len(seq.tokens)) // self.block_size
        if self.prefix_cache and full:
            self._name(seq, full - 1)
        self.states.settle(seq, start, accepted)

    def free(self, seq: Sequence) -> None:
        """Give back every block; ends first, so that shared beginnings are evicted last."""
        self.pool.release_many(reversed(seq.blocks[seq.released :] if seq.released else seq.blocks))
        if self.states is not None:
            self.states.free(seq)
        seq.blocks = []
        seq.named = 0
        seq.released = 0
        seq.computed = 0

    def tick(self, now: float) -> None:
        """A step is about to be scheduled."""
        if self.states is not None:
            self.states.tick(now)
        if self.pool.host is not None:
            self.pool.host.tick(now)

    def take_transfers(self) -> Transfers | None:
        """Copies between device and host that the step scheduled last depends on."""
        return None if self.pool.host is None else self.pool.host.take()

    def report(self, load: EngineLoad) -> None:
        """Say what is behind the cache."""
        if self.pool.host is not None:
            self.pool.host.report(load)
        if self.states is not None:
            self.states.report(load)

    def _last_state(self, states: StateStore, names: list[bytes]) -> int:
        """Behind how many of these leading blocks, some of them on disk, a sequence could start once they are read."""
        host = self.pool.host
        assert host is not None
        count = reads = 0
        for end, name in enumerate(names, start=1):
            reads += self.pool.find(name) is None and name not in host
            if reads > host.most_read:
                break
            if states.has(name):
                count = end
        return count

    def _find(self, seq: Sequence, index: int) -> Found | None:
        name = self._name(seq, index)
        block = self.pool.find(name)
        if block is None and (self.pool.host is None or name not in self.pool.host):
            return None
        return Found(name, block)

    def _match_window(self, seq: Sequence, limit: int) -> list[Found]:
        """The longest prefix whose last window is there."""
        hits = [self._find(seq, index) for index in range(limit)]
        best = run = 0
        for end, hit in enumerate(hits, start=1):
            run = run + 1 if hit is not None else 0
            if run >= end - self._first_visible(end * self.block_size):
                best = end
        first = self._first_visible(best * self.block_size)
        unread = [Found(self._name(seq, index), NULL_BLOCK) for index in range(first)]
        return unread + [hit for hit in hits[first:best] if hit is not None]

    def _first_visible(self, position: int) -> int:
        """The first block that a token at `position`, or any after it, can see."""
        assert self.window is not None
        return max(0, position - self.window.size + 1) // self.block_size

    def _release_behind(self, seq: Sequence) -> None:
        """Release blocks that no token still to be computed can see. Draft tokens may be computed again."""
        first = self._first_visible(min(seq.computed, len(seq.tokens)))
        for index in range(seq.released, first):
            self.pool.release(seq.blocks[index])
            seq.blocks[index] = NULL_BLOCK
        seq.released = max(seq.released, first)

    def _restore(self, name: bytes) -> int:
        assert self.pool.host is not None
        block = self.pool.allocate()
        self.pool.name(block, name)
        self.pool.host.restore(name, block)
        return block

    def _name(self, seq: Sequence, index: int) -> bytes:
        names, size = seq.block_names, self.block_size
        known = len(names)
        if known <= index:
            parent, tokens = names[-1] if names else seq.root, seq.tokens[known * size : (index + 1) * size]
            names += [block_name(parent, tokens)] if known == index else names_after(parent, tokens, size)
        return names[index]


def held_at_once(tokens: int, block_size: int, window: SlidingWindow | None) -> int:
    """See `BlockAllocator.held_at_once`. Both ends of what is held may lie inside a block."""
    blocks = -(-tokens // block_size)
    if window is None:
        return blocks
    return min(blocks, -(-(window.size + window.step_tokens) // block_size) + 2)
