"""How many tokens an engine produced for each request, including those whose gateway died.

A gateway that dies leaves charges open; the gateway that settles them asks the engine what was really produced. The ids
of the requests behind one charge begin with the charge's id, up to the colon (`charge_of`). Finished requests are
remembered for `keep_s`, at most `most` of them; the oldest are forgotten first. Of resumable requests the tokens
themselves are kept too, for `RESUME_S` after the end, so that a client whose connection broke, or whose gateway died,
can go on: at most `MOST_KEPT` of them.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from penstock.engine.request import Delta, Request, TokenLogprob
from penstock.protocol.messages import RESUME_S, TALLY_KEEP_S, Claimed, Produced, charge_of

MOST = 65_536
MOST_KEPT = 8 * 2**20
"""Tokens, of prompts and answers, that are kept of resumable requests that have ended; log-probabilities count like
tokens."""


MOST_CLAIMS = 32
"""How often a stream is resumed. It costs the client nothing, but the engine may have to compute the prompt again."""


class _Resumable:
    """A resumable request with its tokens."""

    __slots__ = ("broken_off", "claims", "logprobs", "request", "tokens")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = list(request.produced)
        self.logprobs: list[TokenLogprob] = []
        self.claims = 0
        self.broken_off = False
        """Whether its gateway has died, or its client is gone."""

    def add(self, delta: Delta) -> None:
        self.tokens.extend(delta.tokens)
        if delta.logprobs is not None:
            self.logprobs.extend(delta.logprobs)

    @property
    def whole(self) -> bool:
        """Whether it has everything that was shown; not so of log-probabilities that another engine computed."""
        return self.request.params.logprobs is None or len(self.logprobs) == len(self.tokens)

    @property
    def size(self) -> int:
        each = 1 + (self.request.params.logprobs or 0)
        return len(self.request.prompt) + len(self.tokens) + len(self.logprobs) * each

    def fits(self, claim: Request) -> bool:
        """Whether a claim is for the same text with the same parameters, by the same client."""
        own = self.request
        params = dataclasses.replace(claim.params, seed=own.params.seed)
        return (own.resumable_by, own.adapter, own.cache_salt, own.params, own.prompt) == (
            claim.resumable_by, claim.adapter, claim.cache_salt, params, claim.prompt,
        )  # fmt: skip


class Tally:
    """Counts what deltas say. One thread uses it."""

    def __init__(
        self,
        *,
        keep_s: float = TALLY_KEEP_S,
        most: int = MOST,
        most_kept: int = MOST_KEPT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep_s = keep_s
        self._most = most
        self._most_kept = most_kept
        self._clock = clock
        self._running: dict[str, Produced] = {}
        self._ended: OrderedDict[str, float] = OrderedDict()
        self._groups: dict[str, dict[str, Produced]] = {}
        self._resumable: dict[str, _Resumable] = {}
        self._kept: OrderedDict[str, float] = OrderedDict()
        self._kept_tokens = 0

    def begin(self, request_id: str, *, already: int = 0, request: Request | None = None) -> None:
        """A request was accepted; it brings `already` tokens from where it ran before. A reused id starts over.
        `request`: given if it is resumable."""
        earlier = self._resumable.get(request_id)
        self._forget(request_id)
        entry = self._running[request_id] = Produced(request_id, already)
        self._groups.setdefault(charge_of(request_id), {})[request_id] = entry
        if request is not None:
            kept = self._resumable[request_id] = _Resumable(request)
            if earlier is not None:  # a resumed stream goes on here
                kept.logprobs, kept.claims = earlier.logprobs[: len(kept.tokens)], earlier.claims

    def add(self, deltas: Iterable[Delta]) -> None:
        running, resumable = self._running, self._resumable
        for delta in deltas:
            entry = running.get(delta.request_id)
            if entry is None:
                continue  # it has finished already, or was never accepted
            entry.tokens += len(delta.tokens)
            if resumable and (kept := resumable.get(delta.request_id)) is not None:
                kept.add(delta)
            if delta.cached_tokens is not None:
                entry.cached_tokens = delta.cached_tokens
            if delta.finish_reason is not None:
                entry.finish_reason = delta.finish_reason
                del running[delta.request_id]
                self._ended[delta.request_id] = self._clock()
                self._trim()
                self._keep(delta.request_id)

    def of(self, groups: Iterable[str]) -> list[Produced]:
        """Every request of these charges that is running or remembered."""
        self._drop_old()
        return [entry for group in groups for entry in self._groups.get(group, {}).values()]

    def broken_off(self, request_id: str) -> None:
        """The gateway of this request has died, or its client is gone; it is about to be aborted."""
        if (kept := self._resumable.get(request_id)) is not None:
            kept.broken_off = True

    def release(self, request_id: str) -> None:
        """Its gateway ends this request itself: nobody will resume it."""
        self._drop(request_id)

    def claim(self, question: str, charge: str, request: Request) -> Claimed:
        """The tokens of a resumable request of `charge`, if `request` is the same."""
        self._drop_old()
        for request_id, entry in self._groups.get(charge, {}).items():
            kept = self._resumable.get(request_id)
            if kept is None or not kept.whole or not kept.fits(request):
                continue
            if entry.finish_reason is None:
                return Claimed(question, running=True, request_id=request_id)
            if entry.finish_reason == "error" or (entry.finish_reason == "abort" and not kept.broken_off):
                continue  # it failed, or its gateway ended it: there is nothing to go on with
            if kept.claims >= MOST_CLAIMS:
                continue
            kept.claims += 1
            self._kept[request_id] = self._clock()  # until the request arrives that goes on with it
            self._kept.move_to_end(request_id)
            return Claimed(
                question,
                found=True,
                request_id=request_id,
                seed=kept.request.params.seed,
                tokens=kept.tokens,
                logprobs=kept.logprobs or None,
                cached_tokens=entry.cached_tokens,
                finish_reason=None if entry.finish_reason == "abort" else entry.finish_reason,
            )
        return Claimed(question)

    def _keep(self, request_id: str) -> None:
        kept = self._resumable.get(request_id)
        if kept is not None:
            self._kept[request_id] = self._clock()
            self._kept_tokens += kept.size
            self._mark(request_id, True)
        if self._kept:
            self._drop_old()

    def _drop_old(self) -> None:
        oldest = self._clock() - RESUME_S
        while self._kept:
            request_id, at = next(iter(self._kept.items()))
            if at > oldest and self._kept_tokens <= self._most_kept:
                return
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        kept = self._resumable.pop(request_id, None)
        if self._kept.pop(request_id, None) is not None and kept is not None:
            self._kept_tokens -= kept.size
            self._mark(request_id, False)

    def _mark(self, request_id: str, resumable: bool) -> None:
        entry = self._groups.get(charge_of(request_id), {}).get(request_id)
        if entry is not None:
            entry.resumable = resumable

    def _trim(self) -> None:
        """Called for each request that ends, and looks at two, so that old entries go while there is traffic."""
        oldest = self._clock() - self._keep_s
        for _ in range(2):
            if not self._ended:
                return
            request_id, at = next(iter(self._ended.items()))
            if at > oldest and len(self._ended) <= self._most:
                return
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._drop(request_id)
        self._ended.pop(request_id, None)
        self._running.pop(request_id, None)
        group = self._groups.get(charge_of(request_id))
        if group is not None and group.pop(request_id, None) is not None and not group:
            del self._groups[charge_of(request_id)]
