"""KV blocks of several ranks: each has its part of every block, and makes the same copies as rank 0, in the same order.
States of recurrent layers are treated alike.

For the tiers behind the cache each rank has a pool and a file of its own, and nothing comes together. Blocks that are
handed over to other engines do: they lie whole in slots (`cache_parts` says where each rank's part is), in memory that
the ranks of one machine share; a rank that cannot see it, because it is on another machine, sends and receives its part
in its answers and calls. Rank 0 decides about everything.

Where shards have sequences of their own, a block is on the ranks of one shard, which alone copy it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.engine.kv.block_part import BlockPart
from penstock.engine.kv.cache import KVCache, StateBlocks, without_rows
from penstock.engine.kv.exchange import Spread, SpreadCache
from penstock.engine.kv.host import Transfers
from penstock.engine.kv.mover import BlockMover
from penstock.engine.kv.transit import MakeMover
from penstock.engine.parallel.cache_parts import CacheParts
from penstock.engine.parallel.channel import Move
from penstock.engine.parallel.layout import Place
from penstock.errors import ReplicaLost

if TYPE_CHECKING:
    from penstock.engine.parallel.launch import Ranks

BLOCKS, STATES = "blocks", "states"
"""What slots and files are for; calls to other ranks are named after it."""
_MARK_BYTES = mmap.PAGESIZE
"""At the beginning of shared memory: by the mark written there a rank knows that it has opened the right one."""
_OPEN_S = 60.0
Pairs = list[tuple[int, int]]
"""Blocks and slots."""


class LeadMover(BlockMover):
    """Rank 0's mover for the host tier: all ranks make its copies."""

    def __init__(self, own: BlockMover, ranks: Ranks, *, states: bool = False) -> None:
        """`states`: whether it copies states, and not blocks."""
        self._own = own
        self._ranks = ranks
        self._states = states

    def memory(self, slot: int) -> list[memoryview]:
        return self._own.memory(slot)

    def is_idle(self, slot: int) -> bool:
        return self._own.is_idle(slot)

    def run(self, transfers: Transfers) -> None:
        with self._ranks.lost_if_it_fails():
            self._ranks.tell(Move(transfers, self._states).encode(), self._ranks.place.world)
            self._own.run(transfers)


class WholeBlocks:
    """Memory for whole blocks, one slot each."""

    def __init__(self, memory: memoryview, tensor_bytes: list[int]) -> None:
        """`tensor_bytes`: of a whole block, by tensor of the cache."""
        self._memory = memory
        self._tensor_bytes = tensor_bytes

    def slot(self, slot: int) -> list[memoryview]:
        begin, pieces = slot * sum(self._tensor_bytes), []
        for size in self._tensor_bytes:
            pieces.append(self._memory[begin : begin + size])
            begin += size
        return pieces


class PartSlots:
    """One rank's part of the slots: copied between its cache, its own host memory and whole blocks.

    Calls come from the thread that runs the steps; what takes long happens on a thread of its own, in order.
    """

    def __init__(self, part: BlockPart, mover: BlockMover, whole: WholeBlocks | None) -> None:
        """`whole`: None where it cannot be seen from here."""
        self.part = part
        self._mover = mover
        self._whole = whole
        self._thread = ThreadPoolExecutor(1, "kv blocks")

    def send(self, pairs: list[tuple[int, int]]) -> Future[list[list[bytes]] | None]:
        """Copy (block, slot) pairs out of the cache; done when they are in their slots. Without shared memory: the
        part of each."""
        if not self.part.gives:
            return _done(None)
        self._mover.run(Transfers(out=pairs))
        return self._thread.submit(self._put_down, [slot for _, slot in pairs])

    def take(self, pairs: list[tuple[int, int]], parts: list[list[bytes]] | None) -> Future[None]:
        """Copy (block, slot) pairs into the cache; done when the slots may be used again."""
        slots = [slot for _, slot in pairs]
        for index, slot in enumerate(slots):
            own = self._mover.memory(slot)
            if self._whole is not None:
                self.part.take(self._whole.slot(slot), own)
            else:
                assert parts is not None
                for piece, part in zip(own, parts[index], strict=True):
                    piece[:] = part
        self._mover.run(Transfers(back=dict(pairs)))
        return self._thread.submit(self._mover.wait, slots)

    def close(self) -> None:
        self._thread.shutdown()

    def _put_down(self, slots: list[int]) -> list[list[bytes]] | None:
        self._mover.wait(slots)
        if self._whole is None:
            return [[bytes(piece) for piece in self._mover.memory(slot)] for slot in slots]
        for slot in slots:
            self.part.put(self._mover.memory(slot), self._whole.slot(slot))
        return None


