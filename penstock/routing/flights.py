"""One request on its way through the replicas of a model.

A flight has a leg on the replica that runs it (two while it is hedged). It remembers the tokens that were passed on, so
that another replica can go on behind them: noise is keyed by seed and position, limits and penalties count from the
same prompt, so the text is the one that an undisturbed run would have given. Invariant: what reaches the reader is one
sequence of tokens, each once, with one beginning and one end, whatever happened to the replicas in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.backends.mailbox import DeltaSink
from penstock.engine.request import Delta, Request

if TYPE_CHECKING:
    from penstock.routing.member import Member


class Flight:
    """A request, its reader, and what the reader has got so far."""

    __slots__ = (
        *("began_at", "begun", "hedge", "inbox", "index", "legs", "losses", "parked_at", "produced", "request"),
        *("resumed", "stopping"),
    )

    def __init__(self, request: Request, inbox: DeltaSink, index: int, began_at: float) -> None:
        self.request = request
        self.inbox = inbox
        self.index = index
        self.began_at = began_at
        self.produced: list[int] = list(request.produced)
        self.begun = False
        """Whether the reader has got anything."""
        self.losses = 0
        """Replicas that failed under it."""
        self.legs: list[Leg] = []
        self.parked_at = began_at
        """When it was parked, if it is: since when no replica could take it."""
        self.hedge: asyncio.TimerHandle | None = None
        self.resumed = False
        """Whether a further replica went on behind what the reader had got."""
        self.stopping = False
        """Whether it was aborted; it ends with the last word of its replica."""

    @property
    def id(self) -> str:
        return self.request.request_id

    def rest(self, now: float) -> Request:
        """What is left to do, for the next replica."""
        if not self.losses and not self.begun:
            return self.request
        request, params, timeout_s = self.request, self.request.params, self.request.timeout_s
        if timeout_s is not None:
            timeout_s = max(timeout_s - (now - self.began_at), 0.001)
        if not self.begun:
            return replace(request, timeout_s=timeout_s)
        if params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)  # they came with the first token
        # A stream that stands still goes before requests that have not begun.
        return replace(
            request,
            params=params,
            timeout_s=timeout_s,
            produced=list(self.produced),
            priority=request.priority - 1,
        )

    def deliver(self, delta: Delta) -> None:
        """Pass on what a replica produced."""
        if self.resumed:
            # Only the reader's first delta tells of the prompt; what the next replica found is not what was asked for.
            delta.cached_tokens = delta.queue_s = delta.prefill_s = delta.prompt_logprobs = None
        self.begun = True
        self.produced += delta.tokens
        self.inbox.put(self.index, delta)

    def stop_hedging(self) -> None:
        if self.hedge is not None:
            self.hedge.cancel()
            self.hedge = None


class Leg:
    """A flight on one replica: where that replica's deltas go. A dead leg hears nothing any more."""

    __slots__ = ("_on_delta", "_on_failure", "flight", "helper", "member", "metered")

    def __init__(
        self,
        flight: Flight,
        member: Member,
        on_delta: Callable[[Leg, Delta], None],
        on_failure: Callable[[Leg, Exception], None],
        *,
        metered: bool,
    ) -> None:
        """`metered`: the replica's meter counts it."""
        self.flight = flight
        self.member = member
        self._on_delta = on_delta
        self._on_failure = on_failure
        self.metered = metered
        self.helper: Member | None = None
        """Who computes its prompt, until it has a token."""

    def helped(self, now: float) -> None:
        """Its prompt is computed, or nobody needs it any more."""
        if self.helper is not None:
            self.helper.meter.ended(self.flight.id, now)
            self.helper = None

    def put(self, index: int, delta: Delta) -> None:
        self._on_delta(self, delta)

    def fail(self, error: Exception) -> None:
        self._on_failure(self, error)
