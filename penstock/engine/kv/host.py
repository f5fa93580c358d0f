"""The second tier: blocks that left the device and can come back, and the copies a step has to make.

The device pool says which block it is about to reuse, and which have been unused for a while; the tier gives each a
slot on the host under the same name, least recently used out first. Nothing is copied here: what is to be copied is
collected until the next step takes it (`take`). Invariant: a slot that is the source or target of a copy not yet taken
is not given to another name. Copies out run before copies back, so a block may be copied out and then filled from the
host in the same step.

Copies back may be bounded (`returns`): those that are too many for a step are made by later ones, and a sequence does
not run before all of its blocks are there.

With a disk behind it (`disk`), the older half of the blocks is written there while they still rest here, so that giving
their slots away costs nothing; blocks that are on disk only are read back into slots before a sequence that
begins with them is scheduled (`recall`). A slot that is being written or read is not given away either.

Where blocks on disk outlive the engine, all of them go there as soon as nobody uses them, those of the newest sequence
first and its beginning before its end: so that little is lost, whenever the engine is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice

from penstock.engine.kv.disk import DiskTier
from penstock.engine.kv.returns import Returns
from penstock.engine.request import EngineLoad

IDLE_COPIES = 32
"""Most idle blocks copied out in one step, so that no step is delayed noticeably."""


@dataclass(slots=True)
class Transfers:
    """Copies to make before a step: all of `out`, then all of `back`."""

    out: list[tuple[int, int]] = field(default_factory=list)
    """(block, slot)"""
    back: dict[int, int] = field(default_factory=dict)
    """Block: slot. A block given away and filled again before the step ran needs only the last."""


class HostTier:
    """Names and slots of the host's blocks."""

    def __init__(
        self, num_slots: int, idle_s: float, disk: DiskTier | None = None, returns_at_once: int | None = None
    ) -> None:
        """`returns_at_once`: most blocks that one step copies back; None: any number."""
        self.capacity = num_slots
        self.disk = disk
        self.returns = Returns(returns_at_once)
        """Blocks that later steps copy back."""
        self.idle_s = idle_s
        self.offloaded = 0
        self.restored = 0
        self.now = 0.0
        """Set once per step; the tier has no clock of its own."""
        self._empty = list(range(num_slots - 1, -1, -1))
        self._resting: OrderedDict[bytes, int] = OrderedDict()
        self._moving: dict[bytes, int] = {}
        self._transfers = Transfers()
        self._cooling: OrderedDict[int, tuple[bytes, float]] = OrderedDict()
        self._unsaved: OrderedDict[int, bytes] = OrderedDict()
        """With a persistent disk: device blocks that nobody uses and that may be neither here nor there."""
        self._written: OrderedDict[bytes, None] = OrderedDict()
        """With a disk: the blocks here that are there too. They leave before those that are not."""
        self._latest: list[bytes] = []
        """Blocks that the copies taken last bring here."""
        self._doomed: set[bytes] = set()
        """Blocks to be forgotten once the copies of them have been taken. They are not found any more."""
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()
        """Those that are not, nor on their way; about half of all slots when the disk keeps up, none when it is
        persistent."""

    @property
    def used(self) -> int:
        return len(self._resting) + len(self._moving) + len(self.returns)

    @property
    def erasing(self) -> bool:
        """Whether blocks that were forgotten are still here or on disk."""
        return bool(self._doomed) or (self.disk is not None and self.disk.erasing)

    @property
    def most_read(self) -> int:
        """Blocks that one `recall` reads, at most; as many slots are kept ready to be given away."""
        return -(-self.capacity // 2)

    def __contains__(self, name: bytes) -> bool:
        return self._is_here(name) and name not in self._doomed

    def _is_here(self, name: bytes) -> bool:
        return name in self._resting or name in self._moving or name in self.returns.slots

    def has(self, name: bytes) -> bool:
        """Whether a block is here or on disk."""
        return name not in self._doomed and (self._is_here(name) or (self.disk is not None and name in self.disk))

    def tick(self, now: float) -> None:
        """A step is about to be scheduled."""
        self.now = now
        self.returns.begin_step()
        self.write_ahead()
        self.copy_idle()

    def keep(self, block: int, name: bytes) -> bool:
        """Copy a device block before it is overwritten. False when every slot is busy: its content is lost."""
        if name in self._moving or name in self.returns.slots:
            return True
        if name in self._resting:
            self._touch(name)
            return True
        slot = self._take_slot()
        if slot is None:
            return False
        self._moving[name] = slot
        self._transfers.out.append((block, slot))
        self.offloaded += 1
        return True

    def hold(self, name: bytes) -> None:
        """Keep a block found here from being evicted: it is about to be copied back."""
        if name in self._resting:
            self._moving[name] = self._resting.pop(name)

    def restore(self, name: bytes, block: int) -> None:
        """Copy the content of a held name into a device block, with the next step or, when that has enough to copy,
        with later ones. The host keeps its copy."""
        if self.returns.fits():
            self._transfers.back[block] = self._moving[name]
            self.restored += 1
        else:
            self.returns.add(block, name, self._moving.pop(name))

    def bring_back(self, steps: int = 1) -> bool:
        """Let the next step copy back as many of the blocks that wait for that as it may, or as many as in so many
        steps. Whether there were any."""
        taken = self.returns.take(steps)
        for block, name, slot in taken:
            self._transfers.back[block] = slot
            self._moving[name] = slot
        self.restored += len(taken)
        return bool(taken)

    def give_up(self, block: int) -> bool:
        """Nobody holds a device block any more. Whether it still waited for its content, which it then never gets."""
        found = self.returns.cancel(block)
        if found is None:
            return False
        name, slot = found
        if any(slot == leaving for _, leaving in self._transfers.out):
            self._moving[name] = slot  # it is not here yet
        else:
            self._settle(name, slot)
        if name in self._doomed:
            self._doomed.discard(name)
            self.forget([name])
        return True

    def cool(self, block: int, name: bytes) -> None:
        """A device block is no longer used, though it may be again."""
        if not self._is_here(name):
            self._cooling[block] = (name, self.now + self.idle_s)
            if self._saves:
                self._unsaved[block] = name

    def warm(self, block: int) -> None:
        """A device block is used again, or given away."""
        self._cooling.pop(block, None)
        self._unsaved.pop(block, None)

    @property
    def unsaved(self) -> int:
        """Blocks that are in memory only and could be saved, where the disk keeps them."""
        return len(self._unsaved) + len(self._unwritten) if self._saves else 0

    @property
    def _saves(self) -> bool:
        return self.disk is not None and self.disk.persistent

    def _save(self) -> None:
        """Copy blocks that nobody uses on their way to a disk that keeps them."""
        assert self.disk is not None
        copied = 0
        while self._unsaved and copied < IDLE_COPIES and (self._empty or len(self._written) > len(self._moving)):
            block, name = self._unsaved.popitem()  # of the sequence that ended last, its beginning first
            if self._is_here(name) or name in self.disk:
                continue
            if not self.keep(block, name):
                self._unsaved[block] = name
                return
            self._cooling.pop(block, None)
            copied += 1

    def copy_idle(self) -> None:
        """Copy blocks unused for `idle_s` ahead of their eviction, which then costs nothing."""
        if self._unsaved:
            self._save()
        for _ in range(IDLE_COPIES):
            if not self._cooling:
                return
            block, (name, due) = next(iter(self._cooling.items()))
            if due > self.now or not self.keep(block, name):
                return
            del self._cooling[block]

    def write_ahead(self) -> None:
        """Write blocks that are next to leave to disk, and learn what has become of earlier copies."""
        if self.disk is None:
            return
        self.land()
        ready = len(self._empty) + len(self._written) + self.disk.writing
        wanted = len(self._unwritten) if self.disk.persistent else self.most_read - ready
        lacking = min(wanted, self.disk.capacity - len(self._written), self.disk.room)
        if lacking > 0 and self._unwritten:
            oldest = islice(self._unwritten, lacking)
            blocks = [(name, self._resting[name]) for name in oldest if name in self._resting]
            for name, _ in blocks:
                del self._unwritten[name]
            if blocks:
                for name in self.disk.begin_write(blocks):
                    self._written.pop(name, None)
                    if self._is_here(name):
                        self._unwritten[name] = None

    def land(self) -> None:
        """Learn what has become of copies to and from the disk."""
        assert self.disk is not None
        for name, slot, was_read in self.disk.poll():
            if was_read and not self._is_here(name):
                self._resting[name] = slot
                self._written[name] = None
            elif slot in (self._resting.get(name), self._moving.get(name), self.returns.slots.get(name)):
                self._written[name] = None  # or could not be, and would not be if tried again
            else:
                self._empty.append(slot)

    def recall(self, names: Collection[bytes]) -> bool:
        """Begin to read those of `names` that are on disk only. Whether some of them are on their way."""
        if self.disk is None:
            return False
        on_the_way, wanted = False, list[bytes]()
        for name in names:
            if name in self._resting:
                self._touch(name)
            elif self.disk.is_reading(name):
                on_the_way = True
            elif not self._is_here(name) and name in self.disk:
                wanted.append(name)
        blocks, spared = list[tuple[bytes, int]](), set(names)
        for name in wanted[: self.most_read]:
            slot = self._take_slot(spared)
            if slot is None:
                break
            blocks.append((name, slot))
        if blocks:
            self.disk.begin_read(blocks)
        return on_the_way or bool(blocks)

    def is_coming(self, names: Collection[bytes]) -> bool:
        """Whether some of `names` are being read from disk."""
        return self.disk is not None and any(map(self.disk.is_reading, names))

    def _take_slot(self, spared: Collection[bytes] = ()) -> int | None:
        """An empty slot, or that of the block least recently used; None when there is none to give away."""
        if self._empty:
            return self._empty.pop()
        for names in (self._resting,) if self.disk is None else (self._written, self._unwritten):
            for name in names:
                if name not in spared and name in self._resting:
                    self._written.pop(name, None)
                    self._unwritten.pop(name, None)
                    return self._resting.pop(name)
        return None

    def _touch(self, name: bytes) -> None:
        """A block was used just now."""
        for names in (self._resting, self._written, self._unwritten):
            if name in names:
                names.move_to_end(name)

    def take(self) -> Transfers | None:
        """The copies collected so far, to be made before anything else happens on the device."""
        arriving = {slot for _, slot in self._transfers.out}
        self._latest = self._of_slots(arriving)
        self._rest()
        if self._doomed:
            doomed, self._doomed = self._doomed, set()
            self.forget(doomed)
        transfers = self._transfers
        if not transfers.out and not transfers.back:
            return None
        self._transfers = Transfers()
        return transfers

    def _rest(self) -> None:
        """What was to be copied has been, or is held no longer."""
        moving, self._moving = self._moving, {}
        restored = set(self._transfers.back.values())
        for name, slot in moving.items():
            self._settle(name, slot)
            if slot in restored:
                self._move_to_front(name)

    def _settle(self, name: bytes, slot: int) -> None:
        """A block is here and may leave; it was used just now."""
        self._resting[name] = slot
        if self.disk is not None:
            if name not in self._written and name not in self._unwritten and not self.disk.is_writing(name):
                (self._written if name in self.disk else self._unwritten)[name] = None
            self._touch(name)

    def _move_to_front(self, name: bytes) -> None:
        """The device has a block too: its copy here leaves before those that are the only ones."""
        for names in (self._resting, self._written, self._unwritten):
            if name in names:
                names.move_to_end(name, last=False)

    def _of_slots(self, slots: Collection[int]) -> list[bytes]:
        """The blocks in those of these slots that copies use."""
        busy = self._moving | self.returns.slots if self.returns else self._moving
        return [name for name, slot in busy.items() if slot in slots]

    def names_of(self, owner: bytes) -> list[bytes]:
        """Of the blocks here and on disk, those whose names begin so."""
        on_disk = () if self.disk is None else self.disk.all_names
        names = [*self._resting, *self._moving, *self.returns.slots, *on_disk]
        return [name for name in dict.fromkeys(names) if name.startswith(owner)]

    def forget(self, names: Collection[bytes]) -> None:
        """Drop these blocks, here and on disk. A block that is about to be copied to the device still is."""
        busy = {} if self.disk is None else self.disk.slots
        leaving = {slot for _, slot in self._transfers.out}
        dropped = set(names)
        for name in names:
            slot = self._resting.pop(name, None)
            if name in self.returns.slots:
                self._doomed.add(name)
                dropped.discard(name)
                continue
            if slot is None and name in self._moving:
                if self._moving[name] not in leaving or self._moving[name] in self._transfers.back.values():
                    self._doomed.add(name)
                    dropped.discard(name)
                    continue
                slot = self._moving.pop(name)
                self._transfers.out = [pair for pair in self._transfers.out if pair[1] != slot]
            self._written.pop(name, None)
            self._unwritten.pop(name, None)
            if slot is not None and slot not in busy:  # those return when their copies are over
                self._empty.append(slot)
        for block in [block for block, (name, _) in self._cooling.items() if name in dropped]:
            self.warm(block)
        if self.disk is not None:
            self.disk.forget(dropped)

    def distrust(self) -> None:
        """A step failed, and the device has lost its names: copies that the step was to make may not have been made,
        nor will those be that were collected since or wait for later steps. What earlier steps brought here is right,
        and on disk too."""
        doubtful = [*self._latest, *self._of_slots({slot for _, slot in self._transfers.out})]
        self._moving |= self.returns.clear()
        self._latest = []
        self._transfers = Transfers()
        self._cooling.clear()
        self._unsaved.clear()
        self._rest()
        self.forget([*doubtful, *self._doomed])
        self._doomed.clear()

    def forget_all(self, keep_disk: bool = False) -> None:
        """Drop every name: what was copied may have been wrong, or was not copied at all. `keep_disk`: what has been
        written to a disk that keeps it is right, and stays, and so is what is being written."""
        busy = {} if self.disk is None else self.disk.slots
        keeps = keep_disk and self._saves
        self._empty.extend(slot for slot in self._resting.values() if slot not in busy)
        self._empty.extend(slot for slot in self._moving.values() if slot not in busy)
        self._empty.extend(slot for slot in self.returns.clear().values() if slot not in busy)
        if self.disk is not None and not keeps:
            self.disk.forget_all()
        self._resting.clear()
        if keeps:
            self._resting.update((name, slot) for slot, name in busy.items() if name is not None)
        self._moving.clear()
        self._cooling.clear()
        self._unsaved.clear()
        self._written.clear()
        self._unwritten.clear()
        self._latest.clear()
        self._doomed.clear()
        self._transfers = Transfers()

    def start_over(self) -> None:
        """A rank is gone, and what was in its memory; what a disk keeps stays."""
        if self.disk is not None:
            self.disk.start_over()
        self.forget_all(keep_disk=True)

    def report(self, load: EngineLoad) -> None:
        """Add what is here to what other caches have."""
        load.host_blocks += self.used
        load.total_host_blocks += self.capacity
        load.offloaded_blocks += self.offloaded
        load.restored_blocks += self.restored
        if self.disk is not None:
            self.disk.report(load)

    def check(self) -> None:
        """Assert the invariant; used by tests."""
        slots = [*self._empty, *self._resting.values(), *self._moving.values(), *self.returns.slots.values()]
        copied = {} if self.disk is None else self.disk.slots
        assert len(slots) == len(set(slots)), "a slot has two names"
        assert {*slots, *copied} == set(range(self.capacity)), "a slot is lost"
        busy = self._moving | self.returns.slots
        assert len(busy) == len(self._moving) + len(self.returns), "a name has two slots"
        names = {slot: name for held in (self._resting, busy) for name, slot in held.items()}
        assert all(names.get(slot) == name for slot, name in copied.items()), "a slot is given away while it is copied"
        assert not copied.keys() & set(self._empty), "a slot is given away while it is copied"
        if self.disk is not None:
            here, known = self._resting.keys() | busy.keys(), self._written.keys() | self._unwritten.keys()
            assert known <= here and not self._written.keys() & self._unwritten.keys(), "a block that left is known"
            lost = [name for name in self._resting if name not in known and not self.disk.is_writing(name)]
            assert not lost, "a block can never leave"
            self.disk.check()
        assert not self._resting.keys() & busy.keys(), "a name has two slots"
        moving = set(busy.values())
        written = [slot for _, slot in self._transfers.out]
        assert len(written) == len(set(written)) and moving.issuperset(written), "a slot is written twice in a step"
        assert moving.issuperset(self._transfers.back.values()), "a slot may change before it is read"
