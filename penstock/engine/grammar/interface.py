"""What the engine asks of a grammar library, and the vocabulary such a library needs.

The engine treats a grammar as an opaque string. The process that hosts it supplies a `GrammarCompiler`, made from the
model's `Vocabulary`; without one, requests with a grammar are refused and everything else runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.errors import PenstockError

WORD = 32
"""Tokens per word of a mask: bit `t % 32` of word `t // 32` says whether token `t` is allowed."""


class GrammarError(PenstockError):
    """A grammar that cannot be used; the request that brought it fails."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the tokens of a model stand for."""

    tokens: Sequence[bytes]
    """Bytes of each id; empty for an id that stands for no token."""
    special: frozenset[int]
    """Control tokens: their bytes are names, not text."""
    ends: tuple[int, ...]
    """Ids that end a text."""
    encode: Callable[[str], list[int]]
    """The usual ids of a text, without control tokens."""


class TokenMatcher(Protocol):
    """One sequence's place in its grammar. It moves forward only, one accepted token at a time."""

    @property
    def complete(self) -> bool:
        """Whether nothing but the end may follow."""

    @property
    def error(self) -> str | None:
        """Why it cannot go on; None while it can."""

    def accept(self, token: int) -> None:
        """Take the token that was sampled."""


class GrammarCompiler(Protocol):
    """Makes matchers and computes masks. `compile` and `fill` may run in two threads at a time."""

    def compile(self, grammar: str) -> TokenMatcher:
        """A matcher at the beginning of `grammar`; raises `GrammarError`."""

    def copy(self, matcher: TokenMatcher) -> TokenMatcher:
        """Another matcher at the same place; cheap."""

    def fill(self, matchers: Sequence[TokenMatcher], masks: np.ndarray) -> None:
        """Write the tokens each matcher allows into its row of `masks` (int32 [matchers, words]).

        A matcher that cannot tell has its `error` set, and its row may hold anything.
        """


class PendingMasks:
    """The masks of one step, being computed."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[np.ndarray]) -> None:
        self._future = future

    def wait(self) -> np.ndarray:
        """int32 [sequences with a grammar that sample in this step, words], in batch order."""
        return self._future.result()


def words_for(vocab_size: int) -> int:
    """Words of a mask over `vocab_size` tokens."""
    return -(-vocab_size // WORD)
