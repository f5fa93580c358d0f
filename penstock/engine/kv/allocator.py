"""Blocks of sequences: growing tables, sharing prefixes, giving everything back.

A full block is named (made shareable) when the step that computes it is scheduled, not when it has finished: steps
run in order on one stream and a layer writes all keys before it reads any, so whoever finds the block later, even in
the same step, reads what was written. If a step fails, all names are dropped.
"""

from __future__ import annotations

from penstock.engine.kv.hashing import block_name
from penstock.engine.kv.pool import BlockPool
from penstock.engine.sequence import Sequence


class BlockAllocator:
    """Gives sequences the blocks they need and finds the prefixes they share."""

    def __init__(self, pool: BlockPool, block_size: int, prefix_cache: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.prefix_cache = prefix_cache

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, seq: Sequence) -> list[int]:
        """Blocks that already hold the beginning of `seq`; the last token is always left to compute."""
        if not self.prefix_cache or seq.prompt_logprobs is not None:
            return []
        found: list[int] = []
        for index in range((len(seq.tokens) - 1) // self.block_size):
            block = self.pool.find(self._name(seq, index))
            if block is None:
                break
            found.append(block)
        return found

    def shortfall(self, cached: list[int], tokens: int) -> int:
        """How many blocks are missing to hold `tokens` when `cached` are shared; zero or less: it fits."""
        revived = sum(not self.pool.is_held(block) for block in cached)
        return self.blocks_for(tokens) - len(cached) + revived - self.pool.free

    def attach(self, seq: Sequence, cached: list[int]) -> None:
        """Start `seq` on shared blocks."""
        for block in cached:
            self.pool.share(block)
        seq.blocks = list(cached)
        seq.named = len(cached)
        seq.computed = len(cached) * self.block_size

    def grow(self, seq: Sequence, tokens: int) -> bool:
        """Make room for the first `tokens` tokens of `seq`. False, and nothing taken, when it does not fit."""
        missing = self.blocks_for(tokens) - len(seq.blocks)
        if missing > self.pool.free:
            return False
        for _ in range(missing):
            seq.blocks.append(self.pool.allocate())
        return True

    def publish(self, seq: Sequence) -> None:
        """Name the blocks of `seq` that are full, computed, and of known content."""
        if not self.prefix_cache:
            return
        full = min(seq.computed, len(seq.tokens)) // self.block_size
        for index in range(seq.named, full):
            self.pool.name(seq.blocks[index], self._name(seq, index))
        seq.named = max(seq.named, full)

    def free(self, seq: Sequence) -> None:
        """Give back every block; ends first, so that shared beginnings are evicted last."""
        for block in reversed(seq.blocks):
            self.pool.release(block)
        seq.blocks = []
        seq.named = 0
        seq.computed = 0

    def _name(self, seq: Sequence, index: int) -> bytes:
        names, size = seq.block_names, self.block_size
        while len(names) <= index:
            at = len(names)
            parent = names[-1] if names else seq.root
            names.append(block_name(parent, seq.tokens[at * size : (at + 1) * size]))
        return names[index]
