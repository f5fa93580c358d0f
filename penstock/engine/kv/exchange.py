"""Blocks out of one engine's cache and into another's, by name.

Names are digests of everything up to a block's end (`block_hash`), salt and adapter included, so blocks of equal names
are interchangeable. Between cache and network lie slots of host memory, each one block in one piece, filled and
emptied by a `BlockMover`: its copies may run beside the steps, so a slot is touched again only when its copy is over
(`is_idle`). Nothing here knows where blocks go or come from.

Invariant: blocks taken in (`take_in`) are held until given up (`release`); only then can they be evicted. Slots come
from `slots` and go back there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from penstock.engine.backends.backend import Backend
from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.kv.block_hash import block_names
from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.kv.host import Transfers
from penstock.engine.kv.mover import BlockMover
from penstock.engine.request import EngineLoad, HandoverLoad, Request

MOST_BYTES = 1 << 30
"""Of all slots together."""


@dataclass(frozen=True, slots=True)
class SpreadBlocks:
    """Blocks of an engine of several ranks."""

    shape: CacheShape
    """Of whole blocks."""
    make_mover: Callable[[int], BlockMover]
    """Makes a mover with that many slots of whole blocks."""


class BlockExchange:
    """One engine's side of handing blocks over. Used by the thread that steps the engine."""

    def __init__(
        self,
        allocator: BlockAllocator,
        kv: KVCache,
        backend: Backend,
        *,
        step_tokens: int,
        version: Callable[[str], str | None],
        flush: Callable[[Transfers], None] | None = None,
        spread: SpreadBlocks | None = None,
    ) -> None:
        """`step_tokens`: most tokens of one step; twice as many have a slot. `version`: which weights an adapter's name
        stands for, None when they are not known now. `flush`: makes copies to the host tier, if there is one. `spread`:
        where `kv` is a part of the cache."""
        self.counts = HandoverLoad()
        self.block_bytes = kv.shape.block_bytes if spread is None else spread.shape.block_bytes
        fitting = MOST_BYTES // self.block_bytes
        self.num_slots = max(1, min(2 * allocator.blocks_for(step_tokens), fitting))
        self.at_once = max(1, backend.exchange_step_bytes // kv.shape.block_bytes)
        """Blocks to take in between two steps, at most."""
        self._allocator = allocator
        self._pool = allocator.pool
        self._make_mover = partial(backend.block_mover, kv) if spread is None else spread.make_mover
        self._version = version
        self._flush = flush
        self._mover: BlockMover | None = None
        self._slots: list[int] = []

    @property
    def slots(self) -> list[int]:
        """Free slots. Their memory is taken when they are first asked for."""
        if self._mover is None:
            self._mover = self._make_mover(self.num_slots)
            self._slots = list(range(self.num_slots))
        return self._slots

    def memory(self, slot: int) -> list[memoryview]:
        """A slot's bytes: one piece for each tensor of the cache."""
        assert self._mover is not None
        return self._mover.memory(slot)

    def is_idle(self, slot: int) -> bool:
        """Whether no copy from or to the slot is under way."""
        return self._mover is None or self._mover.is_idle(slot)

    def names(self, request: Request) -> list[bytes]:
        """Of the full blocks before a request's last token; none when they cannot be known."""
        version = self._version(request.adapter) if request.adapter else ""
        if version is None or request.params.prompt_logprobs is not None:
            return []  # prompt log-probabilities need every token computed here
        tokens = request.prompt + request.produced if request.produced else request.prompt
        return block_names(tokens[:-1], self._allocator.block_size, request.cache_salt, version)

    def present(self, names: Sequence[bytes]) -> int:
        """How many of them, from the first, are here: on the device, in the host tier or on disk."""
        host = self._pool.host
        for index, name in enumerate(names):
            if self._pool.find(name) is None and (host is None or not host.has(name)):
                return index
        return len(names)

    def has(self, name: bytes) -> bool:
        return self._pool.find(name) is not None

    def copy_out(self, names: Sequence[bytes]) -> list[int]:
        """Begin to copy blocks that are here (`has`) to free slots; their slots, in this order."""
        slots = [self.slots.pop() for _ in names]
        assert self._mover is not None
        out = [(self._block(name), slot) for name, slot in zip(names, slots, strict=True)]
        self._mover.run(Transfers(out=out))
        self.counts.blocks_out += len(names)
        self.counts.bytes_out += len(names) * self.block_bytes
        return slots

    def hold(self, names: Sequence[bytes]) -> list[int]:
        """Hold those blocks that are on the device; `release` gives them up."""
        blocks = [block for name in names if (block := self._pool.find(name)) is not None]
        for block in blocks:
            self._pool.share(block)
        return blocks

    def take_in(self, arrived: Sequence[tuple[bytes, int]]) -> list[int]:
        """Begin to copy (name, slot) pairs into the cache; the blocks, held. Fewer than came when there is no room."""
        blocks: list[int] = []
        back: dict[int, int] = {}
        for name, slot in arrived:
            block = self._pool.find(name)
            if block is not None:  # another request brought or computed it meanwhile
                self._pool.share(block)
            elif not self._pool.free:
                break
            else:
                block = self._pool.allocate()
                self._pool.name(block, name)
                back[block] = slot
            blocks.append(block)
        if self._pool.host is not None and self._flush is not None:
            pending = self._pool.host.take()  # blocks just reused must be copied out before they are overwritten
            if pending is not None:
                self._flush(pending)
        if back:
            assert self._mover is not None
            self._mover.run(Transfers(back=back))
            self.counts.blocks_in += len(back)
            self.counts.bytes_in += len(back) * self.block_bytes
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give up blocks in the order of their sequence; ends first, so that beginnings are evicted last."""
        for block in reversed(blocks):
            self._pool.release(block)

    def report(self, load: EngineLoad) -> None:
        load.handover = replace(self.counts)
        load.waiting += self.counts.waiting

    def _block(self, name: bytes) -> int:
        block = self._pool.find(name)
        assert block is not None, "asked for a block that is not here"
        return block
