"""How many tokens an engine produced for each request, including those whose gateway died.

A gateway that dies leaves charges open; the gateway that settles them asks the engine what was really produced. The ids
of the requests behind one charge begin with the charge's id, up to the colon (`charge_of`). Finished requests are
remembered for `keep_s`, at most `most` of them; the oldest are forgotten first. Of resumable requests the tokens
themselves are kept too, for `RESUME_S` after the end, so that a client whose gateway died can go on: at most
`MOST_KEPT` of them.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from penstock.engine.request import Delta, Request
from penstock.protocol.messages import RESUME_S, TALLY_KEEP_S, Claimed, Produced, charge_of

MOST = 65_536
MOST_KEPT = 8 * 2**20
"""Tokens, of prompts and answers, that are kept of resumable requests that have ended."""


class _Resumable:
    """A resumable request with its tokens."""

    __slots__ = ("broken_off", "request", "tokens")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = list(request.produced)
        self.broken_off = False
        """Whether its gateway has died."""

    @property
    def size(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    def fits(self, claim: Request) -> bool:
        """Whether a claim is for the same text with the same parameters, by the same tenant."""
        own = self.request
        params = dataclasses.replace(claim.params, seed=own.params.seed)
        return (own.owner, own.adapter, own.cache_salt, own.params, own.prompt) == (
            claim.owner, claim.adapter, claim.cache_salt, params, claim.prompt,
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
        self._forget(request_id)
        entry = self._running[request_id] = Produced(request_id, already)
        self._groups.setdefault(charge_of(request_id), {})[request_id] = entry
        if request is not None:
            self._resumable[request_id] = _Resumable(request)

    def add(self, deltas: Iterable[Delta]) -> None:
        running, resumable = self._running, self._resumable
        for delta in deltas:
            entry = running.get(delta.request_id)
            if entry is None:
                continue  # it has finished already, or was never accepted
            entry.tokens += len(delta.tokens)
            if resumable and (kept := resumable.get(delta.request_id)) is not None:
                kept.tokens.extend(delta.tokens)
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
        """The gateway of this request has died; it is about to be aborted."""
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
            if kept is None or not kept.fits(request):
                continue
            if entry.finish_reason is None:
                return Claimed(question, running=True)
            if entry.finish_reason == "error" or (entry.finish_reason == "abort" and not kept.broken_off):
                continue  # it failed, or its gateway ended it: there is nothing to go on with
            self._kept[request_id] = self._clock()  # until the request arrives that goes on with it
            self._kept.move_to_end(request_id)
            return Claimed(
                question,
                found=True,
                request_id=request_id,
                seed=kept.request.params.seed,
                tokens=kept.tokens,
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