class RankSlots:
    """A worker rank's answers to calls about slots."""

    def __init__(self, part: BlockPart, make_mover: MakeMover, kind: str = BLOCKS) -> None:
        """`kind`: what lies in the slots."""
        self._part = part
        self._make_mover = make_mover
        self._kind = kind
        self._slots: PartSlots | None = None
        self._shared: tuple[str, str] | None = None
        """What they were made with."""
        self._sees = False

    def handlers(self) -> dict[str, Callable[..., Any]]:
        kind = self._kind
        return {f"open_{kind}": self.open, f"send_{kind}": self.send, f"take_{kind}": self.take}

    def open(self, num_slots: int, tensor_bytes: list[int], shared: tuple[str, str]) -> bool:
        """Make `num_slots` slots, unless they are there. Whether this rank sees those of rank 0."""
        if shared == self._shared:
            return self._sees
        memory = open_shared(*shared, num_slots * sum(tensor_bytes))
        whole = None if memory is None else WholeBlocks(memory, list(tensor_bytes))
        if self._slots is not None:
            self._slots.close()
        self._slots = PartSlots(self._part, self._make_mover(num_slots), whole)
        self._shared, self._sees = shared, whole is not None
        return self._sees

    def send(self, pairs: list[tuple[int, int]]) -> Future[list[list[bytes]] | None]:
        assert self._slots is not None
        return self._slots.send(pairs)

    def take(self, pairs: list[tuple[int, int]], parts: list[list[bytes]] | None) -> Future[None]:
        assert self._slots is not None
        return self._slots.take(pairs, parts)


class OwnParts(NamedTuple):
    """Rank 0's part of all blocks, or states, and what it knows of those of others."""

    parts: list[BlockPart]
    """Of all ranks."""
    make: MakeMover
    """Makes movers for rank 0's own."""
    blocks: int
    """Of a cache: where shards have sequences of their own, blocks are numbered through."""
    rows: tuple[BlockPart, MakeMover] | None = None
    """What rank 0 keeps of the blocks of all shards."""


class LeadSlots(BlockMover):
    """Rank 0's slots of whole blocks, filled and emptied by all ranks."""

    def __init__(self, ranks: Ranks, own: OwnParts, num_slots: int, kind: str = BLOCKS) -> None:
        """`kind`: what lies in the slots."""
        parts, self._blocks = own.parts, own.blocks
        tensor_bytes = parts[0].whole_bytes
        self._kind = kind
        self._ranks = ranks
        self._parts = parts[1:]
        self._busy: dict[int, list[Future[Any]]] = {}
        """By slot: what its last copy waits for."""
        memory, fd, mark = make_shared(num_slots * sum(tensor_bytes))
        self._whole = WholeBlocks(memory, tensor_bytes)
        self._own = PartSlots(parts[0], own.make(num_slots), self._whole)
        self._rows: PartSlots | None = None
        if own.rows is not None:
            self._rows = PartSlots(own.rows[0], own.rows[1](num_slots), self._whole)
        path = f"/proc/{os.getpid()}/fd/{fd}" if fd is not None else ""
        self._sees: list[bool] = []
        """Which of the other ranks share the memory."""
        self._open = partial(self._open_slots, num_slots, tensor_bytes, (path, mark))
        opened = False
        try:
            self._open()
            opened = True
        finally:
            if fd is not None and not (opened and ranks.restarts):
                os.close(fd)  # the memory lives on in those who have mapped it
        if ranks.restarts:
            ranks.after_restart.append(self._renew)
            if fd is not None:
                weakref.finalize(self, os.close, fd)

    def _open_slots(self, num_slots: int, tensor_bytes: list[int], shared: tuple[str, str]) -> None:
        """Have the other ranks make their slots, those that have none."""
        try:
            answers = self._ranks.call(f"open_{self._kind}", num_slots, tensor_bytes, shared)
            self._sees = [bool(answer.result(_OPEN_S)) for answer in answers]
        except TimeoutError as error:
            raise ReplicaLost(f"a rank made no slots for blocks within {_OPEN_S:g} s") from error

    def _renew(self) -> None:
        """A rank was started again. Nobody waits for copies that were under way then."""
        self._busy.clear()
        self._open()

    def memory(self, slot: int) -> list[memoryview]:
        return self._whole.slot(slot)

    def is_idle(self, slot: int) -> bool:
        waits = self._busy.get(slot)
        if waits is None:
            return True
        if not all(done.done() for done in waits):
            return False
        for done in waits:
            error = done.exception()
            if error is not None:
                raise ReplicaLost(f"a rank could not copy its part of a block: {error}") from error
        self._busy.pop(slot, None)
        return True

    def run(self, transfers: Transfers) -> None:
        with self._ranks.lost_if_it_fails():
            if transfers.out:
                self._send(transfers.out)
            if transfers.back:
                self._take(list(transfers.back.items()))

    def _send(self, pairs: Pairs) -> None:
        here, *there = self._by_rank(pairs)
        args = [(theirs,) if theirs else None for theirs in there]
        answers = self._ranks.call_each(f"send_{self._kind}", args)
        waits: list[Future[Any]] = [self._own.send(here)] if here else []
        if self._rows is not None:
            waits.append(self._rows.send(pairs))
        for theirs, part, sees, answer in zip(there, self._parts, self._sees, answers, strict=True):
            placed = sees or not part.gives or not theirs
            waits.append(answer if placed else self._placed(part, [slot for _, slot in theirs], answer))
        self._busy.update(dict.fromkeys([slot for _, slot in pairs], waits))

    def _take(self, pairs: Pairs) -> None:
        here, *there = self._by_rank(pairs)
        args: list[tuple[Any, ...] | None] = []
        for theirs, part, sees in zip(there, self._parts, self._sees, strict=True):
            parts = None if sees else [self._cut(part, slot) for _, slot in theirs]
            args.append((theirs, parts) if theirs else None)
        waits: list[Future[Any]] = self._ranks.call_each(f"take_{self._kind}", args)
        if here:
            waits.append(self._own.take(here, None))
        if self._rows is not None:
            waits.append(self._rows.take(pairs, None))
        self._busy.update(dict.fromkeys([slot for _, slot in pairs], waits))

    def _by_rank(self, pairs: Pairs) -> list[Pairs]:
        """What each rank copies: all of it, or what is in the cache of its shard, as that one numbers its blocks."""
        place = self._ranks.place
        if not place.data:
            return [pairs] * place.world
        found: list[Pairs] = [[] for _ in range(place.tensor)]
        for block, slot in pairs:
            cache, own = divmod(block, self._blocks)
            found[cache].append((own, slot))
        return found * place.pipeline

    def _cut(self, part: BlockPart, slot: int) -> list[bytes]:
        return part.cut(self._whole.slot(slot))

    def _placed(self, part: BlockPart, slots: list[int], answer: Future[Any]) -> Future[None]:
        """Done when what a rank sends has been put into the slots."""
        placed: Future[None] = Future()

        def place(answer: Future[Any]) -> None:
            try:
                for slot, pieces in zip(slots, answer.result(), strict=True):
                    part.put(pieces, self._whole.slot(slot))
            except Exception as error:
                placed.set_exception(error)
            else:
                placed.set_result(None)

        answer.add_done_callback(place)
        return placed


