"""Sequences that wait, and deadlines: two heaps, which keep ended sequences until they come up or `tidy` is called.

A waiting sequence stands in the queue, or aside while its adapter is read or its blocks come back from disk; those
behind it may go before it meanwhile. Its key says where it returns to.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from penstock.engine.request import EngineLoad
from penstock.engine.sequence import Sequence

if TYPE_CHECKING:
    from penstock.engine.adapters.pool import AdapterPool

RECALL_S = 10.0
"""A sequence does not wait longer than this for its blocks to be read from disk; it is computed instead."""
_BACKLOG = 64
"""Waiting sequences whose prompts are counted."""


class WaitingQueue:
    """Ordered by `Sequence.key`. `len` counts entries, ended sequences included."""

    def __init__(self, adapters: AdapterPool | None) -> None:
        self._adapters = adapters
        self._heap: list[tuple[tuple[float, int], Sequence]] = []
        self._recalls: dict[Sequence, tuple[list[bytes], float]] = {}
        """Sequences that wait for blocks from disk: which, and since when."""
        self.count = 0
        """Sequences that wait, in the queue or aside."""
        self._recalled = 0
        self._recall_s = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def recalling(self) -> bool:
        """Whether some sequence waits for blocks from disk."""
        return bool(self._recalls)

    @property
    def head(self) -> Sequence | None:
        """The first in the queue; None also when all stand aside."""
        return next((seq for _, seq in self._heap if not seq.finished), None)

    def first(self, now: float) -> Sequence | None:
        """The first that may start. One whose adapter has no slot is put aside; the pool brings it back."""
        while self._heap:
            seq = self._heap[0][1]
            if not seq.finished and (self._adapters is None or self._adapters.may_start(seq, now)):
                return seq
            heapq.heappop(self._heap)
        return None

    def enter(self, seq: Sequence) -> None:
        """A sequence begins to wait; one whose adapter is not there, aside."""
        self.count += 1
        if self._adapters is None or not seq.request.adapter or self._adapters.bind(seq):
            heapq.heappush(self._heap, (seq.key, seq))

    def resume(self, sequences: Iterable[Sequence]) -> None:
        """Sequences that stood aside return to their places."""
        for seq in sequences:
            heapq.heappush(self._heap, (seq.key, seq))

    def pop(self) -> None:
        """Take the first one out; it starts, or stands aside."""
        heapq.heappop(self._heap)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out from where it stands; it starts next."""
        self._heap = [entry for entry in self._heap if entry[1] is not seq]
        heapq.heapify(self._heap)
        self._recalls.pop(seq, None)

    def ended(self, seq: Sequence) -> None:
        """A waiting sequence is over."""
        self.count -= 1
        self._recalls.pop(seq, None)

    def recall(self, seq: Sequence, names: list[bytes], now: float) -> None:
        """Put a sequence aside until these blocks have been read from disk."""
        seq.recalled = True
        self._recalls[seq] = (names, now)

    def recalled(self, is_coming: Callable[[list[bytes]], bool], now: float) -> list[Sequence]:
        """Sequences whose blocks have been read from disk, or take too long. `is_coming`: whether some are still being
        read."""
        back = [seq for seq, (names, since) in self._recalls.items() if now - since > RECALL_S or not is_coming(names)]
        for seq in back:
            self._recalled += 1
            self._recall_s += now - self._recalls.pop(seq)[1]
        return back

    def report(self, load: EngineLoad) -> None:
        load.restoring += len(self._recalls)
        load.disk_restores = self._recalled
        load.disk_restore_s = self._recall_s

    def tokens(self, enough: int) -> int:
        """Tokens of those in the queue; counting stops when there are enough."""
        total = 0
        for _, seq in self._heap:
            if total >= enough:
                break
            total += 0 if seq.finished else seq.length
        return total

    def backlog(self) -> int:
        """Tokens of the first ones, roughly in order."""
        return sum(seq.length for _, seq in self._heap[:_BACKLOG]) if self._heap else 0

    def tidy(self, most: int) -> None:
        """Drop ended sequences when there are more than `most` entries."""
        if len(self._heap) > most:
            self._heap = [entry for entry in self._heap if not entry[1].finished]
            heapq.heapify(self._heap)


class Deadlines:
    """The deadlines of live sequences, and those by which they must have begun. `len` counts entries, those of ended
    sequences included."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, tuple[float, int], Sequence]] = []
        self._beginnings: list[tuple[float, tuple[float, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap) + len(self._beginnings)

    @property
    def next(self) -> float | None:
        """The earliest, perhaps of a sequence that has ended; None: there is none."""
        return self._heap[0][0] if self._heap else None

    def add(self, seq: Sequence) -> None:
        if seq.deadline is not None:
            heapq.heappush(self._heap, (seq.deadline, seq.key, seq))
        patience_s = seq.request.patience_s
        if patience_s is not None and not seq.request.produced:
            heapq.heappush(self._beginnings, (seq.arrived + patience_s, seq.key, seq))

    def expired(self, now: float) -> list[Sequence]:
        """Live sequences whose deadline has passed; each is returned once."""
        return [seq for seq in _due(self._heap, now) if not seq.finished]

    def overdue(self, now: float) -> list[Sequence]:
        """Live sequences that should have begun by now and have not; each is returned once."""
        return [seq for seq in _due(self._beginnings, now) if not seq.finished and seq.first_scheduled is None]

    def tidy(self, most: int) -> None:
        """Drop ended sequences when there are more than `most` entries of either kind."""
        if len(self._heap) > most:
            self._heap = [entry for entry in self._heap if not entry[2].finished]
            heapq.heapify(self._heap)
        if len(self._beginnings) > most:
            self._beginnings = [entry for entry in self._beginnings if not entry[2].finished]
            heapq.heapify(self._beginnings)


def _due(heap: list[tuple[float, tuple[float, int], Sequence]], now: float) -> Iterator[Sequence]:
    """Takes out the entries whose time has come."""
    while heap and heap[0][0] <= now:
        yield heapq.heappop(heap)[2]
