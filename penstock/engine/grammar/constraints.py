"""Grammars of the requests inside an engine: opened off the engine's thread, masks computed while the device runs.

Threads start with the first grammar: those of a queue compile, so that a large grammar delays no other request's
tokens; one computes the masks of a step between its launch and its sampling. A matcher is only touched by the engine's
thread, except between `begin` and `wait`, when it belongs to the mask thread. It has taken exactly the tokens that were
delivered, so preemption and repeated steps need no rolling back.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from penstock.engine.batch import Batch
from penstock.engine.grammar.compile_queue import CompileQueue, Job, QueueFull
from penstock.engine.grammar.interface import GrammarCompiler, GrammarError, PendingMasks, TokenMatcher, words_for
from penstock.engine.grammar.thought import ThoughtState
from penstock.engine.grammar.token_rules import TokenRules
from penstock.engine.request import GRAMMAR_REFUSED, QUEUE_FULL, Request
from penstock.engine.sequence import Sequence

_KEPT = 128
"""Compiled grammars kept for requests to come."""
_KEPT_BYTES = 512 << 20
SLOW_STEP_S = 0.05
"""When the masks of a step take longer, those of the next are timed one by one."""
SLOW_MASK_S = 0.02
"""A mask that takes longer is slow; a request may have `SLOW_MASKS` of them."""
SLOW_MASKS = 4

_Key = tuple[str, str]
"""An owner and its grammar. Owners share nothing: how long a grammar takes would say whether another has used it."""

MakeCompiler = Callable[[int], GrammarCompiler]
"""From the number of logits to a compiler for the model's vocabulary."""


@dataclass(slots=True)
class _Opening:
    """A grammar being compiled, and the requests that wait for it."""

    job: Job[TokenMatcher]
    requests: dict[str, tuple[Request, float]] = field(default_factory=dict)


