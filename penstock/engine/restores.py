"""Running sequences that wait until blocks of theirs are back from the host.

They have their rows and their blocks. A part of the copies goes with every step (`kv.returns`): as much as takes as
long as what the last such step computed, so that the tokens of others take about twice as long. Steps without anything
to compute make more of them; a sequence is computed once all of its copies are made or go before its own step.
Invariant: what waits here runs, as far as the scheduler is concerned, and is in no step.
"""

from __future__ import annotations

from penstock.engine.kv.allocator import BlockAllocator, Found
from penstock.engine.request import EngineLoad
from penstock.engine.sequence import Sequence

MOST = 4
"""Sequences that wait at a time; others that need blocks from the host wait in the queue, without any."""
MOST_FAILURES = 2
"""A sequence whose copies fail so often is computed."""
MOST_PIECES = 32
"""However long a step computes, it copies no more than this times `Returns.at_once`."""
ALONE = 8
"""A step without anything to compute copies as much as so many others."""


class Restores:
    """Which sequences wait, since when, and what the step being scheduled copies for them."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self.waiting: dict[Sequence, float] = {}
        """Since when."""
        self._put_off: list[Sequence] = []
        """Sequences that were taken from the queue until fewer wait here."""
        self._arrived: list[Sequence] = []
        """Those that have waited for copies which the step being scheduled makes last."""
        self.copied = False
        """Whether the step being scheduled copies something for those that waited."""
        self._pieces = 1
        """How much a step copies, in pieces of `Returns.at_once`."""
        self.done = 0
        """Sequences that have waited, and seconds of all of them together."""
        self.seconds = 0.0

    def begin_step(self, now: float) -> list[Sequence]:
        """Let the step that is about to be scheduled copy something; sequences that have all they wait for are computed
        from now on. The result may return to the queue."""
        self.copied, self._arrived = False, []
        if self.waiting:
            self.copied = self._allocator.bring_back(self._pieces)
            self._arrived = [seq for seq in self.waiting if not self._allocator.awaits(seq)]
            for seq in self._arrived:
                self.done += 1
                self.seconds += now - self.waiting.pop(seq)
        if not self._put_off or len(self.waiting) >= MOST:
            return []
        back, self._put_off = self._put_off, []
        return back

    def learn(self, blocks: int, copy_s: float, compute_s: float) -> None:
        """A step has copied so many blocks back, and computed."""
        at_once = max((host.returns.at_once or 0 for host in self._allocator.hosts), default=0)
        if blocks and at_once and copy_s > 0.0:
            self._pieces = max(1, min(MOST_PIECES, int(compute_s * blocks / (copy_s * at_once))))

    def fill(self) -> bool:
        """There is nothing to compute: let the step copy more. Whether it copies anything."""
        if self.waiting:
            self.copied |= self._allocator.bring_back(ALONE)
        return self.copied

    def puts_off(self, seq: Sequence, cached: list[Found]) -> bool:
        """Whether a sequence that could start has to wait for others, because it needs blocks from the host too."""
        if len(self.waiting) < MOST or all(block is not None for _, block in cached):
            return False
        self._put_off.append(seq)
        return True

    def add(self, seq: Sequence, now: float) -> bool:
        """A sequence has its blocks. Whether it has to wait until they are filled."""
        if not self._allocator.awaits(seq):
            return False
        self.waiting[seq] = now
        self.copied = True  # its first blocks
        return True

    def interrupted(self) -> list[Sequence]:
        """A step failed, and copies with it: the sequences that cannot go on without them."""
        found = [*self.waiting, *self._arrived]
        self._arrived = []
        for seq in found:
            seq.failed_restores += 1
        return found

    def ended(self, seq: Sequence) -> None:
        """A sequence that did not run is over."""
        if seq in self._put_off:
            self._put_off.remove(seq)

    def check_idle(self) -> None:
        """Assert that nobody waits."""
        assert not self.waiting and not self._put_off, "an ended sequence waits for its blocks"

    def report(self, load: EngineLoad) -> None:
        load.restoring += len(self.waiting) + len(self._put_off)
        load.host_restores = self.done
        load.host_restore_s = self.seconds
