"""`GrammarCompiler` on llguidance. Its parser runs outside the interpreter lock, on threads of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from penstock.engine.grammar.interface import GrammarError, GrammarTooComplex, Interruptible, TokenMatcher, Vocabulary
from penstock.engine.grammar.unique_keys import TokenIndex, UniqueKeys, split_header
from penstock.machine import usable_cores

_MAX_THREADS = 4
"""Masks take tens of microseconds each; more threads would only take cores from the model."""
_TOO_COMPLEX = ("precomputation failed", "fuel", "too big", "too large", "too many", "Too many")
_MESSAGE = 500
_SPECIAL = b"\xff"
"""First byte of a control token's name in the library: no text contains it."""


_STEP_FUEL = 100_000
"""Work that one mask may cost in the lexer, in units of the library; usual grammars need a tenth of it."""
_LEXER_STATES = 50_000
"""Each takes 1 to 2 kB, and all sequences with a grammar share them."""


def limits() -> LLParserLimits:
    """Bounds on what one grammar may cost. They count expressions, not time or bytes: what an expression costs depends
    on its size, which is why grammars are tried in a sandbox as well."""
    return LLParserLimits(step_lexer_fuel=_STEP_FUEL, max_lexer_states=_LEXER_STATES, verbose_errors=False)


def validate(grammar: str) -> None:
    """Raises `GrammarError` if no vocabulary could make `grammar` work."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(split_header(grammar)[1], limits=limits())
    if failed:
        raise _error(messages[0])


def _error(message: str) -> GrammarError:
    """The library's message as an error; it may quote the whole grammar."""
    message = message.strip()
    message = message if len(message) <= _MESSAGE else f"{message[:_MESSAGE]}..."
    if message.startswith("panic"):
        return GrammarError(f"the compiler failed on it ({message})")
    if any(sign in message for sign in _TOO_COMPLEX):
        return GrammarTooComplex(f"it is too complex ({message})")
    return GrammarError(message)


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

    __slots__ = ("_ends", "_stopped", "_why", "keys", "memory", "raw")

    def __init__(self, raw: LLMatcher, ends: frozenset[int], keys: UniqueKeys | None = None, memory: int = 0) -> None:
        self.raw = raw
        self.keys = keys
        self.memory = memory
        self._ends = ends
        self._stopped = False
        self._why: str | None = None

    @property
    def complete(self) -> bool:
        return self._stopped

    @property
    def error(self) -> str | None:
        return self._why

    @property
    def too_complex(self) -> bool:
        """Whether its error is that it reached a limit."""
        return self.raw.stop_reason() in ("ParserTooComplex", "LexerTooComplex")

    def accept(self, token: int) -> None:
        if token in self._ends:
            self._stopped = True
            return
        self.raw.consume_token(token)
        self.look()
        if self.keys is not None:
            self.keys.accept(token)
            if self.keys.repeated:
                self.fail("the model repeated a key")
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
        self._executor: LLExecutor | None = None
        self.size = size
        self._vocabulary = vocabulary
        self._index: TokenIndex | None = None

    def compile(self, grammar: str, interruptible: Interruptible | None = None) -> GuidanceMatcher:
        json_start, grammar = split_header(grammar)
        raw = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if raw.is_error():
            raise _error(raw.get_error())
        if json_start is None:
            return GuidanceMatcher(raw, self._ends)
        if self._index is None:
            self._index = TokenIndex(self._vocabulary.tokens, self._vocabulary.special)
        return GuidanceMatcher(raw, self._ends, UniqueKeys(self._index, json_start))

    def copy(self, matcher: TokenMatcher) -> GuidanceMatcher:
        assert isinstance(matcher, GuidanceMatcher)
        keys = None if matcher.keys is None else matcher.keys.copy()
        return GuidanceMatcher(matcher.raw.deep_copy(), self._ends, keys, matcher.memory)

    def fill(self, matchers: Sequence[TokenMatcher], masks: np.ndarray) -> None:
        mine = [cast(GuidanceMatcher, matcher) for matcher in matchers]
        if len(mine) == 1:
            mine[0].raw.unsafe_compute_mask_ptr(masks.ctypes.data, masks.shape[1] * masks.itemsize)
        else:
            if self._executor is None:  # its threads start with it
                self._executor = LLExecutor(num_threads=min(_MAX_THREADS, usable_cores()))
            rows = [(matcher.raw, index) for index, matcher in enumerate(mine)]
            self._executor.unsafe_compute_mask_ptr(
                rows, masks.ctypes.data, masks.shape[1] * masks.itemsize, masks.shape[0]
            )
        for matcher, mask in zip(mine, masks, strict=True):
            matcher.look()
            if matcher.keys is not None:
                matcher.keys.restrict(mask)
            if not mask.any():
                matcher.fail("no token of the vocabulary can follow")

    def close(self) -> None:
        return