class Constraints:
    """Owns the compiler and its threads. `make` builds the compiler when the first grammar arrives."""

    def __init__(self, make: MakeCompiler | None, vocab_size: int) -> None:
        self._make = make
        self._vocab_size = vocab_size
        self._words = words_for(vocab_size)
        self._compiler: GrammarCompiler | None = None
        self._making = threading.Lock()
        self._kept: OrderedDict[_Key, TokenMatcher] = OrderedDict()
        self._kept_bytes = 0
        self._opening: dict[_Key, _Opening] = {}
        self._keys: dict[str, _Key] = {}
        """The grammar that a request waits for, by its id."""
        self._compiling = CompileQueue("grammar")
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._suspicious = False
        """Whether the masks of the last step took too long."""

    @property
    def opening(self) -> int:
        """Requests whose grammar is being compiled."""
        return len(self._keys)

    def is_opening(self, request_id: str) -> bool:
        return request_id in self._keys

    def open(self, request: Request, now: float) -> TokenMatcher | str | None:
        """The matcher of a request if its grammar is known, or why it is refused; otherwise `opened` will have it."""
        grammar = request.params.grammar
        key = (request.owner, grammar)
        fresh = self._kept.get(key)
        if fresh is not None and self._compiler is not None:
            self._kept.move_to_end(key)
            return self._compiler.copy(fresh)
        opening = self._opening.get(key)
        if opening is None:
            try:
                opening = _Opening(self._compiling.submit(request.owner, lambda job: self._compile(grammar, job)))
            except QueueFull as error:
                return f"{QUEUE_FULL}: {error}"
            self._opening[key] = opening
        opening.requests[request.request_id] = (request, now)
        self._keys[request.request_id] = key
        return None

    def opened(self) -> Iterator[tuple[Request, float, TokenMatcher | str]]:
        """Requests that are ready since the last call: when they came, and their matcher or what is wrong."""
        ready = [key for key, opening in self._opening.items() if opening.job.future.done()]
        for key in ready:
            opening = self._opening.pop(key)
            error = opening.job.future.exception()
            if error is None:
                self._keep(key, opening.job.future.result())
            for request, arrived in opening.requests.values():
                del self._keys[request.request_id]
                if error is None:
                    assert self._compiler is not None
                    yield request, arrived, self._compiler.copy(opening.job.future.result())
                elif isinstance(error, GrammarError):
                    yield request, arrived, f"{GRAMMAR_REFUSED}: {error}"
                else:
                    yield request, arrived, f"the grammar could not be compiled ({type(error).__name__}: {error})"

    def expired(self, now: float) -> list[Request]:
        """Forget the requests whose time is over before their grammar was compiled."""
        waiting = [entry for opening in self._opening.values() for entry in opening.requests.values()]
        late = [
            request
            for request, arrived in waiting
            if request.timeout_s is not None and now - arrived >= request.timeout_s
        ]
        for request in late:
            self.cancel(request.request_id)
        return late

    def cancel(self, request_id: str) -> bool:
        """Forget a request that is still opening; whether there was one. A grammar that nobody else waits for is not
        compiled to its end."""
        key = self._keys.pop(request_id, None)
        if key is None:
            return False
        opening = self._opening[key]
        del opening.requests[request_id]
        if not opening.requests:
            del self._opening[key]
            opening.job.cancel()
        return True

    def close(self) -> None:
        """End the compiler's processes and the threads."""
        self._compiling.close()
        for opening in self._opening.values():
            opening.job.cancel()
        self._masking.shutdown(wait=False)
        with self._making:
            if self._compiler is not None:
                self._compiler.close()

    def begin(self, batch: Batch) -> PendingMasks | None:
        """Start computing the masks of the rows that need one; None when none does."""
        constrained = [c.seq for c in batch.chunks if c.samples and c.seq.matcher is not None]
        if not constrained:
            return None
        barred = [seq.barred_stops() for seq in constrained]
        return PendingMasks(self._masking.submit(self._masks, constrained, barred))

    def _compile(self, grammar: str, job: Job[TokenMatcher]) -> TokenMatcher:
        if self._make is None:
            raise GrammarError("this engine runs without grammar support")
        with self._making:
            if self._compiler is None:
                self._compiler = self._make(self._vocab_size)
        return self._compiler.compile(grammar, job.interruptible)

    def _keep(self, key: _Key, fresh: TokenMatcher) -> None:
        self._kept[key] = fresh
        self._kept_bytes += fresh.memory
        while len(self._kept) > _KEPT or (self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1):
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= dropped.memory

    def _masks(self, sequences: list[Sequence], barred: list[tuple[int, ...]]) -> np.ndarray:
        matchers = [seq.matcher for seq in sequences if seq.matcher is not None]
        ruled = [matcher for matcher in matchers if isinstance(matcher, TokenRules | ThoughtState)]
        masks = self._grammar_masks(sequences) if not ruled else self._ruled_masks(sequences)
        for row, (matcher, stops) in enumerate(zip(matchers, barred, strict=True)):
            if matcher.error is not None:
                masks[row] = -1  # it is about to fail; until then any token will do
            elif stops:
                masks[row] = without(masks[row], stops)
        return masks

    def _ruled_masks(self, sequences: list[Sequence]) -> np.ndarray:
        """Where some sequences have token rules, with a grammar or without."""
        masks = np.full((len(sequences), self._words), -1, np.int32)
        with_grammar = [row for row, seq in enumerate(sequences) if _grammar_of(seq) is not None]
        if with_grammar:
            masks[with_grammar] = self._grammar_masks([sequences[row] for row in with_grammar])
        for row, seq in enumerate(sequences):
            if isinstance(seq.matcher, TokenRules | ThoughtState):
                seq.matcher.restrict(masks[row])
        return masks

    def _grammar_masks(self, sequences: list[Sequence]) -> np.ndarray:
        """Of sequences that all have a grammar."""
        assert self._compiler is not None
        masks = np.zeros((len(sequences), self._words), np.int32)
        begun = time.perf_counter()
        if self._suspicious:
            self._fill_singly(self._compiler, sequences, masks)
        else:
            self._compiler.fill([matcher for seq in sequences if (matcher := _grammar_of(seq)) is not None], masks)
        self._suspicious = time.perf_counter() - begun > SLOW_STEP_S
        return masks

    def _fill_singly(self, compiler: GrammarCompiler, sequences: list[Sequence], masks: np.ndarray) -> None:
        """As `fill`, and a request whose masks are slow again and again fails: others in its steps wait for them."""
        for row, seq in enumerate(sequences):
            matcher = _grammar_of(seq)
            assert matcher is not None
            begun = time.thread_time()
            compiler.fill([matcher], masks[row : row + 1])
            took = time.thread_time() - begun
            if took > SLOW_MASK_S:
                seq.slow_masks += 1
                if seq.slow_masks > SLOW_MASKS:
                    matcher.fail(f"it takes {took * 1e3:.0f} ms to find the tokens that may come next")


def _grammar_of(seq: Sequence) -> TokenMatcher | None:
    """The matcher of a sequence's grammar."""
    return seq.matcher.grammar if isinstance(seq.matcher, TokenRules | ThoughtState) else seq.matcher


def without(mask: np.ndarray, tokens: tuple[int, ...]) -> np.ndarray:
    """`mask` less `tokens`, unless that leaves nothing: a grammar's end comes before a minimum length."""
    at = np.array(tokens, np.int64)
    fewer = mask.copy()
    np.bitwise_and.at(fewer.view(np.uint32), at // 32, ~(np.uint32(1) << (at % 32).astype(np.uint32)))
    return fewer if fewer.any() else mask
