"""States of recurrent layers: which slot holds the state of which sequence, and which states are kept for others.

A running sequence has one slot. Steps read a state from one slot and write the next into another or the same, so
keeping a state costs no copy: the sequence goes on in a new slot and leaves the old one behind, under the name of the
block that ends there. States are large, so only some are kept: every `interval` tokens, at the end of a prompt's last
full block, and where a prompt left one that came before it. A prefix counts as found only up to such a place. With its
block's name a state is lost too.

Draft tokens leave a state behind each of them, in free slots; once it is known how many were accepted, the sequence
goes on from that one.

Invariant: there is a free slot for every sequence that may still start; what is kept and drafted takes only the others.
A slot that a step reads is not given away before the next step is scheduled.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.engine.kv.host import Transfers
from penstock.engine.kv.pool import BlockPool
from penstock.engine.request import EngineLoad
from penstock.engine.sequence import Sequence

NO_STATE = 0


class StateStore:
    """Slots of states, by the names of the blocks at whose ends they stand."""

    def __init__(self, pool: BlockPool, *, rows: int, block_size: int, interval: int, keeps: bool = True) -> None:
        """`rows`: most running sequences. `interval`: tokens, a multiple of the block size. `keeps`: whether states are
        kept for others."""
        if pool.capacity < rows:
            raise ValueError(f"{pool.capacity} slots are too few for {rows} sequences")
        self.pool = pool
        self.block_size = block_size
        self._rows = rows
        self._interval = interval
        self._keeps = keeps
        self._running = 0
        self._read: list[int] = []
        """Slots that the step being scheduled reads and nothing needs afterwards."""

    def tick(self, now: float) -> None:
        """A step is about to be scheduled: the one before has been launched, or never will be."""
        host = self.pool.host
        if host is not None:
            host.tick(now)
        self._release()

    def take_transfers(self) -> Transfers | None:
        """Copies of states that the step scheduled last depends on."""
        return None if self.pool.host is None else self.pool.host.take()

    def _release(self) -> None:
        if self._read:
            self.pool.release_many(self._read)
            self._read = []

    @property
    def spare(self) -> int:
        """Slots that no sequence needs, running or to be started."""
        return self.pool.free - (self._rows - self._running)

    def has(self, name: bytes) -> bool:
        """Whether there is a state at the end of that block, be it on disk."""
        return self.pool.find(name) is not None or (self.pool.host is not None and self.pool.host.has(name))

    def recall(self, name: bytes) -> bool:
        """Begin to read the state at the end of that block, if it is on disk only. Whether it is on its way."""
        host = self.pool.host
        return host is not None and self.pool.find(name) is None and host.recall([name])

    def is_coming(self, names: Collection[bytes]) -> bool:
        """Whether states at the ends of these blocks are being read from disk."""
        return self.pool.host is not None and self.pool.host.is_coming(names)

    def usable(self, seq: Sequence, names: list[bytes], known: int) -> int:
        """How many of the leading blocks that were found (`names`) a sequence can start behind. Remembers where it
        leaves what came before, so that a state is kept there: behind `known` blocks, of which some may be on disk."""
        count = next((n for n in range(len(names), 0, -1) if self._find(names[n - 1]) is not None), 0)
        seq.branch = known * self.block_size if count < known else 0
        if count:
            slot = self.pool.find(names[count - 1])
            # Its own slot and the one it reads, where nobody holds that one.
            taken = slot is None or not self.pool.is_held(slot)
            if self.spare < taken:
                return 0
        return count

    def attach(self, seq: Sequence, name: bytes | None) -> bool:
        """Give `seq` a slot; it starts with the state called `name`, or empty. Whether that comes from the host."""
        self._running += 1
        returns = False
        if name is not None:
            slot = self.pool.find(name)
            returns = slot is None
            if slot is None:
                slot = self._restore(name)
            else:
                self.pool.share(slot)
            seq.source = slot
        seq.state = self.pool.allocate()
        return returns

    def awaits(self, seq: Sequence) -> bool:
        """Whether the state that `seq` starts with is still to be copied back from the host."""
        return self.pool.host is not None and seq.source in self.pool.host.returns

    def free(self, seq: Sequence) -> None:
        """Give back the slots of a sequence that stops."""
        if seq.state == NO_STATE:
            return
        self._running -= 1
        held = [seq.state, *(slot for slot in seq.drafted if slot != seq.state)]
        if seq.source:
            held.append(seq.source)
        self.pool.release_many(held)
        seq.state = seq.source = NO_STATE
        seq.drafted = ()

    def cut(self, seq: Sequence, length: int) -> int:
        """At most `length` tokens behind those computed, up to the next place at which a state is kept."""
        if not self._keeps:
            return length
        start, size = seq.computed, self.block_size
        ends = [(start // self._interval + 1) * self._interval, (seq.prompt_len - 1) // size * size, seq.branch]
        return min([length, *(end - start for end in ends if end > start)])

    def advance(self, seq: Sequence, drafts: int = 0) -> tuple[int, tuple[int, ...]]:
        """The slot that the next step of `seq` reads, and those it writes: behind its last token, and behind each of as
        many draft tokens. There must be `spare` slots for those."""
        read = seq.source or (seq.state if seq.computed else NO_STATE)
        if seq.source:
            self._read.append(seq.source)
            seq.source = NO_STATE
        elif self._is_kept(seq, seq.computed) and self.spare > drafts:
            name = seq.block_names[seq.computed // self.block_size - 1]
            if self._find(name) is None:
                self.pool.name(seq.state, name)
                self._read.append(seq.state)
                seq.state = self.pool.allocate()
        if not drafts:
            return read, (seq.state,)
        seq.drafted = (seq.state, *(self.pool.allocate() for _ in range(drafts)))
        return read, seq.drafted

    def settle(self, seq: Sequence, start: int, accepted: int) -> None:
        """A step that began at `start` has verified draft tokens: the sequence goes on from the state behind the
        `accepted`-th token of it."""
        if not seq.drafted:
            return
        slots, seq.drafted = seq.drafted, ()
        seq.state = slots[accepted - 1]
        for index, slot in enumerate(slots):
            if index == accepted - 1:
                continue
            end = start + index + 1
            if index < accepted and self._is_kept(seq, end):
                self.pool.name(slot, seq.block_names[end // self.block_size - 1])
            self.pool.release(slot)

    def report(self, load: EngineLoad) -> None:
        host = self.pool.host
        if host is not None and host.disk is not None:
            host.disk.report_states(load)

    def check_idle(self) -> None:
        """Assert that nothing is held though nothing runs."""
        self._release()
        assert self._running == 0 and self.pool.used == 0, f"{self.pool.used} states leaked"
        self.pool.check()

    def _is_kept(self, seq: Sequence, end: int) -> bool:
        """Whether the state behind the first `end` tokens is to be kept: they are known, and their blocks are named."""
        size = self.block_size
        if not self._keeps or not end or end % size or end // size > len(seq.block_names):
            return False
        return end % self._interval == 0 or end in ((seq.prompt_len - 1) // size * size, seq.branch)

    def _find(self, name: bytes) -> int | bool | None:
        """Whether there is a state of that name in memory; None: there is none."""
        slot = self.pool.find(name)
        if slot is None and self.pool.host is not None and name in self.pool.host:
            return True
        return slot

    def _restore(self, name: bytes) -> int:
        host = self.pool.host
        assert host is not None
        host.hold(name)
        slot = self.pool.allocate()
        self.pool.name(slot, name)
        host.restore(name, slot)
        return slot
