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


class GrammarTooComplex(GrammarError):
    """A grammar that costs more than it may."""


class Interrupted(PenstockError):
    """A compilation was ended because nobody waits for it."""


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


class GreedyEncoder:
    """Encodes a text by repeatedly taking the longest token that matches."""

    def __init__(self, tokens: Sequence[bytes], special: frozenset[int]) -> None:
        self._ids = {name: token for token, name in enumerate(tokens) if name and token not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        wanted = text.encode()
        ids: list[int] = []
        at = 0
        while at < len(wanted):
            for length in range(min(self._longest, len(wanted) - at), 0, -1):
                token = self._ids.get(wanted[at : at + length])
                if token is not None:
                    ids.append(token)
                    at += length
                    break
            else:
                return ids  # no token has the next byte: return the longest encodable prefix
        return ids


Interruptible = Callable[[Callable[[], None] | None], None]


class TokenMatcher(Protocol):
    """One sequence's place in its grammar. It moves forward only, one accepted token at a time."""

    memory: int
    """Bytes that its grammar holds, as far as known; copies share them."""

    @property
    def complete(self) -> bool:
        """Whether nothing but the end may follow."""

    @property
    def error(self) -> str | None:
        """Why it cannot go on; None while it can."""

    def accept(self, token: int) -> None:
        """Take the token that was sampled."""

    def fail(self, why: str) -> None:
        """Set `error`, unless it is set."""


class GrammarCompiler(Protocol):
    """Makes matchers and computes masks. `compile` and `fill` may run in several threads at a time."""

    def compile(self, grammar: str, interruptible: Interruptible | None = None) -> TokenMatcher:
        """A matcher at the beginning of `grammar`; raises `GrammarError`. `interruptible` is told how to end it early,
        in which case it raises `Interrupted`; and with None, when it no longer can be."""

    def copy(self, matcher: TokenMatcher) -> TokenMatcher:
        """Another matcher at the same place; cheap."""

    def fill(self, matchers: Sequence[TokenMatcher], masks: np.ndarray) -> None:
        """Write the tokens each matcher allows into its row of `masks` (int32 [matchers, words]).

        A matcher that cannot tell has its `error` set, and its row may hold anything.
        """

    def close(self) -> None:
        """End its processes, if it has any. Matchers remain usable."""


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
