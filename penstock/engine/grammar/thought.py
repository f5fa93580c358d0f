"""A sequence's place in the thought before its answer: closes it when its budget is used up, and lets the grammar of
the answer begin behind it.

While it thinks, a sequence is free: no masks, draft tokens as usual. Three things need the engine's attention, and take
the place of its matcher for as long as they last: how the answer begins, where a grammar waits and a thought may come
first; tokens that are forced one by one; and what follows the thought, its token rules and its grammar. All of it
depends on the tokens delivered alone, so preemption, repeated steps and failover (`Request.produced`) need nothing
more. Invariant: no token of the answer is sampled before the grammar has begun. So a sequence whose grammar waits, or
whose budget ends, is not run ahead of its known tokens (`hold`), and no draft reaches beyond the thought (`allowed`).
"""

from __future__ import annotations

import sys
from typing import Literal

import numpy as np

from penstock.engine.grammar.interface import WORD, TokenMatcher
from penstock.engine.grammar.token_rules import TokenRules
from penstock.engine.request import Thought

NEVER = sys.maxsize
Place = Literal["opening", "before", "thinking", "closing", "after", "over"]
"""`opening`, `closing`, `after`: tokens are forced, see `Thought`. `before`: a thought may begin."""


class ThoughtState:
    """See above. It is a `TokenMatcher` for as long as it is the `matcher` of its sequence."""

    __slots__ = (
        *(
            "_error",
            "_follows",
            "_forced",
            "_grammar",
            "_last",
            "_longest",
            "_place",
            "_recent",
            "_rules",
            "_spent",
            "_thought",
        ),
        "memory",
    )

    def __init__(self, thought: Thought, rules: TokenRules | None, grammar: TokenMatcher | None) -> None:
        """`rules` hold throughout, `grammar` behind the thought; it is part of `rules` only if it begins with it
        (`Thought.within`)."""
        self._thought = thought
        self._follows = (grammar if rules is None else rules) if thought.within else None
        self._rules = rules
        self._grammar = grammar
        self.memory = 0 if grammar is None else grammar.memory
        self._error: str | None = None
        self._longest = max(map(len, thought.end), default=0)
        self._last: dict[int, list[tuple[int, ...]]] = {}
        """The ends by their last token."""
        for end in thought.end:
            self._last.setdefault(end[-1], []).append(end)
        self._recent: tuple[int, ...] = ()
        """Before the thought, all tokens; in it, the last ones."""
        self._spent = 0
        """Tokens of the thought so far."""
        self._forced = thought.opening
        self._place: Place = "opening" if thought.opening else "before"
        if not thought.opening and not thought.begin:
            self._think()

    @property
    def over(self) -> bool:
        """Whether the thought needs no attention any more."""
        return self._place == "over"

    @property
    def awaited(self) -> bool:
        """Whether a grammar waits for its end."""
        return self._waits and self._place != "over"

    @property
    def _waits(self) -> bool:
        return self._grammar is not None and not self._thought.within

    @property
    def matcher(self) -> TokenMatcher | None:
        """What the sequence has to follow now."""
        if self._forced or (self._place == "before" and self._waits):
            return self
        if self._follows is not None:
            return self._follows
        if self._place != "over":
            return self._rules
        if self._rules is not None:
            self._rules.follow(self._grammar)
            return self._rules
        return self._grammar

    def hold(self, length: int) -> int:
        """The length from which on all tokens must be known, given that of the known ones."""
        if self._place == "over":
            return NEVER
        if self._grammar is not None or self._place != "thinking":
            return 0
        return NEVER if self._left is None else length + self._left

    def allowed(self, drafts: list[int]) -> list[int]:
        """As many of the draft tokens as a step may verify: behind the last of them one more is sampled."""
        if self._place != "thinking":
            return []
        if self._left is not None:
            drafts = drafts[: max(self._left - 1, 0)]
        if self._grammar is None:
            return drafts
        recent = self._recent
        for count, token in enumerate(drafts):
            recent = (*recent, token)[-self._longest :]
            if self._ends(recent):
                return drafts[:count]
        return drafts

    @property
    def _left(self) -> int | None:
        """Tokens that are left of the budget."""
        return None if self._thought.budget is None else self._thought.budget - self._spent

    def _ends(self, recent: tuple[int, ...]) -> bool:
        return any(recent[-len(end) :] == end for end in self._last.get(recent[-1], ()))

    # --- as a matcher

    @property
    def complete(self) -> bool:
        return False

    @property
    def error(self) -> str | None:
        return self._error if self._grammar is None else self._error or self._grammar.error

    @property
    def grammar(self) -> TokenMatcher | None:
        """The grammar whose mask is wanted: an answer may begin without a thought."""
        return None if self._forced or self._recent else self._grammar

    def fail(self, why: str) -> None:
        self._error = self._error or why

    def accept(self, token: int) -> None:
        """Take a token that was sampled, whichever matcher it followed."""
        if self._follows is not None:
            self._follows.accept(token)
        elif self._rules is not None:
            self._rules.accept(token)
        if self._forced:
            self._forced = self._forced[1:]
            if not self._forced:
                self._forced_all()
        elif self._place == "before":
            self._begin(token)
        elif self._place == "thinking":
            self._recent = (*self._recent, token)[-self._longest :]
            self._spent += 1
            if self._ends(self._recent):
                self._leave()
            else:
                self._spend()

    def restrict(self, mask: np.ndarray) -> None:
        """Take what must not follow out of a mask, int32 [words]."""
        if self._forced:
            mask[:] = 0
            _allow(mask, self._forced[0])
            return
        if self._recent:  # inside the beginning of a thought
            mask[:] = 0
        elif self._rules is not None:
            self._rules.restrict(mask)
        known = len(self._recent)
        for begin in self._thought.begin:
            if begin[:known] == self._recent:
                _allow(mask, begin[known])

    # --- from place to place

    def _begin(self, token: int) -> None:
        self._recent = (*self._recent, token)
        if self._recent in self._thought.begin:
            self._think()
        elif not any(begin[: len(self._recent)] == self._recent for begin in self._thought.begin):
            self._place = "over"
            if self._grammar is not None and self._waits:
                for said in self._recent:
                    self._grammar.accept(said)

    def _think(self) -> None:
        self._place, self._recent = "thinking", ()
        self._spend()

    def _spend(self) -> None:
        """Close the thought if nothing is left of its budget."""
        if self._left is not None and self._left <= 0:
            self._place, self._forced = "closing", self._thought.close
            if not self._forced:
                self._leave()

    def _leave(self) -> None:
        self._place, self._forced = "after", self._thought.after
        if not self._forced:
            self._place = "over"

    def _forced_all(self) -> None:
        if self._place == "opening":
            self._think()
        elif self._place == "closing":
            self._leave()
        else:
            self._place = "over"


def _allow(mask: np.ndarray, token: int) -> None:
    mask.view(np.uint32)[token // WORD] |= np.uint32(1) << np.uint32(token % WORD)
