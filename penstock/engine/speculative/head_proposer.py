"""Draft tokens from a head that reads the model's hidden states (`head_decoder`).

It is a draft model in all but two things. Its first entry is that of the second token. And what it computed for a draft
token rests on its own guess of the hidden states: once the token is accepted, the model's own are there, and the entry
is computed again with those.

A block of its cache ends with an entry that depends on the first token behind the block. Sequences that share the block
and go on differently overwrite it, each when it starts: drafts may be a little worse then, never wrong.
"""

from __future__ import annotations

from penstock.engine.runner.runner import Runner
from penstock.engine.scheduler import Scheduler
from penstock.engine.sequence import Sequence
from penstock.engine.speculative.draft import DraftProposer


class HeadProposer(DraftProposer):
    """See `Proposer`."""

    first = 1

    def __init__(self, runner: Runner, scheduler: Scheduler, *, window: int, budget: int) -> None:
        super().__init__(runner, scheduler, window=window, budget=budget)
        # Steps that draw are known by that: every token of theirs stands alone.
        self.single_tokens = True

    def outlook(self, seq: Sequence) -> tuple[float, int]:
        return (0.0, 0) if seq.length <= self.first else super().outlook(seq)

    def learn(self, seq: Sequence, drafts: tuple[int, ...], tokens: list[int]) -> None:
        super().learn(seq, drafts, tokens)
        state = self._states.get(seq)
        if state is not None and drafts:
            state.read = min(state.read, len(seq.tokens) - len(tokens))
