"""What stands between a request's arrival and the queue: requests that can never run are refused, and those with a
grammar wait until it is compiled.

Invariant: a request is in the scheduler's queue, opening its grammar, or was answered with a delta that ends it.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.engine.adapters.spec import NO_ADAPTERS
from penstock.engine.grammar import progress
from penstock.engine.grammar.constraints import Constraints
from penstock.engine.grammar.interface import TokenMatcher
from penstock.engine.request import QUEUE_FULL, TOKENS_UNKNOWN, Delta, Request
from penstock.engine.scheduler import Scheduler


class Admission:
    """Fills a scheduler's queue."""

    def __init__(self, scheduler: Scheduler, constraints: Constraints, *, vocab_size: int, max_waiting: int) -> None:
        self._scheduler = scheduler
        self._constraints = constraints
        self._vocab_size = vocab_size
        self._max_waiting = max_waiting
        self.prompt_tokens = 0
        """Of the requests that were not refused."""

    def submit(self, request: Request, now: float) -> Delta | None:
        """Queue a request, or begin to open its grammar; the delta that refuses one that can never run."""
        problem = self._problem(request, now)
        if problem is not None:
            return _refusal(request, problem)
        self.prompt_tokens += len(request.prompt)
        params = request.params
        if params.grammar:
            found = self._constraints.open(request, now)
            if isinstance(found, str):
                return _refusal(request, found)
            return None if found is None else self._queue(request, now, found)
        if params.ruled or params.thought is not None:
            return self._queue(request, now, None)
        self._scheduler.add(request, now)
        return None

    def take_grammars(self, now: float) -> Iterator[Delta]:
        """Queue the requests whose grammar has been compiled meanwhile; the deltas of those that end here."""
        for request in self._constraints.expired(now):
            yield Delta(request.request_id, finish_reason="timeout")
        for request, arrived, found in self._constraints.opened():
            # Checked again: its adapter, for example, may have been unloaded meanwhile.
            problem = found if isinstance(found, str) else self._problem(request, now)
            if problem is not None:
                yield _refusal(request, problem)
            elif not isinstance(found, str) and (refused := self._queue(request, arrived, found)) is not None:
                yield refused

    def _queue(self, request: Request, arrived: float, grammar: TokenMatcher | None) -> Delta | None:
        """Queue a request with a grammar, token rules or a thought; the delta that ends it when the tokens it comes
        with do not follow them."""
        seq = self._scheduler.add(request, arrived)
        problem = progress.begin(seq, grammar, self._vocab_size)
        if problem is None:
            return None
        seq.finish_reason = "error"
        self._scheduler.finish(seq)
        return _refusal(request, problem)

    def _problem(self, request: Request, now: float) -> str | None:
        """Why a request can never run; None when it can."""
        scheduler, window = self._scheduler, self._scheduler.max_model_len
        if not request.prompt:
            return "the prompt is empty"
        prompt = request.prompt + request.produced if request.produced else request.prompt
        if len(prompt) >= window:
            return f"the prompt has {len(prompt)} tokens; with at least one to generate, at most {window - 1} fit"
        # Behind the model's own tokens come those of adapters.
        room = 0 if request.adapter or scheduler.adapters is None else scheduler.adapters.room
        size = self._vocab_size - room
        if min(prompt) < 0 or max(prompt) >= size:
            return f"{TOKENS_UNKNOWN}: token ids must be between 0 and {size - 1}"
        params = request.params
        words = (token for word in params.bad_words for token in word)
        ids = (*params.stop_token_ids, *params.logit_bias, *params.allowed_token_ids, *words)
        if params.thought is not None:
            ids += params.thought.tokens
        if ids and (min(ids) < 0 or max(ids) >= size):
            return f"{TOKENS_UNKNOWN}: stop, allowed, forbidden and bias token ids must be between 0 and {size - 1}"
        if request.adapter:
            adapters = scheduler.adapters
            problem = NO_ADAPTERS if adapters is None else adapters.problem(request.adapter, now)
            if problem is not None:
                return problem
        if params.max_tokens <= len(request.produced):
            return "max_tokens leaves nothing to generate"
        if scheduler.get(request.request_id) is not None or self._constraints.is_opening(request.request_id):
            return f"request id {request.request_id!r} is already running"
        if scheduler.waiting + self._constraints.opening >= self._max_waiting:
            return f"{QUEUE_FULL} ({self._max_waiting} requests)"
        return None


def _refusal(request: Request, why: str) -> Delta:
    return Delta(request.request_id, finish_reason="error", error=why)