def spread_cache(
    parts: CacheParts, kv: KVCache, ranks: Ranks, make: Callable[[KVCache, int], BlockMover]
) -> SpreadCache:
    """`kv`: rank 0's part. `make`: makes movers for it."""
    places = [replace(ranks.place, rank=rank) for rank in range(ranks.place.world)]
    states = None
    if parts.model.recurrent:
        of_states = [parts.states(each) for each in places]
        states = _spread(ranks, OwnParts(of_states, partial(make, StateBlocks(kv)), kv.num_states), STATES)
    own, every = without_rows(kv)
    rows = None if every is None else (parts.rows_alone(), partial(make, every))
    blocks = OwnParts([parts.blocks(each) for each in places], partial(make, own), kv.num_blocks, rows)
    return SpreadCache(parts.whole(), _spread(ranks, blocks, BLOCKS), states)


def _spread(ranks: Ranks, own: OwnParts, kind: str) -> Spread:
    return Spread(sum(own.parts[0].whole_bytes), lambda num_slots: LeadSlots(ranks, own, num_slots, kind))


def rank_slots(
    parts: CacheParts, place: Place, kv: KVCache, make: Callable[[KVCache, int], BlockMover]
) -> list[RankSlots]:
    """Of a worker rank: for blocks, and for states."""
    found = [RankSlots(parts.blocks(place), partial(make, kv))]
    if parts.model.recurrent:
        found.append(RankSlots(parts.states(place), partial(make, StateBlocks(kv)), STATES))
    return found


def make_shared(size: int) -> tuple[memoryview, int | None, str]:
    """Memory that other processes can map (`open_shared`), its file, and the mark by which they know it. Without such
    memory on this system the file is None. No file of that name is left behind, however the processes end."""
    mark = secrets.token_hex(16)
    if not hasattr(os, "memfd_create"):
        return memoryview(mmap.mmap(-1, max(size, 1))), None, mark
    fd = os.memfd_create("penstock-blocks")
    os.ftruncate(fd, _MARK_BYTES + size)
    memory = memoryview(mmap.mmap(fd, _MARK_BYTES + size))
    memory[: len(mark)] = mark.encode()
    return memory[_MARK_BYTES:], fd, mark


def open_shared(path: str, mark: str, size: int) -> memoryview | None:
    """What `make_shared` made in another process of this machine; None when it is not to be seen from here, where
    `path` may be nothing or something else."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != _MARK_BYTES + size:
            return None
        memory = memoryview(mmap.mmap(fd, _MARK_BYTES + size))
    except OSError:
        return None
    finally:
        os.close(fd)
    return memory[_MARK_BYTES:] if bytes(memory[: len(mark)]) == mark.encode() else None


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
