"""Token rules of a request: the only tokens it may use, and sequences of tokens that it must not write.

They take the place of a request's matcher and hold that of its grammar, if it has one: so masks, draft tokens,
preemption and failover treat them as they treat a grammar. A forbidden sequence counts in the output alone; its last
token is masked when the output ends with all the others.
"""

from __future__ import annotations

import numpy as np

from penstock.engine.grammar.interface import WORD, TokenMatcher, words_for
from penstock.engine.request import SamplingParams


class TokenRules:
    """See `TokenMatcher`."""

    __slots__ = ("_allowed", "_banned", "_error", "_longest", "_recent", "_sequences", "grammar", "memory")

    def __init__(self, params: SamplingParams, vocab_size: int, grammar: TokenMatcher | None = None) -> None:
        """`grammar`: the matcher of the request's grammar."""
        self.grammar = grammar
        self.memory = 0 if grammar is None else grammar.memory
        self._error: str | None = None
        self._allowed = None if not params.allowed_token_ids else _bits(params.allowed_token_ids, vocab_size)
        single = [word[0] for word in params.bad_words if len(word) == 1]
        self._banned = ~_bits(single, vocab_size) if single else None
        """All tokens but those that are forbidden wherever they come."""
        self._sequences = [(word[:-1], word[-1]) for word in params.bad_words if len(word) > 1]
        self._longest = max((len(before) for before, _ in self._sequences), default=0)
        self._recent: tuple[int, ...] = ()

    @property
    def complete(self) -> bool:
        return self.grammar is not None and self.grammar.complete

    @property
    def error(self) -> str | None:
        return self._error if self.grammar is None else self._error or self.grammar.error

    def accept(self, token: int) -> None:
        if self.grammar is not None:
            self.grammar.accept(token)
        if self._longest:
            self._recent = (*self._recent, token)[-self._longest :]

    def follow(self, grammar: TokenMatcher | None) -> None:
        """From here on the grammar holds too."""
        self.grammar = grammar
        self.memory = 0 if grammar is None else grammar.memory

    def fail(self, why: str) -> None:
        self._error = self._error or why

    def restrict(self, mask: np.ndarray) -> None:
        """Take what the rules forbid out of a mask, int32 [words]; an error when nothing is left."""
        if self._allowed is not None:
            mask &= self._allowed
        if self._banned is not None:
            mask &= self._banned
        for before, token in self._sequences:
            if self._recent[-len(before) :] == before:
                mask.view(np.uint32)[token // WORD] &= ~(np.uint32(1) << np.uint32(token % WORD))
        if not mask.any():
            self.fail("`allowed_token_ids`, `bad_words` and the grammar leave no token that may follow")


def _bits(tokens: tuple[int, ...] | list[int], vocab_size: int) -> np.ndarray:
    """A mask with these tokens."""
    mask = np.zeros(words_for(vocab_size), np.uint32)
    at = np.array(tokens, np.int64)
    np.bitwise_or.at(mask, at // WORD, np.uint32(1) << (at % WORD).astype(np.uint32))
    return mask.view(np.int32)
