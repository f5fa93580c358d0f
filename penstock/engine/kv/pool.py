"""The pool of KV blocks: how often each block is held, and which free blocks still hold a known prefix.

Invariant: a block is either held (`references > 0`), free and empty, or free and cached (its content has a name and
can be taken up again). Cached blocks count as free: they are given away, least recently used first, when no empty
block is left. Block 0 is never handed out; padding writes land there. With a host tier behind the pool, a cached block
that is given away is first copied there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from penstock.engine.kv.host import HostTier

NULL_BLOCK = 0


class BlockPool:
    """Reference-counted blocks with an LRU of reusable ones. Every operation is O(1)."""

    def __init__(self, num_blocks: int, host: HostTier | None = None) -> None:
        if num_blocks < 2:
            raise ValueError("a pool needs at least one block besides the null block")
        self.num_blocks = num_blocks
        self.host = host
        self._references = [0]
        """Of the blocks that were ever handed out, the null block first; the others, from here on, are empty."""
        self._empty: list[int] = []
        """Blocks that were handed out before."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self.states: BlockPool | None = None
        """States that belong to the ends of blocks (`kv.states`): they are lost with the names of those."""

    @property
    def capacity(self) -> int:
        """Blocks that can be held at the same time."""
        return self.num_blocks - 1

    @property
    def free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return self.num_blocks - len(self._references) + len(self._empty) + len(self._cached)

    @property
    def cached(self) -> int:
        """Free blocks whose content can still be reused."""
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.capacity - self.free

    def allocate(self) -> int:
        """Take a free block; the least recently used prefix is forgotten when no empty one is left."""
        if self._empty:
            block = self._empty.pop()
        elif len(self._references) < self.num_blocks:
            self._references.append(1)
            return len(self._references) - 1
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            name = self._name_of.pop(block)
            del self._block_of[name]
            if self.host is not None:
                self.host.warm(block)
                self.host.keep(block, name)
            elif self.states is not None:
                self.states.drop(name)
        else:
            raise MemoryError("no free KV block")
        self._references[block] = 1
        return block

    def allocate_many(self, count: int) -> list[int]:
        """The same blocks as that many calls of `allocate`."""
        references = self._references
        first = len(references)
        if not self._empty and first + count <= self.num_blocks:
            references.extend([1] * count)
            return list(range(first, first + count))
        if (
            self._empty
            or self.host is not None
            or self.states is not None
            or first < self.num_blocks
            or count > len(self._cached)
        ):
            return [self.allocate() for _ in range(count)]
        evict, name_of, block_of = self._cached.popitem, self._name_of, self._block_of
        taken = [evict(last=False)[0] for _ in range(count)]
        for block in taken:
            del block_of[name_of.pop(block)]
            references[block] = 1
        return taken

    def find(self, name: bytes) -> int | None:
        """The block that holds the prefix `name`, held or not."""
        return self._block_of.get(name)

    def share(self, block: int) -> None:
        """Hold a block found by name, once more if it is held already."""
        if self._references[block] == 0:
            del self._cached[block]
            if self.host is not None:
                self.host.warm(block)
        self._references[block] += 1

    def is_held(self, block: int) -> bool:
        return self._references[block] > 0

    def release(self, block: int) -> None:
        """Release a block. The last release frees it at once."""
        count = self._references[block]
        if count <= 0:
            raise AssertionError(f"block {block} released more often than held")
        self._references[block] = count - 1
        if count == 1:
            if self.host is not None and self.host.returns and self.host.give_up(block):
                name = self._name_of.pop(block, None)
                if name is not None:
                    del self._block_of[name]
                self._empty.append(block)
            elif block in self._name_of:
                self._cached[block] = None
                if self.host is not None:
                    self.host.cool(block, self._name_of[block])
            else:
                self._empty.append(block)

    def release_many(self, blocks: Iterable[int]) -> None:
        """Release blocks one after the other: the first of them is evicted first."""
        references, cached, named, empty = self._references, self._cached, self._name_of, self._empty
        for block in blocks:
            count = references[block]
            if count == 1 and self.host is None:
                references[block] = 0
                if block in named:
                    cached[block] = None
                else:
                    empty.append(block)
            else:
                self.release(block)

    def name(self, block: int, name: bytes) -> bool:
        """Make a held, full block findable. False when another block already has that content."""
        if name in self._block_of:
            return False
        self._block_of[name] = block
        self._name_of[block] = name
        return True

    def name_many(self, blocks: Iterable[int], names: Iterable[bytes]) -> None:
        """Make several blocks findable, each as `name` does."""
        block_of, name_of = self._block_of, self._name_of
        for block, name in zip(blocks, names, strict=True):
            if name not in block_of:
                block_of[name] = block
                name_of[block] = name

    def drop(self, name: bytes) -> None:
        """Forget a name, if there is a block that has it."""
        block = self._block_of.pop(name, None)
        if block is None:
            return
        del self._name_of[block]
        if self._references[block] == 0:
            del self._cached[block]
            self._empty.append(block)
            if self.host is not None:
                self.host.warm(block)

    def forget_all(self, keep_disk: bool = False) -> None:
        """Drop every name: the contents can no longer be trusted (the device failed), or are about to be lost
        (`keep_disk`: then what a persistent disk has stays)."""
        self._drop_all()
        if self.host is not None:
            self.host.forget_all(keep_disk)
        if self.states is not None:
            self.states.forget_all(keep_disk)

    def distrust(self) -> None:
        """A step failed half-way: drop every name here, and of what is on the host what the step was to copy."""
        self._drop_all()
        if self.host is not None:
            self.host.distrust()
        if self.states is not None:
            self.states.distrust()

    def start_over(self) -> None:
        """A rank is gone, and with it the contents of all blocks and what is behind them, but for what a disk keeps."""
        self._drop_all()
        if self.host is not None:
            self.host.start_over()
        if self.states is not None:
            self.states.start_over()

    def erase(self, owner: bytes) -> list[HostTier]:
        """Drop every name that begins with the tag of an owner; the tiers in which blocks may still be overwritten.
        Sequences that run keep their blocks."""
        for name in [name for name in self._block_of if name.startswith(owner)]:
            self.drop(name)
        tiers: list[HostTier] = []
        if self.host is not None:
            self.host.forget(self.host.names_of(owner))
            tiers.append(self.host)
        return tiers if self.states is None else [*tiers, *self.states.erase(owner)]

    def count(self, owner: bytes) -> int:
        """Blocks of an owner here and behind, and states."""
        names = {name for name in self._block_of if name.startswith(owner)}
        if self.host is not None:
            names.update(self.host.names_of(owner))
        return len(names) + (0 if self.states is None else self.states.count(owner))

    def _drop_all(self) -> None:
        self._block_of.clear()
        self._name_of.clear()
        self._empty.extend(self._cached)
        self._cached.clear()

    def check(self) -> None:
        """Assert the invariant; used by tests and by the idle-time integrity check."""
        given = len(self._references)
        assert len(set(self._empty)) == len(self._empty), "an empty block is listed twice"
        empty, cached = {*self._empty, *range(given, self.num_blocks)}, set(self._cached)
        held = {b for b in range(1, given) if self._references[b] > 0}
        assert not empty & cached and not empty & held and not cached & held, "a block is in two states"
        assert empty | cached | held == set(range(1, self.num_blocks)), "a block is lost"
        assert cached <= set(self._name_of), "a cached block has no name"
        assert not empty & set(self._name_of), "an empty block has a name"
        assert {self._block_of[n] for n in self._block_of} == set(self._name_of), "names out of step"
        if self.host is not None:
            self.host.check()
        assert all(r >= 0 for r in self._references) and self._references[NULL_BLOCK] == 0
