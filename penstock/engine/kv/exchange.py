"""Blocks out of one engine's cache and into another's, by name; with recurrent layers also the state at their end.

Names are digests of everything up to a block's end (`block_hash`), salt and adapter included, so blocks of equal names
are interchangeable; so are the states that stand at their ends. What comes and goes lies in slots of host memory
meanwhile (`transit`). Nothing here knows where blocks go or come from.

Where an engine has several caches, with sequences of their own (`kv.partition`), blocks go out from whichever has them;
what a sequence lacks comes into one of them (`choose`), so that all of it is there.

Invariant: what is taken in (`take_in`) is held until given up (`release`); only then can it be evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

from penstock.engine.backends.backend import Backend
from penstock.engine.kv.allocator import BlockAllocator
from penstock.engine.kv.block_hash import block_names, is_state, of_state, state_name
from penstock.engine.kv.cache import CacheShape, KVCache, StateBlocks
from penstock.engine.kv.host import Transfers
from penstock.engine.kv.pool import BlockPool
from penstock.engine.kv.states import StateStore
from penstock.engine.kv.transit import CachePool, MakeMover, Transit
from penstock.engine.request import EngineLoad, HandoverLoad, Request
from penstock.errors import ReplicaLost

MOST_BYTES = 1 << 30
"""Of all slots together."""
MOST_STATES = 4
"""Slots of states: one is in transit for each prompt, and it is large."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Blocks, or states, of an engine of several ranks."""

    piece_bytes: int
    """Of a whole one."""
    make_mover: MakeMover
    """Makes a mover with that many slots of whole ones."""


@dataclass(frozen=True, slots=True)
class SpreadCache:
    """The cache of an engine of several ranks."""

    shape: CacheShape
    """Of the whole."""
    blocks: Spread
    states: Spread | None = None
    """Of models with recurrent layers."""


class Held(NamedTuple):
    """A block or a state that is kept from eviction."""

    pool: BlockPool
    block: int


