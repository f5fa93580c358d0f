"""Grammars of the requests inside an engine: opened off the engine's thread, masks computed while the device runs.

Two threads, started with the first grammar: one compiles, so that a large grammar delays no other request's
tokens; one computes the masks of a step between its launch and its sampling. A matcher is only touched by the engine's
thread, except between `begin` and `wait`, when it belongs to the mask thread. It has taken exactly the tokens that were
delivered, so preemption and repeated steps need no rolling back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from penstock.engine.grammar.interface import GrammarCompiler, GrammarError, PendingMasks, TokenMatcher, words_for
from penstock.engine.request import GRAMMAR_REFUSED, Request
from penstock.engine.scheduler import Batch
from penstock.engine.sequence import Sequence

_KEPT = 128
"""Compiled grammars kept for requests to come."""

MakeCompiler = Callable[[int], GrammarCompiler]
"""From the number of logits to a compiler for the model's vocabulary."""


class Constraints:
    """Owns the compiler and its threads. `make` builds the compiler when the first grammar arrives."""

    def __init__(self, make: MakeCompiler | None, vocab_size: int) -> None:
        self._make = make
        self._vocab_size = vocab_size
        self._words = words_for(vocab_size)
        self._compiler: GrammarCompiler | None = None
        self._kept: OrderedDict[str, TokenMatcher] = OrderedDict()
        self._opening: dict[str, tuple[Request, float, Future[TokenMatcher]]] = {}
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="masks")

    @property
    def opening(self) -> int:
        """Requests whose grammar is being compiled."""
        return len(self._opening)

    def is_opening(self, request_id: str) -> bool:
        return request_id in self._opening

    def open(self, request: Request, now: float) -> TokenMatcher | None:
        """The matcher of a request, when its grammar is known; otherwise `opened` will have it."""
        fresh = self._kept.get(request.params.grammar)
        if fresh is not None and self._compiler is not None:
            self._kept.move_to_end(request.params.grammar)
            return self._compiler.copy(fresh)
        future = self._compiling.submit(self._compile, request.params.grammar)
        self._opening[request.request_id] = (request, now, future)
        return None

    def opened(self) -> Iterator[tuple[Request, float, TokenMatcher | str]]:
        """Requests that are ready since the last call: when they came, and their matcher or what is wrong."""
        ready = [entry for entry in self._opening.values() if entry[2].done()]
        for request, arrived, future in ready:
            del self._opening[request.request_id]
            error = future.exception()
            if error is None:
                yield request, arrived, self._keep(request.params.grammar, future.result())
            elif isinstance(error, GrammarError):
                yield request, arrived, f"{GRAMMAR_REFUSED}: {error}"
            else:
                yield request, arrived, f"the grammar could not be compiled ({type(error).__name__}: {error})"

    def cancel(self, request_id: str) -> bool:
        """Forget a request that is still opening; whether there was one."""
        entry = self._opening.pop(request_id, None)
        if entry is not None:
            entry[2].cancel()
        return entry is not None

    def begin(self, batch: Batch) -> PendingMasks | None:
        """Start computing the masks of the rows that need one; None when none does."""
        constrained = [c.seq for c in batch.chunks if c.samples and c.seq.matcher is not None]
        if not constrained:
            return None
        barred = [seq.barred_stops() for seq in constrained]
        return PendingMasks(self._masking.submit(self._masks, constrained, barred))

    def _compile(self, grammar: str) -> TokenMatcher:
        if self._make is None:
            raise GrammarError("this engine runs without grammar support")
        if self._compiler is None:
            self._compiler = self._make(self._vocab_size)
        return self._compiler.compile(grammar)

    def _keep(self, grammar: str, fresh: TokenMatcher) -> TokenMatcher:
        assert self._compiler is not None
        self._kept[grammar] = fresh
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return self._compiler.copy(fresh)

    def _masks(self, sequences: list[Sequence], barred: list[tuple[int, ...]]) -> np.ndarray:
        assert self._compiler is not None
        matchers = [seq.matcher for seq in sequences if seq.matcher is not None]
        masks = np.zeros((len(matchers), self._words), np.int32)
        self._compiler.fill(matchers, masks)
        for row, (matcher, stops) in enumerate(zip(matchers, barred, strict=True)):
            if matcher.error is not None:
                masks[row] = -1  # it is about to fail; until then any token will do
            elif stops:
                masks[row] = without(masks[row], stops)
        return masks


def without(mask: np.ndarray, tokens: tuple[int, ...]) -> np.ndarray:
    """`mask` less `tokens`, unless that leaves nothing: a grammar's end comes before a minimum length."""
    at = np.array(tokens, np.int64)
    fewer = mask.copy()
    np.bitwise_and.at(fewer.view(np.uint32), at // 32, ~(np.uint32(1) << (at % 32).astype(np.uint32)))
    return fewer if fewer.any() else mask
