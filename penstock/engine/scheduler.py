"""Which sequences run in the next step, and how many tokens of each.

There is no prefill or decode phase: a sequence has tokens that are not computed yet, and a step computes some of
them, at most `token_budget` over all sequences. Sequences with one token left to compute (decodes) go first, then
unfinished prompts in chunks, then waiting requests.

Order is by `key = arrival + priority * ageing_s`: a request of priority p is treated as if it had arrived
p * ageing_s seconds later, so urgent ones overtake, and nothing waits for ever. When blocks run out the sequence with
the largest key is preempted: its blocks go back to the pool (most stay findable by name) and it waits again with its
old key. The clock is passed in; the scheduler is a plain object without I/O.

Where streams have a target for the gap between their tokens, the prompt tokens of a step with decodes are bounded by
what they are measured to take (`pace`).

A sequence whose beginning is on the host may start before all of it is back on the device (`kv.returns`): it has its
row and its blocks then, a part of the copies goes with every step of the others, and it is computed once they are made.

With speculation a decode may carry draft tokens behind its last real one. They take only budget, blocks and positions
that no other sequence needs in this step.

In a pipeline running sequences take turns: each step has a part of them (`turns`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.engine.batch import Batch, Chunk
from penstock.engine.kv.allocator import BlockAllocator, Found
from penstock.engine.pace import Pace, PromptBudget
from penstock.engine.restores import MOST_FAILURES
from penstock.engine.roster import Roster
from penstock.engine.sequence import Sequence
from penstock.engine.turns import Turns

if TYPE_CHECKING:
    from penstock.engine.adapters.pool import AdapterPool

AGEING_S = 30.0
FRESH_S = 60.0
"""Without a step with prompts for so long, what such steps took may no longer be true."""
DOUBT = 4.0
"""By how much it might be wrong then."""


class Scheduler(Roster):
    """Token-budget scheduling with preemption, of the sequences of its roster."""

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_running: int,
        token_budget: int,
        max_model_len: int,
        ageing_s: float = AGEING_S,
        adapters: AdapterPool | None = None,
        batches: int = 1,
        pace: Pace | None = None,
    ) -> None:
        """`batches`: steps in flight between which sequences take turns; with 1 every step may have all of them.
        `pace`: bounds prompts beside streams; by default only for those that ask for it."""
        super().__init__(
            allocator,
            max_running=max_running,
            max_model_len=max_model_len,
            ageing_s=ageing_s,
            adapters=adapters,
            turns=Turns(batches),
        )
        self.batches = batches
        self.token_budget = token_budget
        self.pace = pace or Pace()
        self._prompts = PromptBudget(self.pace)
        """What prompts may still take of the step that is being scheduled."""
        self._late: list[tuple[Sequence, float]] = []
        """Sequences whose first token would come too late, and the seconds until then."""
        self._now = 0.0
        self._measured_at = 0.0
        """When the last step was scheduled, and the last one with prompts that has been measured."""
        self._suspects: deque[Sequence] = deque()
        """Sequences of a failed step that are still to be run alone."""

    def reset_counters(self) -> None:
        """Forget what was counted and measured so far."""
        super().reset_counters()
        self.pace.forget()

    def start_over(self) -> None:
        self._suspects.clear()
        super().start_over()

    def decoding(self) -> list[Sequence]:
        """Running sequences of which the next step computes one token."""
        if self._suspects:
            return []
        ready = [seq for seq in self._computed if self._remaining(seq) == 1]
        return ready if self.batches == 1 else ready[: self._decode_share(len(ready))]

    def reserve(self, seq: Sequence, drafts: int) -> int:
        """Take blocks for draft tokens behind a sequence's last token; returns how many fit without costing others."""
        count = min(drafts, seq.limit - seq.length - 1)
        if self.allocator.states is not None:
            count = min(count, max(self.allocator.states.spare, 0))
        end = seq.length + count
        missing = self.allocator.blocks_for(end) - len(seq.blocks)
        if missing > 0 and self.allocator.free_for(seq) - missing < len(self.running):
            end = len(seq.blocks) * self.allocator.block_size  # what its blocks hold anyway
        self.allocator.grow(seq, end)
        return max(end - seq.length, 0)

    def schedule(self, now: float, drafts: Mapping[Sequence, list[int]] | None = None) -> Batch | None:
        """Choose the next step's chunks and take the blocks they need. None when nothing can run. A step without chunks
        only makes copies.

        `drafts`: draft tokens to verify, for sequences without pending tokens.
        """
        self._now = now
        self.allocator.tick(now)
        self._restores.copied = False
        if self._suspects:
            return self._schedule_suspect(now)
        if self._waiting.recalling:
            self.resume(self._waiting.recalled(self.allocator.is_coming, now))
        if self.adapters is not None:
            self.resume(self.adapters.returning(now))
        self.resume(self._restores.begin_step(now))
        chunks, budget = self._continue_running(drafts or {})
        # Only now are preemptions over: name what will be computed, so that requests admitted below can share it.
        size = self.allocator.block_size
        for chunk in chunks:
            if chunk.seq.computed // size > chunk.seq.named:  # most are in the middle of a block
                self.allocator.publish(chunk.seq)
        while budget > 0 and not self._prompts.spent and self._rows:
            admitted = self._admit(budget, now)
            if admitted is None:
                break
            self.allocator.publish(admitted.seq)
            chunks.append(admitted)
            budget -= admitted.length
        return self._commit(chunks)

    def landed(self, batch: Batch, seconds: float | None = None) -> None:
        """A step is over, after so long, or was never launched. Every scheduled step lands once."""
        if seconds is not None:
            prompts = batch.prompts
            if prompts:
                self._measured_at = self._now
            self.pace.observe(len(batch.chunks) - len(prompts), prompts, seconds)
        self._rows.extend(self._turns.landed(batch))

    def take_late(self) -> list[tuple[Sequence, float]]:
        """Sequences that were not begun because their first token would come after their `patience_s`, and the seconds
        until then."""
        late, self._late = self._late, []
        return [(seq, seconds) for seq, seconds in late if not seq.finished]

    def copied(self, batch: Batch, copy_s: float, compute_s: float) -> None:
        """How long a step took that has copied blocks back for sequences that wait (`Batch.restores`)."""
        blocks = 0 if batch.transfers is None else len(batch.transfers.back)
        self._restores.learn(blocks, copy_s, compute_s)

    def expected_s(self, batch: Batch) -> float:
        """Seconds that a step should take; 0 while nothing is known."""
        prompts = batch.prompts
        return self.pace.expected(len(batch.chunks) - len(prompts), prompts)

    def isolate(self, sequences: list[Sequence]) -> None:
        """After a failed step: run each of its sequences alone once, so that only the one that raises fails."""
        for seq in sequences:
            if seq in self.running:
                self.preempt(seq)
        self._suspects.extend(seq for seq in sequences if not seq.finished)

    def _remaining(self, seq: Sequence) -> int:
        """Tokens left to compute; none once every allowed output token has been sampled."""
        length = len(seq.tokens) + seq.pending
        if length >= seq.limit:
            return 0
        if seq.pending and (
            seq.matcher is not None or seq.watermark is not None or self.batches > 1 or length >= seq.hold
        ):
            return 0  # what may come next, its noise, or all of its next step depends on a token that is not known yet
        return length - seq.computed

    def _decode_share(self, ready: int) -> int:
        """Most of the `ready` sequences to decode in one step, where they take turns."""
        decoding = sum(len(seq.tokens) + seq.pending - seq.computed <= 1 for seq in self._computed)
        return self._turns.decodes(decoding, ready)

    def _prompt_share(self, remaining: int, decodes: int) -> int:
        """Most prompt tokens in one step, where sequences take turns; `remaining` are those of running prompts."""
        enough = self.batches * self.token_budget - self._turns.prompt_tokens - remaining
        return self._turns.prompt_share(remaining + self._waiting.tokens(enough), decodes)

    def _continue_running(self, drafts: Mapping[Sequence, list[int]]) -> tuple[list[Chunk], int]:
        """The chunks of sequences that run already, and what they leave of the budget."""
        decodes: list[tuple[Sequence, int]] = []
        prefills: list[tuple[Sequence, int]] = []
        in_turns = self.batches > 1
        for seq in self._computed:
            length = len(seq.tokens) + seq.pending
            if length >= seq.limit or (
                seq.pending and (in_turns or seq.matcher is not None or seq.watermark is not None or length >= seq.hold)
            ):
                continue  # see `_remaining`
            remaining = length - seq.computed
            if remaining == 1:
                decodes.append((seq, 1))
            elif remaining > 0:
                prefills.append((seq, remaining))
        budget = self.token_budget
        if in_turns:
            del decodes[self._decode_share(len(decodes)) :]
            prompts = sum(remaining for _, remaining in prefills)
            budget = min(budget, len(decodes) + self._prompt_share(prompts, len(decodes)))
        spare = budget - len(decodes)
        own_target = min(self._own_targets.values()) if self._own_targets else None
        backlog = self._backlog(prefills) if self.pace.target_s is not None else 0
        self._prompts = PromptBudget(self.pace, self.pace.budget(len(decodes), own_target, backlog), len(decodes))
        chunks: dict[Sequence, Chunk] = {}
        grow, size = self.allocator.grow, self.allocator.block_size
        states = self.allocator.states
        roomy = self.allocator.window is None  # with a window, growing also releases
        for seq, remaining in decodes + prefills:
            if budget == 0:
                break
            if seq not in self.running:
                continue  # preempted for a sequence before it in this very pass
            length = min(remaining, budget)
            if remaining > 1 and (length := self._prompts.fit(seq.computed, length)) == 0:
                break  # prompts come last
            if states is not None and remaining > 1:
                length = states.cut(seq, length)
            end = seq.computed + length
            while not (roomy and end <= len(seq.blocks) * size) and not grow(seq, end):
                victim = self._latest(seq.base)
                self.preempt(victim)
                dropped = chunks.pop(victim, None)
                budget += dropped.length if dropped else 0
                if victim is seq:
                    break
            else:
                verified: tuple[int, ...] = ()
                if seq in drafts:
                    verified = self._affordable(seq, drafts[seq], spare)
                    spare -= len(verified)
                if remaining > 1:
                    self._prompts.spend(seq.computed, length)
                chunks[seq] = self._chunk(seq, length, verified)
                budget -= length + len(verified)
        return list(chunks.values()), budget

    def _backlog(self, prefills: list[tuple[Sequence, int]]) -> int:
        """Prompt tokens still to be computed, of the running and of the first that wait; what is cached counts too."""
        return self._waiting.backlog() + sum(remaining for _, remaining in prefills)

    def _affordable(self, seq: Sequence, drafts: list[int], spare: int) -> tuple[int, ...]:
        """As many draft tokens as leave every decode its token of the budget; their blocks are taken."""
        return tuple(drafts[: self.reserve(seq, min(len(drafts), spare))])

    def _admit(self, budget: int, now: float) -> Chunk | None:
        """Start the first waiting sequence, if all it has so far fits (so that it is not preempted at once)."""
        while True:
            seq = self._waiting.first(now)
            if seq is None or seq.pending:
                return None
            computes = seq.failed_restores >= MOST_FAILURES
            cached = [] if computes else self.allocator.match(seq)
            if self.allocator.shortfall(cached, seq.length, seq) > 0:
                return None
            self._waiting.pop()
            if self._restores.puts_off(seq, cached):
                continue
            names = [] if seq.recalled or computes else self.allocator.recall(seq)
            if names:
                self._waiting.recall(seq, names, now)
                continue
            if (late_s := self._late_s(seq, cached, now)) > 0.0:
                self._late.append((seq, late_s))
                continue
            chunk = self._start(seq, cached, budget, now)
            if chunk is not None or not self._rows:
                return chunk

    def _late_s(self, seq: Sequence, cached: list[Found], now: float) -> float:
        """Seconds until the first token of a request whose `patience_s` ends before; 0 when it is in time, or nothing
        is known. When no prompt was measured lately, one that might be in time runs, and is measured."""
        patience_s = seq.request.patience_s
        if patience_s is None or seq.request.produced or seq.first_scheduled is not None:
            return 0.0
        start = len(cached) * self.allocator.block_size
        ahead = [(other.computed, left) for other in self._computed if (left := self._remaining(other)) > 1]
        seconds = self._prompts.until_computed(start, seq.length - start, self.token_budget, ahead)
        known = seconds if now - self._measured_at < FRESH_S else seconds / DOUBT
        return seconds if known > seq.arrived + patience_s - now else 0.0

    def _start(self, seq: Sequence, cached: list[Found], budget: int, now: float) -> Chunk | None:
        """None: it waits for blocks from the host."""
        if self._run(seq, cached, now):
            return None
        length = min(seq.length - seq.computed, budget)
        length = self._cut(seq, max(self._prompts.fit(seq.computed, length), 1))
        self._prompts.spend(seq.computed, length)
        grown = self.allocator.grow(seq, seq.computed + length)
        assert grown, "admission promised these blocks"
        return self._chunk(seq, length)

    def _cut(self, seq: Sequence, length: int) -> int:
        """`length` tokens, or as many as lie before the next place at which a state is kept."""
        return length if self.allocator.states is None else self.allocator.states.cut(seq, length)

    def _chunk(self, seq: Sequence, length: int, drafts: tuple[int, ...] = ()) -> Chunk:
        start = seq.computed
        read = 0
        writes: tuple[int, ...] = ()
        if self.allocator.states is not None:
            read, writes = self.allocator.advance(seq, len(drafts))
        samples = start + length == len(seq.tokens) + seq.pending
        length += len(drafts)
        seq.computed = start + length
        return Chunk(seq, start, length, samples, drafts, read, writes)

    def _schedule_suspect(self, now: float) -> Batch | None:
        """One suspect alone, chunk by chunk, until it has sampled a token or failed."""
        self._prompts = PromptBudget(self.pace)
        seq = self._suspects[0]
        if seq.finished or (seq in self.running and self._remaining(seq) == 0):
            self._suspects.popleft()
            return self.schedule(now)
        if seq.pending and seq not in self.running:
            return None
        if seq not in self.running:
            while not self._rows or self.allocator.shortfall([], seq.length, seq) > 0 or not self._has_slot(seq):
                if not self.running:
                    return None  # steps in flight hold the rows
                self.preempt(self._latest())
            self._waiting.remove(seq)
            started = self._start(seq, [], self.token_budget, now)
            assert started is not None, "it starts from nothing"
            chunk = started
        else:
            length = self._cut(seq, min(self._remaining(seq), self.token_budget))
            while not self.allocator.grow(seq, seq.computed + length):
                self.preempt(max((s for s in self.running if s is not seq and s.base == seq.base), key=lambda s: s.key))
            chunk = self._chunk(seq, length)
        if chunk.samples:
            self._suspects.popleft()
        return self._commit([chunk])

    def _has_slot(self, seq: Sequence) -> bool:
        return self.adapters is None or self.adapters.has_slot(seq)

    def _commit(self, chunks: list[Chunk]) -> Batch | None:
        """The step with these chunks; without any, one that only copies, if sequences wait for that."""
        if not chunks and not (self._restores.copied if self._turns.in_flight else self._restores.fill()):
            return None
        for chunk in chunks:
            if chunk.samples:
                chunk.seq.pending += 1
        batch = Batch.of(chunks, self.allocator.take_transfers())
        batch.restores = self._restores.copied
        if self.allocator.states is not None:
            batch.state_transfers = self.allocator.states.take_transfers()
        self._turns.scheduled(batch)
        return batch