class BlockExchange:
    """One engine's side of handing blocks over. Used by the thread that steps the engine.

    Slots of states are numbered behind those of blocks.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        kv: KVCache,
        backend: Backend,
        *,
        step_tokens: int,
        version: Callable[[str], str | None],
        virtual: Callable[[str], list[int]] = lambda adapter: [],
        flush: Sequence[Callable[[Transfers], None]] = (),
        flush_states: Sequence[Callable[[Transfers], None]] = (),
        spread: SpreadCache | None = None,
    ) -> None:
        """`step_tokens`: most tokens of one step; twice as many have a slot. `version`: which weights an adapter's name
        stands for, None when they are not known now; `virtual`: the tokens that it puts before prompts. `flush`: of
        every cache, makes copies to the host tier, if there is one. `spread`: where `kv` is a part of the cache."""
        self.counts = HandoverLoad()
        self.losses = 0
        """How often all that was in the caches and on its way was lost."""
        self._allocator = allocator
        self._caches = allocator.caches
        self._version = version
        self._virtual = virtual
        blocks = Spread(kv.shape.block_bytes, partial(backend.block_mover, kv)) if spread is None else spread.blocks
        self.num_slots = max(1, min(2 * allocator.blocks_for(step_tokens), MOST_BYTES // max(1, blocks.piece_bytes)))
        self.at_once = max(1, backend.exchange_step_bytes // max(1, kv.shape.block_bytes))
        """Blocks to take in between two steps, at most."""
        pools = [cache.pool for cache in self._caches]
        found = [_pool_of(pool, partial(_free, pool), flush, at) for at, pool in enumerate(pools)]
        self.blocks = Transit(found, blocks.make_mover, num_slots=self.num_slots, piece_bytes=blocks.piece_bytes)
        self.states: Transit | None = None
        stores = [cache.states for cache in self._caches if cache.states is not None]
        if stores:
            states = Spread(kv.shape.state_bytes, partial(backend.block_mover, StateBlocks(kv)))
            if spread is not None:
                assert spread.states is not None
                states = spread.states
            self.states = Transit(
                [_pool_of(store.pool, partial(_spare, store), flush_states, at) for at, store in enumerate(stores)],
                states.make_mover,
                num_slots=max(1, min(MOST_STATES, MOST_BYTES // max(1, states.piece_bytes))),
                piece_bytes=states.piece_bytes,
            )

    @property
    def slots(self) -> list[int]:
        """Free slots of blocks."""
        return self.blocks.slots

    def free_slots(self) -> list[int]:
        """Of blocks and of states. Their memory is taken when they are first asked for."""
        found = list(self.blocks.slots)
        if self.states is not None:
            found += [self.num_slots + slot for slot in self.states.slots]
        return found

    def take_all(self) -> list[int]:
        """All slots, which nobody may have now."""
        found = self.free_slots()
        for transit in (self.blocks, self.states):
            if transit is not None:
                transit.slots.clear()
        return found

    def give_back_all(self) -> None:
        for transit in (self.blocks, self.states):
            if transit is not None:
                transit.slots[:] = range(transit.num_slots)

    def room(self, name: bytes) -> int:
        """Free slots for what is called `name`, a block or a state."""
        return len(self._of(name).slots)

    def take_slot(self, name: bytes) -> int:
        return self._number(name, self._of(name).slots.pop())

    def give_back(self, slot: int) -> None:
        """A slot is empty again."""
        transit, at = self._at(slot)
        transit.slots.append(at)

    def holds_state(self, slot: int) -> bool:
        return slot >= self.num_slots

    def memory(self, slot: int) -> list[memoryview]:
        """A slot's bytes: one piece for each tensor of the cache. None of a block where nothing is kept per token."""
        transit, at = self._at(slot)
        return [piece for piece in transit.memory(at) if len(piece)]

    def is_idle(self, slot: int) -> bool:
        """Whether no copy from or to the slot is under way."""
        transit, at = self._at(slot)
        return transit.is_idle(at)

    def names(self, request: Request) -> list[bytes]:
        """Of the full blocks before a request's last token; none when they cannot be known."""
        version = self._version(request.adapter) if request.adapter else ""
        if version is None or request.params.prompt_logprobs is not None:
            return []  # prompt log-probabilities need every token computed here
        tokens = request.prompt + request.produced if request.produced else request.prompt
        if count := self.virtual(request):
            tokens = self._virtual(request.adapter)[:count] + tokens
        return block_names(tokens[:-1], self._allocator.block_size, request.cache_salt, version)

    def virtual(self, request: Request) -> int:
        """How many of a request's first tokens its adapter puts before the prompt; see `Sequence.begin_with`."""
        return len(self._virtual(request.adapter)) if request.adapter else 0

    def choose(self, names: Sequence[bytes], expected: Mapping[int, int] | None = None) -> int:
        """The cache that a sequence with these blocks should be in: where there is room, and most of it is there.
        `expected`: blocks that each cache will be given by others."""
        if len(self._caches) == 1:
            return 0

        def worth(cache: int) -> tuple[bool, int, int, int, int]:
            usable, lacking = self.missing(names, cache)
            pool = self._caches[cache].pool
            free = pool.free - (expected or {}).get(cache, 0)
            return free > len(lacking), usable, free, -pool.cached, -cache

        return max(range(len(self._caches)), key=worth)

    def present(self, names: Sequence[bytes], cache: int = 0) -> int:
        """How many of them, from the first, are in a cache: on the device, in its host tier or on its disk."""
        pool = self._caches[cache].pool
        for index, name in enumerate(names):
            if pool.find(name) is None and (pool.host is None or not pool.host.has(name)):
                return index
        return len(names)

    def missing(self, names: Sequence[bytes], cache: int = 0) -> tuple[int, list[bytes]]:
        """Of a sequence's blocks: behind how many of them it could start with what is in a cache, and what it lacks to
        start behind all of them, in order. With recurrent layers that ends with the state there."""
        known = self._known(names, cache)
        lacking = list(names[known:])
        store = self._caches[cache].states
        if self._allocator.window is not None:
            return self._usable(names, cache), lacking
        if store is None or not names:
            return known, lacking
        usable = next((count for count in range(known, 0, -1) if store.has(names[count - 1])), 0)
        return usable, lacking if usable == len(names) else [*lacking, state_name(names[-1])]

    def _known(self, names: Sequence[bytes], cache: int) -> int:
        """Behind how many of them everything that a sequence needs is in a cache. Where every layer has a sliding
        window, that begins with the last window."""
        first = self._allocator.needed_from(len(names))
        return first + self.present(names[first:], cache)

    def _usable(self, names: Sequence[bytes], cache: int) -> int:
        """With sliding windows: behind how many of them a sequence could start."""
        best = run = 0
        for end, name in enumerate(names, start=1):
            run = run + 1 if self.present([name], cache) else 0
            if run >= end - self._allocator.needed_from(end):
                best = end
        return best

    def has(self, name: bytes) -> bool:
        return self._of(name).find(of_state(name)) is not None

    def copy_out(self, names: Sequence[bytes]) -> list[int]:
        """Begin to copy blocks and states that are here (`has`) to free slots; their slots, in this order."""
        slots: list[int] = []
        for state, run in groupby(names, key=is_state):
            part = list(run)
            transit = self._of(part[0])
            try:
                copied = transit.copy_out([of_state(name) for name in part])
            except ReplicaLost:
                for slot in slots:
                    self.give_back(slot)
                raise
            slots += [self._number(part[0], slot) for slot in copied]
            self.counts.bytes_out += len(part) * transit.piece_bytes
            if not state:
                self.counts.blocks_out += len(part)
        return slots

    def hold(self, names: Sequence[bytes], cache: int = 0) -> list[Held]:
        """Of what a sequence needs and a cache has (`missing`) hold what is on the device; `release` gives it up."""
        pool = self._caches[cache].pool
        wanted = names[self._allocator.needed_from(len(names)) : self._known(names, cache)]
        held = [Held(pool, block) for name in wanted if (block := pool.find(name)) is not None]
        for _, block in held:
            pool.share(block)
        return held

    def take_in(self, arrived: Sequence[tuple[bytes, int]], cache: int = 0) -> list[Held]:
        """Begin to copy (name, slot) pairs into a cache; the blocks, held. Fewer than came when there is no room."""
        held: list[Held] = []
        for state, pairs in _runs(arrived):
            transit = self._of(pairs[0][0])
            try:
                blocks, copied = transit.take_in([(of_state(name), self._at(slot)[1]) for name, slot in pairs], cache)
            except ReplicaLost:
                self.release(held)
                raise
            held += [Held(transit.caches[cache].pool, block) for block in blocks]
            self.counts.bytes_in += copied * transit.piece_bytes
            if not state:
                self.counts.blocks_in += copied
            if len(blocks) < len(pairs):
                break
        return held

    def release(self, held: Sequence[Held]) -> None:
        """Give up blocks in the order of their sequence; ends first, so that beginnings are evicted last."""
        for pool, block in reversed(held):
            pool.release(block)

    def start_over(self) -> None:
        """A rank is gone: so is what was in the caches, and copies that were under way."""
        self.losses += 1

    def report(self, load: EngineLoad) -> None:
        load.handover = replace(self.counts)
        load.waiting += self.counts.waiting

    def _of(self, name: bytes) -> Transit:
        if not is_state(name):
            return self.blocks
        assert self.states is not None, "asked for a state of a model without any"
        return self.states

    def _at(self, slot: int) -> tuple[Transit, int]:
        if slot < self.num_slots:
            return self.blocks, slot
        assert self.states is not None
        return self.states, slot - self.num_slots

    def _number(self, name: bytes, slot: int) -> int:
        return self.num_slots + slot if is_state(name) else slot


def _pool_of(
    pool: BlockPool, room: Callable[[], int], flush: Sequence[Callable[[Transfers], None]], cache: int
) -> CachePool:
    return CachePool(pool, room, flush[cache] if flush else None, cache * pool.num_blocks)


def _free(pool: BlockPool) -> int:
    return pool.free


def _spare(store: StateStore) -> int:
    return store.spare


def _runs(arrived: Iterable[tuple[bytes, int]]) -> Iterable[tuple[bool, list[tuple[bytes, int]]]]:
    """Neighbours of one kind, states or blocks."""
    for state, pairs in groupby(arrived, key=lambda pair: is_state(pair[0])):
        yield state, list(pairs)
