"""What stands between a step's tokens and those who wait for them: tokens become deltas, and sequences end.

Invariant: a sequence ends once, with a delta that says why; its blocks are free at once, and what steps in flight still
sample for it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.engine.grammar import progress
from penstock.engine.request import Delta, FinishReason
from penstock.engine.runner.step import Sampled
from penstock.engine.scheduler import Scheduler
from penstock.engine.sequence import Sequence
from penstock.engine.speculative.speculation import Speculation


class Emission:
    """Empties a scheduler. `ended` is told of every sequence that is over."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float], ended: Callable[[Sequence], None]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._ended = ended
        self.deltas: list[Delta] = []
        """Those that nobody has taken yet."""
        self.generation_tokens = 0

    def take(self) -> list[Delta]:
        deltas, self.deltas = self.deltas, []
        return deltas

    def emit(self, sampled: Iterable[Sampled], speculation: Speculation | None) -> None:
        """A step has sampled these tokens; sequences that end with them are finished."""
        allocator = self._scheduler.allocator
        for chunk, tokens, logprobs in sampled:
            seq = chunk.seq
            if seq.finish_reason is not None:
                continue  # aborted, expired or stopped while this step was in flight
            seq.pending -= 1
            if seq.thought is not None:
                problem = progress.think(seq, tokens)
            else:
                problem = None if seq.matcher is None else progress.advance(seq, tokens[0])
            if problem is not None:
                self.finish(seq, "error", problem)
                continue
            reason = progress.append(seq, tokens)
            if seq.thought is not None:
                progress.follow(seq)
            if chunk.drafts and seq.row >= 0:
                # What was computed behind a rejected draft token will be overwritten.
                seq.computed = chunk.start + len(tokens)
                if chunk.writes:
                    allocator.settle(seq, chunk.start, len(tokens))
            self.generation_tokens += len(tokens)
            delta = Delta(seq.id, tokens)
            self.deltas.append(delta)
            if logprobs is not None:
                delta.logprobs = logprobs[: len(tokens)]
            if not seq.started:
                self._introduce(seq, delta)
            if speculation is not None:
                speculation.learn(chunk, tokens)
            if reason is not None:
                if seq.row >= 0:
                    allocator.publish(seq)
                self._end(seq, delta, reason)

    def finish(self, seq: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End a sequence that has not come to its own end."""
        delta = Delta(seq.id, error=error)
        self._end(seq, delta, reason)
        self.deltas.append(delta)

    def _introduce(self, seq: Sequence, delta: Delta) -> None:
        """Fill in what only a request's first delta carries."""
        seq.started = True
        delta.cached_tokens = max(0, (seq.cached_tokens or 0) - seq.virtual)
        delta.prompt_logprobs = seq.prompt_logprobs
        seq.first_token = now = self._clock()
        if seq.first_scheduled is not None:
            delta.queue_s = seq.first_scheduled - seq.arrived
            delta.prefill_s = now - seq.first_scheduled

    def _end(self, seq: Sequence, delta: Delta, reason: FinishReason) -> None:
        delta.finish_reason = reason
        if seq.first_token is not None:
            delta.decode_s = self._clock() - seq.first_token
        seq.finish_reason = reason
        self._scheduler.finish(seq)
        self._ended(seq)
