"""The blocks of several caches as one: every sequence lives in one of them, with all its blocks.

For ranks that attend each over sequences of their own. A cache has its own pool, its own null block, its own prefixes
and its own states. `Sequence.base` says which it is: the number of its block 0 when the blocks of all caches are
numbered through. A sequence that starts goes where the longest prefix of it is, and of those to the one with the most
free blocks.
"""

from __future__ import annotations

from penstock.engine.kv.allocator import BlockAllocator, Found
from penstock.engine.kv.host import HostTier, Transfers
from penstock.engine.kv.pool import BlockPool
from penstock.engine.kv.states import StateStore
from penstock.engine.sequence import Sequence


class PartitionedPool(BlockPool):
    """The sums over several pools; blocks are taken and given back in these."""

    def __init__(self, parts: list[BlockPool]) -> None:
        super().__init__(parts[0].num_blocks)
        self.parts = parts

    @property
    def capacity(self) -> int:
        return sum(part.capacity for part in self.parts)

    @property
    def free(self) -> int:
        return sum(part.free for part in self.parts)

    @property
    def cached(self) -> int:
        return sum(part.cached for part in self.parts)

    def forget_all(self, keep_disk: bool = False) -> None:
        for part in self.parts:
            part.forget_all(keep_disk)

    def distrust(self) -> None:
        for part in self.parts:
            part.distrust()

    def erase(self, owner: bytes) -> list[HostTier]:
        return [tier for part in self.parts for tier in part.erase(owner)]

    def count(self, owner: bytes) -> int:
        return sum(part.count(owner) for part in self.parts)

    def check(self) -> None:
        for part in self.parts:
            part.check()


class PartitionedStates(StateStore):
    """The states of several caches, each with its own slots, behind the interface of one."""

    def __init__(self, parts: list[StateStore]) -> None:
        self.parts = parts
        self.pool = PartitionedPool([part.pool for part in parts])

    @property
    def spare(self) -> int:
        """Slots that are free in any case, wherever a sequence is."""
        return min(part.spare for part in self.parts)

    def take_transfers(self) -> Transfers | None:
        return None  # there is no tier behind them

    def cut(self, seq: Sequence, length: int) -> int:
        return self.parts[0].cut(seq, length)  # all of them keep states at the same places

    def check_idle(self) -> None:
        for part in self.parts:
            part.check_idle()


class PartitionedAllocator(BlockAllocator):
    """Allocators of equal caches, behind the interface of one."""

    def __init__(self, parts: list[BlockAllocator]) -> None:
        first = parts[0]
        super().__init__(
            PartitionedPool([part.pool for part in parts]), first.block_size, first.prefix_cache, first.window
        )
        self.parts = parts
        self._blocks = first.pool.num_blocks
        states = [part.states for part in parts if part.states is not None]
        self.states = PartitionedStates(states) if states else None

    def tick(self, now: float) -> None:
        for part in self.parts:
            part.tick(now)

    def advance(self, seq: Sequence, drafts: int) -> tuple[int, tuple[int, ...]]:
        return self._of(seq).advance(seq, drafts)

    def settle(self, seq: Sequence, start: int, accepted: int) -> None:
        self._of(seq).settle(seq, start, accepted)

    def match(self, seq: Sequence) -> list[Found]:
        """Also decides where `seq` will be: with what was found, it must start there."""
        found, branches = list[list[Found]](), list[int]()
        for part in self.parts:
            found.append(part.match(seq))
            branches.append(seq.branch)
        lacking = [part.shortfall(cached, seq.length) for part, cached in zip(self.parts, found, strict=True)]
        # Where there is room at all, if it is anywhere.
        best = max(
            range(len(self.parts)),
            key=lambda i: (lacking[i] <= 0, len(found[i]), self.parts[i].pool.free, -i),
        )
        seq.base, seq.branch = best * self._blocks, branches[best]
        return found[best]

    def shortfall(self, cached: list[Found], tokens: int, seq: Sequence | None = None) -> int:
        assert seq is not None
        if not cached:  # then it can be anywhere
            best = max(range(len(self.parts)), key=lambda i: (self.parts[i].pool.free, -i))
            seq.base = best * self._blocks
        return self._of(seq).shortfall(cached, tokens)

    def free_for(self, seq: Sequence) -> int:
        return self._of(seq).pool.free

    def attach(self, seq: Sequence, cached: list[Found]) -> int:
        return self._of(seq).attach(seq, cached)

    def grow(self, seq: Sequence, tokens: int) -> bool:
        return self._of(seq).grow(seq, tokens)

    def publish(self, seq: Sequence) -> None:
        self._of(seq).publish(seq)

    def free(self, seq: Sequence) -> None:
        self._of(seq).free(seq)

    def _of(self, seq: Sequence) -> BlockAllocator:
        return self.parts[seq.base // self._blocks]
