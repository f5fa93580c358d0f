"""The blocks of several caches as one: every sequence lives in one of them, with all its blocks.

For ranks that attend each over sequences of their own. A cache has its own pool, its own null block, its own prefixes,
its own states and its own tiers behind them. `Sequence.base` says which it is: the number of its block 0 when the
blocks of all caches are numbered through. A sequence that starts goes where the longest prefix of it is, and of those
to the one with the most free blocks, and of those to the one that has the least to forget.

Copies to and from host memory are numbered through too (`kv.block_numbers`): one list of them is for all caches.
"""

from __future__ import annotations

from penstock.engine.kv.allocator import BlockAllocator, Found
from penstock.engine.kv.block_numbers import Numbering
from penstock.engine.kv.host import HostTier, Transfers
from penstock.engine.kv.pool import BlockPool
from penstock.engine.kv.states import StateStore
from penstock.engine.request import EngineLoad
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

    def start_over(self) -> None:
        for part in self.parts:
            part.start_over()

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
        return _together([part.take_transfers() for part in self.parts], self.numbering)

    @property
    def numbering(self) -> Numbering | None:
        return _numbering(self.parts[0].pool)

    def cut(self, seq: Sequence, length: int) -> int:
        return self.parts[0].cut(seq, length)  # all of them keep states at the same places

    def report(self, load: EngineLoad) -> None:
        for part in self.parts:
            part.report(load)

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

    @property
    def caches(self) -> list[BlockAllocator]:
        return self.parts

    @property
    def hosts(self) -> list[HostTier]:
        return [host for part in self.parts for host in part.hosts]

    @property
    def numbering(self) -> Numbering | None:
        """Of blocks and slots; None where nothing is behind the caches."""
        return _numbering(self.parts[0].pool)

    def report(self, load: EngineLoad) -> None:
        for part in self.parts:
            part.report(load)

    def take_transfers(self) -> Transfers | None:
        return _together([part.take_transfers() for part in self.parts], self.numbering)

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
            key=lambda i: (lacking[i] <= 0, len(found[i]), *self._room(i)),
        )
        seq.base, seq.branch = best * self._blocks, branches[best]
        return found[best]

    def recall(self, seq: Sequence) -> list[bytes]:
        """Where most of `seq` is found, in memory or on disk, if there is room for it."""
        reach = [len(part.reach(seq)) for part in self.parts]
        if not any(reach):
            return []
        here = seq.base // self._blocks
        best = max(
            range(len(self.parts)),
            key=lambda i: (self.parts[i].shortfall([], seq.length) <= 0, reach[i], i == here, -i),
        )
        return self.parts[best if reach[best] > reach[here] else here].recall(seq)

    def is_coming(self, names: list[bytes]) -> bool:
        return any(part.is_coming(names) for part in self.parts)

    def shortfall(self, cached: list[Found], tokens: int, seq: Sequence | None = None) -> int:
        assert seq is not None
        if not cached:  # then it can be anywhere
            best = max(range(len(self.parts)), key=self._room)
            seq.base = best * self._blocks
        return self._of(seq).shortfall(cached, tokens)

    def free_for(self, seq: Sequence) -> int:
        return self._of(seq).pool.free

    def attach(self, seq: Sequence, cached: list[Found]) -> int:
        return self._of(seq).attach(seq, cached)

    def awaits(self, seq: Sequence) -> bool:
        return self._of(seq).awaits(seq)

    def grow(self, seq: Sequence, tokens: int) -> bool:
        return self._of(seq).grow(seq, tokens)

    def publish(self, seq: Sequence) -> None:
        self._of(seq).publish(seq)

    def free(self, seq: Sequence) -> None:
        self._of(seq).free(seq)

    def _room(self, cache: int) -> tuple[int, int, int]:
        """Larger where a sequence of which nothing is known should rather go."""
        pool = self.parts[cache].pool
        return pool.free, -pool.cached, -cache

    def _of(self, seq: Sequence) -> BlockAllocator:
        return self.parts[seq.base // self._blocks]


def _numbering(pool: BlockPool) -> Numbering | None:
    """Of caches that are all like this one."""
    return None if pool.host is None else Numbering(pool.num_blocks, pool.host.capacity)


def _together(parts: list[Transfers | None], numbering: Numbering | None) -> Transfers | None:
    """The copies of all caches."""
    found = Transfers()
    for cache, transfers in enumerate(parts):
        if transfers is not None:
            assert numbering is not None
            numbered = numbering.through(cache, transfers)
            found.out += numbered.out
            found.back |= numbered.back
    return found if found.out or found.back else None
