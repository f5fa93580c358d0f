"""Guesses from the text itself: what followed the last time the text ended like this.

Costs no device time. Good where a text repeats its prompt or itself (code being edited, quotes from documents). The
longer the match the likelier the guess, so the record is kept by length of match, per sequence, starting from that of
all sequences. A guess that was not verified is scored as well, by its first token: finding out whether guesses have
become worth verifying needs no steps spent on it.
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

    __slots__ = ("acceptance", "finder", "guess", "kind", "made_at")

    def __init__(self, priors: list[Acceptance]) -> None:
        self.finder = MatchFinder()
        self.acceptance = [Acceptance(prior, decay=0.9) for prior in priors]
        self.guess: list[int] = []
        self.kind = 0
        self.made_at = -1
        """Length of the text that `guess` continues."""


class NgramProposer:
    """See `Proposer`."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._everyone = [Acceptance(prior, decay=0.995, weight=8.0) for prior in _PRIORS]
        self._states: dict[Sequence, _State] = {}

    def outlook(self, seq: Sequence) -> tuple[float, int]:
        state = self._states.get(seq)
        # With overlap the text may be one pending token ahead of the guess; the next guess will be much like it.
        if state is None or not state.guess or state.made_at != len(seq.tokens):
            return 0.0, 0
        return state.acceptance[state.kind].chance, len(state.guess)

    def seconds(self, sequences: int) -> float:
        return 0.0  # what it takes is part of every step, and hardly to be seen

    def propose(self, depths: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        return {seq: self._states[seq].guess[:depth] for seq, depth in depths.items()}

    def learn(self, seq: Sequence, drafts: tuple[int, ...], tokens: list[int]) -> None:
        state = self._states.get(seq)
        if state is None:
            state = self._states[seq] = _State(self._everyone)
        if state.guess and state.made_at == len(seq.tokens) - len(tokens):
            self._score(state, drafts, tokens)
        state.finder.extend(seq.tokens)
        match = state.finder.find(seq.tokens)
        state.made_at = len(seq.tokens)
        state.guess = [] if match is None else continuation(seq.tokens, match.end, self.depth)
        if match is not None:
            state.kind = sum(match.length > length for length in _LENGTHS)

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq, None)

    def _score(self, state: _State, drafts: tuple[int, ...], tokens: list[int]) -> None:
        if drafts:
            held = len(tokens) - 1
            made = min(held + 1, len(drafts))
        else:
            held, made = int(state.guess[0] == tokens[0]), 1
        state.acceptance[state.kind].observe(held, made)
        self._everyone[state.kind].observe(held, made)
