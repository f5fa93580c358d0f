"""Every live sequence: those that wait, those that run, and what the running hold.

A request that is added waits. It begins to run with a row, blocks and its adapter's slot, gives them back when it is
preempted and waits again with its old key, and is forgotten when it is finished. Which of them run, and when, is the
scheduler's to say.

Invariant: a live sequence waits or runs, and only one that runs has a row and blocks. A row that a step in flight still
needs is given back when that has landed (`turns`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.engine.batch import Batch
from penstock.engine.kv.allocator import BlockAllocator, Found
from penstock.engine.request import EngineLoad, Request
from penstock.engine.restores import Restores
from penstock.engine.sequence import Sequence
from penstock.engine.turns import Turns
from penstock.engine.waiting_queue import Deadlines, WaitingQueue

if TYPE_CHECKING:
    from penstock.engine.adapters.pool import AdapterPool


class Roster:
    """Ordered by `key = arrival + priority * ageing_s`."""

    SLACK = 32
    """Ended sequences that may stay in a heap until they come up; more are taken out at once."""

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_running: int,
        max_model_len: int,
        ageing_s: float,
        adapters: AdapterPool | None,
        turns: Turns,
    ) -> None:
        self.allocator = allocator
        self.max_running = max_running
        self.max_model_len = max_model_len
        self.ageing_s = ageing_s
        self.adapters = adapters
        self.running: dict[Sequence, None] = {}
        self.preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.host_hit_tokens = 0
        self.disk_hit_tokens = 0
        self._begun: list[str] = []
        """Requests with a `patience_s` that have begun to run since `take_begun` was called."""
        self._turns = turns
        self._own_targets: dict[Sequence, float] = {}
        """Running sequences with a target of their own for the gap between tokens."""
        self._rows = list(range(max_running - 1, -1, -1))
        """Those that are free."""
        self._live: dict[str, Sequence] = {}
        self._waiting = WaitingQueue(adapters)
        self._deadlines = Deadlines()
        self._arrivals = 0
        self._restores = Restores(allocator)

    @property
    def waiting(self) -> int:
        return self._waiting.count

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def live(self) -> list[str]:
        """Ids of requests that wait or run."""
        return list(self._live)

    @property
    def recalling(self) -> bool:
        """Whether some sequence waits for blocks from disk."""
        return self._waiting.recalling

    def report(self, load: EngineLoad) -> None:
        """Say what came back from the tiers behind the cache, and what is behind it."""
        load.host_hit_tokens = self.host_hit_tokens
        load.disk_hit_tokens = self.disk_hit_tokens
        self._restores.report(load)
        self._waiting.report(load)
        self.allocator.report(load)

    @property
    def next_waiting(self) -> Sequence | None:
        """The waiting sequence that is admitted next, when there is room; None also when it waits for an adapter."""
        return self._waiting.head

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline, perhaps of a sequence that has ended; None: there is none."""
        return self._deadlines.next

    def get(self, request_id: str) -> Sequence | None:
        return self._live.get(request_id)

    def add(self, request: Request, now: float) -> Sequence:
        """Queue a request. Its id must not be live."""
        self._arrivals += 1
        key = (now + request.priority * self.ageing_s, self._arrivals)
        seq = Sequence(request, now, key, self.max_model_len)
        self._live[seq.id] = seq
        self._waiting.enter(seq)
        self._deadlines.add(seq)
        return seq

    def finish(self, seq: Sequence) -> None:
        """Forget a sequence whose `finish_reason` was just set; its blocks are free at once."""
        assert seq.finished
        del self._live[seq.id]
        if seq in self.running:
            self._stop(seq)
        else:
            self._waiting.ended(seq)
            self._restores.ended(seq)
        if self.adapters is not None and seq.request.adapter:
            self.adapters.forget(seq)
        most = 2 * len(self._live) + self.SLACK
        self._waiting.tidy(most)
        self._deadlines.tidy(most)

    def check_idle(self) -> None:
        """Assert that nothing is held though nothing is live; for tests and soaks."""
        self._restores.check_idle()
        assert not self.recalling, "an ended sequence waits for its blocks"
        assert not self._live and not self.running and self.waiting == 0, f"{len(self._live)} sequences live"
        assert sorted(self._rows) == list(range(self.max_running)), f"{self.max_running - len(self._rows)} rows leaked"
        assert self.allocator.pool.used == 0, f"{self.allocator.pool.used} blocks leaked"
        self.allocator.pool.check()
        if self.allocator.states is not None:
            self.allocator.states.check_idle()
        if self.adapters is not None:
            self.adapters.check_idle()

    def reset_counters(self) -> None:
        """Forget what was counted so far."""
        self.prefix_query_tokens = self.prefix_hit_tokens = self.host_hit_tokens = self.disk_hit_tokens = 0

    def expired(self, now: float) -> list[Sequence]:
        """Live sequences whose deadline has passed."""
        return self._deadlines.expired(now)

    def overdue(self, now: float) -> list[Sequence]:
        """Live sequences that should have begun by now and still wait."""
        return self._deadlines.overdue(now)

    def take_begun(self) -> list[str]:
        """Requests that might not wait long and have begun to run since this was last asked."""
        if not self._begun:
            return []
        begun, self._begun = self._begun, []
        return begun

    def resume(self, sequences: Iterable[Sequence]) -> None:
        """Sequences that stood aside, for an adapter or for blocks from disk, return to their places in the queue."""
        self._waiting.resume(sequences)

    def preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to wait; it will be computed again, mostly from the cache."""
        self._stop(seq)
        self.preemptions += 1
        self._waiting.enter(seq)

    def distrust(self, batch: Batch) -> None:
        """A step failed: the names on the device cannot be trusted, and copies may not have been made. Sequences that
        need those and were not in the step wait again."""
        self.allocator.pool.distrust()
        computed = {chunk.seq for chunk in batch.chunks}
        for seq in self._restores.interrupted():
            if seq in self.running and seq not in computed:
                self.preempt(seq)

    def start_over(self) -> None:
        """The caches are lost, and what was in flight: all running sequences wait again."""
        for seq in self._live.values():
            seq.pending = 0
        self._rows.extend(self._turns.start_over())
        for seq in list(self.running):
            self.preempt(seq)
        self.allocator.pool.start_over()

    def _run(self, seq: Sequence, cached: list[Found], now: float) -> bool:
        """A sequence that was taken from the queue begins to run, with the blocks that were found for it. Whether it
        has to wait until they are back from the host."""
        self._waiting.count -= 1
        seq.recalled = False
        seq.row = self._rows.pop()
        seq.epoch += 1
        seq.row_version += 1
        self.running[seq] = None
        if seq.request.target_gap_s is not None:
            self._own_targets[seq] = seq.request.target_gap_s
        if self.adapters is not None:
            self.adapters.start(seq)
        restored = self.allocator.attach(seq, cached)
        if seq.first_scheduled is None:
            seq.first_scheduled = now
            if seq.request.patience_s is not None:
                self._begun.append(seq.id)
            seq.cached_tokens = seq.computed
            self.prefix_query_tokens += seq.length
            self.prefix_hit_tokens += seq.computed
            self.host_hit_tokens += restored * self.allocator.block_size
            self.disk_hit_tokens += min(restored, seq.recalls) * self.allocator.block_size
        return self._restores.add(seq, now)

    def _stop(self, seq: Sequence) -> None:
        del self.running[seq]
        self._restores.waiting.pop(seq, None)
        self._own_targets.pop(seq, None)
        if not self._turns.parks(seq):
            self._rows.append(seq.row)
        seq.row = -1
        self.allocator.free(seq)
        if self.adapters is not None:
            self.adapters.stop(seq)

    def _latest(self, base: int | None = None) -> Sequence:
        """The running sequence that is preempted first, of those whose blocks are in the cache `base`."""
        return max((s for s in self.running if base is None or s.base == base), key=lambda seq: seq.key)

    @property
    def _computed(self) -> Iterable[Sequence]:
        """Running sequences that do not wait for their blocks."""
        waiting = self._restores.waiting
        return [seq for seq in self.running if seq not in waiting] if waiting else self.running
