"""Speculation as the engine sees it: which draft tokens go into the next step, and how those of the last one did.

A proposer makes draft tokens and tracks their acceptance; this class decides how many are worth verifying, from that
and from how long steps take, and counts. It never decides what is generated: see `verification`.

With overlap (CUDA) a step that verifies draft tokens cannot be launched before the tokens of the step before it are
known. The time lost to waiting is part of what such steps are measured to take, also when in the end there was nothing
to verify; other steps stay overlapped, and only those count as plain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from penstock.engine.batch import Batch, Chunk
from penstock.engine.request import EngineLoad
from penstock.engine.sequence import Sequence
from penstock.engine.speculative.gain import MARGIN, Balance, StepCosts, choose_depths
from penstock.errors import ReplicaLost

log = logging.getLogger(__name__)

_PATIENCE = 128
_MOST_PATIENCE = 1024
"""Steps without speculation, though there were draft tokens, before a few are verified to see whether they pay now."""
_PROBE_STEPS, _PROBE_DEPTHS = 4, 2
"""How many steps those are. They verify one draft token, the next time two."""
_STALE, _REMEASURED = 512, 4
"""After so many steps that verify, so many plain ones are run to measure them again."""
_OBSERVED = 8
"""While nothing pays, proposers learn from so many sequences per step, in rotation."""


class Proposer(Protocol):
    """Makes draft tokens. Sequences it has not seen are new; those it is told to forget are over."""

    def outlook(self, seq: Sequence) -> tuple[float, int]:
        """The chance that a draft token is accepted, and how many could be made now (0: none)."""
        ...

    def seconds(self, sequences: int) -> float:
        """Seconds for one more draft token of that many sequences."""
        ...

    def propose(self, depths: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        """At most as many draft tokens as asked for; the sequences have no pending tokens."""
        ...

    def learn(self, seq: Sequence, drafts: tuple[int, ...], tokens: list[int]) -> None:
        """`tokens` were added to `seq` by a step that verified `drafts` (or none)."""
        ...

    def forget(self, seq: Sequence) -> None: ...

    def forget_caches(self) -> None:
        """What was computed for any sequence is gone."""
        ...


class Speculation:
    """Decides and counts. `most_tokens`: decoded tokens in a step that verifies, draft tokens included."""

    def __init__(
        self, proposer: Proposer, *, depth: int, most_tokens: int, overlap: bool, clock: Callable[[], float]
    ) -> None:
        self.proposer = proposer
        self.depth = depth
        self.most_tokens = most_tokens
        self.plain = StepCosts()
        """Steps without draft tokens; with overlap those launched ahead."""
        self.verifying = StepCosts() if overlap else self.plain
        """Steps launched after the results of those before them were known."""
        self.balance = Balance()
        self.drafts = 0
        """Times that draft tokens of a sequence were verified."""
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.paying = True
        self.broken = False
        """A proposer raised."""
        self._overlap = overlap
        self._clock = clock
        self._waited = False
        """The step to be collected next could not be launched ahead."""
        self._gained = 0
        """Tokens that the step being collected has added so far."""
        self._verified = 0
        self._owed = 0
        """Plain steps to be measured before the next draft."""
        self._last_step: float | None = None
        self._spent = 0.0
        self._steps = 0
        self._turns = 1
        self._unused = 0
        self._patience = _PATIENCE
        self._probe = 1

    def plan(self, decoding: list[Sequence]) -> dict[Sequence, int]:
        """How many draft tokens to verify of which sequences in the next step."""
        self._turns = -(-len(decoding) // _OBSERVED) or 1
        if self.broken or not 0 < len(decoding) < self.most_tokens or self._owed:
            return {}
        plain_s = self.plain.estimate(len(decoding))
        if plain_s is None or not self.plain.knows(len(decoding)):
            return {}  # plain steps must have been measured first
        outlooks = [self._outlook(seq) for seq in decoding]
        if not any(most for _, most in outlooks):
            return {}
        # Step sizes grow gradually: the first drafts must not be the most expensive.
        limit = min(self.most_tokens, 2 * max(self.verifying.largest, len(decoding)))
        depths, factor = choose_depths(outlooks, len(decoding), limit, plain_s, self._step_s(len(decoding)))
        self.paying = factor >= MARGIN and not self.balance.losing
        if self.paying:
            self._unused = 0
            if self.balance.winning:
                self._patience = _PATIENCE
            return {seq: depth for seq, depth in zip(decoding, depths, strict=True) if depth}
        self._unused += 1
        if self._unused < self._patience:
            return {}
        probe = self._probe
        if self._unused == self._patience + _PROBE_STEPS:
            self._unused, self._patience = 0, min(2 * self._patience, _MOST_PATIENCE)
            self._probe = probe % _PROBE_DEPTHS + 1
            self.balance = Balance()
        index = max(range(len(outlooks)), key=lambda i: (outlooks[i][1] > 0, outlooks[i][0]))
        most = min(probe, outlooks[index][1], self.most_tokens - len(decoding))
        return {decoding[index]: most}

    def propose(self, decoding: list[Sequence]) -> dict[Sequence, list[int]]:
        """Draft tokens for the next step. No sequence may have pending tokens."""
        self._waited = self._overlap
        depths = self.plan(decoding)
        if not depths:
            return {}
        begin = self._clock()
        try:
            drafts = self.proposer.propose(depths)
        except ReplicaLost:
            raise  # the ranks of a draft model cannot go on together, with the target neither
        except Exception:
            # Nothing depends on draft tokens: serving goes on without them.
            log.exception("making draft tokens failed; speculation is off until the engine restarts")
            self.broken = True
            return {}
        self._spent = self._clock() - begin
        return {seq: kept for seq, tokens in drafts.items() if (kept := _within_thought(seq, tokens))}

    def learn(self, chunk: Chunk, tokens: list[int]) -> None:
        """A step added `tokens` to the chunk's sequence."""
        seq = chunk.seq
        self._gained += len(tokens)
        if chunk.drafts:
            self.drafts += 1
            self.draft_tokens += len(chunk.drafts)
            self.accepted_tokens += len(tokens) - 1
        elif not self.paying and (self._steps + seq.row) % self._turns:
            return
        if seq.request.speculation:
            self.proposer.learn(seq, chunk.drafts, tokens)

    def step_done(self, batch: Batch) -> None:
        """A step was collected; note how long it took if it only decoded."""
        now = self._clock()
        self._steps += 1
        if self._last_step is not None and all(chunk.decodes for chunk in batch.chunks):
            self._observe(batch, now - self._last_step - self._spent)
        self._spent, self._gained, self._waited = 0.0, 0, False
        self._last_step = now

    def _observe(self, batch: Batch, seconds: float) -> None:
        tokens, decodes = batch.num_tokens, len(batch.chunks)
        if not batch.speculative and not self._waited:
            self.plain.observe(tokens, seconds)
            self._verified, self._owed = 0, max(self._owed - 1, 0)
            return
        self.verifying.observe(tokens, seconds)
        self._verified += 1
        if self._verified == _STALE:
            self._owed = _REMEASURED
        plain_s, verifying_s = self.plain.estimate(decodes), self.verifying.estimate(tokens)
        if plain_s is not None and verifying_s is not None:
            # A proposer that reads a new prompt invests in all steps to come: this one pays for some of it.
            drawing_s = self.proposer.seconds(decodes) * max(len(chunk.drafts) for chunk in batch.chunks)
            proposing_s = min(self._spent, drawing_s + plain_s)
            self.balance.add(self._gained / decodes, (verifying_s + proposing_s) / plain_s)

    def pause(self) -> None:
        """The engine is idle; the time until its next step is not counted."""
        self._last_step = None

    def forget(self, seq: Sequence) -> None:
        self.proposer.forget(seq)

    def forget_caches(self) -> None:
        """See `Proposer`."""
        self.proposer.forget_caches()

    def report(self, load: EngineLoad) -> None:
        load.drafts, load.draft_tokens, load.accepted_tokens = self.drafts, self.draft_tokens, self.accepted_tokens

    def reset_counters(self) -> None:
        self.drafts = self.draft_tokens = self.accepted_tokens = 0

    def _outlook(self, seq: Sequence) -> tuple[float, int]:
        # The last token that may be generated needs no draft: it comes with the step anyway.
        room = seq.params.max_tokens - seq.output_len - 1
        # Masks of a grammar are made for one token of each sequence and step.
        if not seq.request.speculation or seq.matcher is not None or room < 1:
            return 0.0, 0
        chance, most = self.proposer.outlook(seq)
        return chance, min(most, self.depth, room)

    def _step_s(self, decodes: int) -> Callable[[int, int], float]:
        proposing = self.proposer.seconds(decodes)

        def seconds(tokens: int, depth: int) -> float:
            verifying = self.verifying.estimate(tokens) or self.plain.estimate(tokens) or 0.0
            return verifying + depth * proposing

        return seconds


def _within_thought(seq: Sequence, drafts: list[int]) -> list[int]:
    """Those that do not reach beyond a thought that may have to be closed, or that a grammar follows."""
    return drafts if seq.thought is None else seq.thought.allowed(drafts)
