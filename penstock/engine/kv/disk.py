"""The third tier: blocks that leave host memory, in a file on every rank. States of recurrent layers have a tier of
their own, and are blocks here.

Only names and places are kept here; a `BlockStore` makes the copies beside the steps, and what has become of them is
asked for between steps (`poll`). Invariant: a place that is being read or written is not given to another name, and a
name is found here only when its block has been written on all ranks.

A persistent tier begins with what the engine before has left on all ranks (`restore`); nothing is written until then.

A copy that fails costs its block and no other. Blocks that may not be used any more (`forget`) are overwritten, at once
or when the copies of them are over; their places are free again after that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from penstock.engine.kv.block_index import Entry
from penstock.engine.request import EngineLoad
from penstock.errors import ReplicaLost

MOST_WRITES = 128
"""Blocks on their way to the disk at a time; blocks that leave the host while it has no time for more are lost."""
WRITES_AT_ONCE = 8

T = TypeVar("T")
Pairs = list[tuple[int, int]]
"""Slots in host memory and places on disk."""


class BlockStore(Protocol):
    """Copies blocks between slots and places. One answer from every rank: which of the copies were made."""

    def write(self, pairs: Pairs, names: Sequence[bytes] = ()) -> list[Future[list[bool]]]:
        """`names`: of the blocks, where they outlive the engine. The same stores have the three methods behind."""
        ...

    def read(self, pairs: Pairs) -> list[Future[list[bool]]]: ...

    def found(self) -> list[Entry]:
        """What every rank has from before, the least recently used first."""
        ...

    def erase(self, places: Sequence[int]) -> list[Future[list[bool]]]:
        """Overwrite what lies there, and let nobody find it again; whether that is on disk."""
        ...

    def forget(self) -> None:
        """Nothing that was written, or is being written, may be found again."""
        ...

    def reorder(self, places: Sequence[int]) -> None:
        """Remember in which order blocks were used."""
        ...

    def close(self) -> None: ...


class Moved(NamedTuple):
    """A copy is over: the slot is no longer used for it."""

    name: bytes
    slot: int
    was_read: bool
    """Into the slot. Otherwise it was written, or could not be read."""


@dataclass(slots=True)
class _Job:
    reads: bool
    blocks: list[tuple[bytes, int, int]]
    """Names, slots, places."""
    answers: list[Future[list[bool]]]
    void: bool = False
    """Whether its names have been forgotten meanwhile."""
    doomed: set[bytes] = field(default_factory=set)
    """Names that are to be erased when it is over."""
    awaited: bool = False
    """Whether something that was forgotten is gone only when it is over."""
    erases: bool = False
    """Whether it overwrites its places; it has no names and no slots then."""


class DiskTier:
    """Names and places of the blocks on disk, least recently used out first."""

    def __init__(self, num_places: int, store: BlockStore, *, persistent: bool = False) -> None:
        """`persistent`: whether blocks outlive the engine."""
        self.capacity = num_places
        self.persistent = persistent
        self.restored = 0
        """Blocks of the engine before this one."""
        self._opened = not persistent
        self.written = 0
        self.read = 0
        self.failed = 0
        """Copies that some rank could not make."""
        self.unerased = 0
        """Places that some rank could not overwrite."""
        self._store = store
        self._free = list(range(num_places - 1, -1, -1))
        self._soiled: set[int] = set()
        """Free places in which something was left."""
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._writing: set[bytes] = set()
        self._reading: set[bytes] = set()
        self._jobs: list[_Job] = []

    def __contains__(self, name: bytes) -> bool:
        return name in self._places

    @property
    def used(self) -> int:
        return len(self._places)

    @property
    def writing(self) -> int:
        """Blocks on their way here."""
        return len(self._writing)

    @property
    def room(self) -> int:
        """Blocks that may be given to `begin_write` now."""
        return MOST_WRITES - len(self._writing) if self._opened else 0

    @property
    def slots(self) -> dict[int, bytes | None]:
        """Slots in host memory that copies are using, and the block that rests in those that are being written."""
        return {
            slot: None if job.reads or job.void or name in job.doomed else name
            for job in self._jobs
            if not job.erases
            for name, slot, _ in job.blocks
        }

    @property
    def erasing(self) -> bool:
        """Whether blocks that were forgotten are still there."""
        return any(job.erases or job.doomed or job.awaited for job in self._jobs)

    def is_writing(self, name: bytes) -> bool:
        return name in self._writing

    def is_reading(self, name: bytes) -> bool:
        return name in self._reading

    @property
    def names(self) -> list[bytes]:
        """Of the blocks here, the least recently used first."""
        return list(self._places)

    @property
    def all_names(self) -> list[bytes]:
        """Also of those on their way."""
        return [*self._places, *self._writing]

    def restore(self) -> None:
        """Take over what the engine before has left. Before anything is written."""
        self._places = OrderedDict((name, place) for name, place in self._store.found())
        taken = set(self._places.values())
        self._free = [place for place in range(self.capacity - 1, -1, -1) if place not in taken]
        self.restored = len(taken)
        self._opened = True

    def touch(self, names: Sequence[bytes]) -> None:
        """The blocks of a sequence are used, wherever they are; its beginning is evicted last."""
        for name in reversed(names):
            if name in self._places:
                self._places.move_to_end(name)

    def begin_write(self, blocks: Sequence[tuple[bytes, int]]) -> list[bytes]:
        """Copy (name, slot) pairs to disk. The blocks that are no longer there to make room, or did not find any."""
        found, gone = list[tuple[bytes, int, int]](), list[bytes]()
        for name, slot in blocks:
            if self._free:
                found.append((name, slot, self._free.pop()))
                self._soiled.discard(found[-1][2])
                continue
            oldest = next((name for name in self._places if name not in self._reading), None)
            gone.append(name if oldest is None else oldest)
            if oldest is not None:
                found.append((name, slot, self._places.pop(oldest)))
        self._writing.update(name for name, _, _ in found)
        for begin in range(0, len(found), WRITES_AT_ONCE):
            part = found[begin : begin + WRITES_AT_ONCE]
            self._jobs.append(_Job(False, part, _asked(self._write, part)))
        return gone

    def begin_read(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """Copy blocks that are here into slots of host memory."""
        found = [(name, slot, self._places[name]) for name, slot in blocks]
        self._reading.update(name for name, _, _ in found)
        pairs = [(slot, place) for _, slot, place in found]
        self._jobs.append(_Job(True, found, _asked(self._store.read, pairs)))

    def poll(self) -> list[Moved]:
        """Copies that are over now. Raises `ReplicaLost` when a rank that makes some is gone; then none is over."""
        over: list[Moved] = []
        ready = [job for job in self._jobs if all(answer.done() for answer in job.answers)]
        outcomes = [[_outcome(answer, len(job.blocks), job.void) for answer in job.answers] for job in ready]
        for job, answers in zip(ready, outcomes, strict=True):
            self._jobs.remove(job)
            doomed: list[int] = []
            for (name, slot, place), *made in zip(job.blocks, *answers, strict=True):
                if job.erases:
                    if all(made):
                        self._free.append(place)
                    else:
                        self.unerased += 1
                        self._leave(place)  # so that the next erasure tries again
                    continue
                self.failed += not all(made)
                if name in job.doomed or (job.void and job.awaited):
                    doomed.append(place)
                    over.append(Moved(name, slot, False))
                    continue
                made_everywhere = all(made) and not job.void
                if job.reads:
                    self._end_read(name, place, made_everywhere, job.void)
                else:
                    self._end_write(name, place, made_everywhere, job.void)
                over.append(Moved(name, slot, job.reads and made_everywhere))
            self._erase(doomed)
        return over

    def forget(self, names: Collection[bytes]) -> None:
        """Drop these blocks, also those that are being copied, and overwrite them; for those that come after this
        engine too. With them goes what failures have left in free places, whoever it belonged to."""
        wanted = set(names)
        pinned: set[int] = set()
        for job in self._jobs:
            for name, _, place in job.blocks:
                pinned.add(place)
                if name in wanted and not job.erases and not job.void:
                    job.doomed.add(name)
            job.awaited = True  # it may overwrite a block of these that had to leave
        self._writing -= wanted
        self._reading -= wanted
        places = [self._places.pop(name) for name in names if name in self._places]
        left = [place for place in self._free if place in self._soiled]
        if left:
            self._free = [place for place in self._free if place not in self._soiled]
            self._soiled.clear()
        self._erase([*left, *(place for place in places if place not in pinned)])

    def forget_all(self) -> None:
        """Drop every name, also of copies that are under way, and for those that come after this engine."""
        if self.persistent and self._opened:
            self._store.forget()
        pinned = {place for job in self._jobs for _, _, place in job.blocks}
        self._free.extend(place for place in self._places.values() if place not in pinned)
        self._soiled.update(self._places.values())
        self._places.clear()
        self._writing.clear()
        self._reading.clear()
        for job in self._jobs:
            job.void = True

    def start_over(self) -> None:
        """A rank is gone, and another will be in its place. Where the disk keeps blocks they stay, but for those that
        are being copied; else there is nothing left on that rank."""
        if not self.persistent:
            self.forget_all()
            return
        for job in self._jobs:
            for name, _, place in job.blocks:
                if self._places.get(name) == place:
                    del self._places[name]
            job.void = True
        self._writing.clear()
        self._reading.clear()

    def remember_order(self) -> None:
        """So that the next engine evicts what this one would have."""
        if self.persistent and self._opened and not self._jobs:
            with suppress(OSError):
                self._store.reorder(list(self._places.values()))

    def close(self) -> None:
        self._store.close()

    def report(self, load: EngineLoad) -> None:
        """Add what is here to what other caches have."""
        load.disk_blocks += self.used
        load.total_disk_blocks += self.capacity
        load.disk_written_blocks += self.written
        load.disk_read_blocks += self.read
        load.disk_failures += self.failed
        load.disk_restored_blocks += self.restored

    def report_states(self, load: EngineLoad) -> None:
        """As `report`, of a tier that holds states."""
        load.disk_states += self.used
        load.total_disk_states += self.capacity
        load.disk_written_states += self.written
        load.disk_read_states += self.read
        load.disk_failures += self.failed
        load.disk_restored_states += self.restored

    def check(self) -> None:
        """Assert the invariant; used by tests."""
        pinned = {place for job in self._jobs for _, _, place in job.blocks}
        places = {*self._free, *self._places.values(), *pinned}
        assert places == set(range(self.capacity)), "a place is lost"
        assert len(self._free) == len(set(self._free)) and not pinned.intersection(self._free), "a place is used twice"
        assert len(set(self._places.values())) == len(self._places), "a place has two names"
        assert not self._writing & self._places.keys(), "a block is found before it is written"

    def _erase(self, places: list[int]) -> None:
        if places:
            blocks = [(b"", -1, place) for place in places]
            self._jobs.append(_Job(False, blocks, _asked(self._store.erase, places), erases=True))

    def _write(self, blocks: list[tuple[bytes, int, int]]) -> list[Future[list[bool]]]:
        pairs = [(slot, place) for _, slot, place in blocks]
        if not self.persistent:
            return self._store.write(pairs)
        return self._store.write(pairs, [name for name, _, _ in blocks])

    def _end_read(self, name: bytes, place: int, made: bool, void: bool) -> None:
        if void:
            self._leave(place)
            return
        self._reading.discard(name)
        if made:
            self._places.move_to_end(name)
            self.read += 1
        else:
            self._leave(self._places.pop(name))

    def _end_write(self, name: bytes, place: int, made: bool, void: bool) -> None:
        if not void:
            self._writing.discard(name)
        if made:
            self._places[name] = place
            self.written += 1
        else:
            self._leave(place)

    def _leave(self, place: int) -> None:
        """A place is free, and something may have been left there."""
        self._free.append(place)
        self._soiled.add(place)


def _asked(ask: Callable[[T], list[Future[list[bool]]]], what: T) -> list[Future[list[bool]]]:
    """The answers; when a rank is gone, one that says so."""
    try:
        return ask(what)
    except ReplicaLost as error:
        lost: Future[list[bool]] = Future()
        lost.set_exception(error)
        return [lost]


def _outcome(answer: Future[list[bool]], count: int, void: bool) -> list[bool]:
    """`void`: nobody needs it any more."""
    error = answer.exception()
    if isinstance(error, ReplicaLost) and not void:
        raise error
    return [False] * count if error is not None else answer.result()
