"""`GrammarCompiler` on llguidance. Its parser runs outside the interpreter lock, on threads of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from penstock.engine.grammar.interface import GrammarError, TokenMatcher, Vocabulary

_MAX_THREADS = 4
"""Masks take tens of microseconds each; more threads would only take cores from the model."""
_SPECIAL = b"\xff"
"""First byte of a control token's name in the library: no text contains it."""


def limits() -> LLParserLimits:
    """Bounds on what one grammar may cost. The library's own: a mask takes about 15 ms at the very worst."""
    return LLParserLimits(verbose_errors=False)


class _Tokens:
    """A vocabulary in the shape the library reads it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        self.eos_token_id = vocabulary.ends[0]
        padding = [b""] * (size - len(vocabulary.tokens))
        self.tokens = [
            _SPECIAL + name if token in vocabulary.special else name for token, name in enumerate(vocabulary.tokens)
        ] + padding
        self.special_token_ids = sorted(vocabulary.special)
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class GuidanceMatcher:
    """See `TokenMatcher`."""

    __slots__ = ("_ends", "_stopped", "_why", "raw")

    def __init__(self, raw: LLMatcher, ends: frozenset[int]) -> None:
        self.raw = raw
        self._ends = ends
        self._stopped = False
        self._why: str | None = None

    @property
    def complete(self) -> bool:
        return self._stopped

    @property
    def error(self) -> str | None:
        return self._why

    def accept(self, token: int) -> None:
        if token in self._ends:
            self._stopped = True
            return
        self.raw.consume_token(token)
        self.look()
        self._stopped = self._why is None and self.raw.is_stopped()

    def look(self) -> None:
        """Note an error inside the library."""
        if self._why is None and self.raw.is_error():
            self.fail(self.raw.get_error().strip().partition("\n")[0])

    def fail(self, why: str) -> None:
        self._why = self._why or why or "unknown"


class GuidanceCompiler:
    """See `GrammarCompiler`. `size`: how many logits the model has; ids beyond the vocabulary are never allowed."""

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        if not vocabulary.ends:
            raise GrammarError("this model has no end-of-text token, which grammars need")
        wrapper = cast(TokenizerWrapper, _Tokens(vocabulary, size))
        self._tokenizer = LLTokenizer(wrapper, n_vocab=size, eos_token=list(vocabulary.ends))
        self._ends = frozenset(vocabulary.ends)
        self._limits = limits()
        self._executor = LLExecutor(num_threads=min(_MAX_THREADS, os.cpu_count() or 1))

    def compile(self, grammar: str) -> GuidanceMatcher:
        raw = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if raw.is_error():
            raise GrammarError(raw.get_error().strip())
        return GuidanceMatcher(raw, self._ends)

    def copy(self, matcher: TokenMatcher) -> GuidanceMatcher:
        assert isinstance(matcher, GuidanceMatcher)
        return GuidanceMatcher(matcher.raw.deep_copy(), self._ends)

    def fill(self, matchers: Sequence[TokenMatcher], masks: np.ndarray) -> None:
        mine = [cast(GuidanceMatcher, matcher) for matcher in matchers]
        if len(mine) == 1:
            mine[0].raw.unsafe_compute_mask_ptr(masks.ctypes.data, masks.shape[1] * masks.itemsize)
        else:
            rows = [(matcher.raw, index) for index, matcher in enumerate(mine)]
            self._executor.unsafe_compute_mask_ptr(
                rows, masks.ctypes.data, masks.shape[1] * masks.itemsize, masks.shape[0]
            )
        for matcher, mask in zip(mine, masks, strict=True):
            matcher.look()
            if not mask.any():
                matcher.fail("no token of the vocabulary can follow")
