"""Draft tokens from the text itself (prompt lookup): what followed the last time the text ended like this.

Costs no device time. Good where a text repeats its prompt or itself (code being edited, quotes from documents). The
longer the match, the likelier its continuation is accepted, so acceptance is recorded by length of match, per sequence,
starting from that of all sequences. Draft tokens that were not verified are scored as well, by the first of them: no
steps are spent on finding out whether they have become worth verifying.
"""

from __future__ import annotations

from penstock.engine.sequence import Sequence
from penstock.engine.speculative.gain import Acceptance
from penstock.engine.speculative.match_finder import MatchFinder, continuation

_LENGTHS = (3, 7)
"""Matches up to 3, up to 7, and longer ones are recorded apart."""
_PRIORS = (0.4, 0.6, 0.8)


class _State:
    """What is known of one sequence."""

    __slots__ = ("acceptance", "draft", "finder", "kind", "made_at")

    def __init__(self, priors: list[Acceptance]) -> None:
        self.finder = MatchFinder()
        self.acceptance = [Acceptance(prior, decay=0.9) for prior in priors]
        self.draft: list[int] = []
        self.kind = 0
        self.made_at = -1
        """Length of the text that `draft` continues."""


class NgramProposer:
    """See `Proposer`."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._overall = [Acceptance(prior, decay=0.995, weight=8.0) for prior in _PRIORS]
        self._states: dict[Sequence, _State] = {}

    def outlook(self, seq: Sequence) -> tuple[float, int]:
        state = self._states.get(seq)
        # With overlap the text may be one pending token ahead of the draft; the next draft will be much like it.
        if state is None or not state.draft or state.made_at != len(seq.tokens):
            return 0.0, 0
        return state.acceptance[state.kind].chance, len(state.draft)

    def seconds(self, sequences: int) -> float:
        return 0.0  # its cost is part of every step, and negligible

    def propose(self, depths: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        return {seq: self._states[seq].draft[:depth] for seq, depth in depths.items()}

    def learn(self, seq: Sequence, drafts: tuple[int, ...], tokens: list[int]) -> None:
        state = self._states.get(seq)
        if state is None:
            state = self._states[seq] = _State(self._overall)
        if state.draft and state.made_at == len(seq.tokens) - len(tokens):
            self._score(state, drafts, tokens)
        state.finder.extend(seq.tokens)
        match = state.finder.find(seq.tokens)
        state.made_at = len(seq.tokens)
        state.draft = [] if match is None else continuation(seq.tokens, match.end, self.depth)
        if match is not None:
            state.kind = sum(match.length > length for length in _LENGTHS)

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq, None)

    def forget_caches(self) -> None:
        """It looks at tokens only."""

    def _score(self, state: _State, drafts: tuple[int, ...], tokens: list[int]) -> None:
        if drafts:
            accepted = len(tokens) - 1
            tried = min(accepted + 1, len(drafts))
        else:
            accepted, tried = int(state.draft[0] == tokens[0]), 1
        state.acceptance[state.kind].observe(accepted, tried)
        self._overall[state.kind].observe(accepted, tried)
