"""A request in flight: its state while it runs on one replica after another.

A flight has a leg on the replica that runs it (two while it is hedged). It remembers the tokens that were delivered, so
that another replica can continue after them. Sampling noise is keyed by seed and position, and limits and penalties
count from the same prompt, so the text is the same as in an undisturbed run. Invariant: the client gets one sequence of
tokens, each token once, with one beginning and one end, whatever happened to the replicas.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.backends.mailbox import DeltaSink
from penstock.engine.request import Delta, Request

if TYPE_CHECKING:
    from penstock.routing.member import Member


PROBE_PRIORITY = -2
"""Priority of the gateway's own probes, which run before everything else and are no load."""


class Flight:
    """A request, the sink of its deltas, and the tokens delivered so far."""

    __slots__ = (
        *("alarm", "began_at", "begun", "hedge", "inbox", "index", "legs", "losses", "parked_at", "produced"),
        *("request", "resumed", "stopping"),
    )

    def __init__(self, request: Request, inbox: DeltaSink, index: int, began_at: float) -> None:
        self.request = request
        self.inbox = inbox
        self.index = index
        self.began_at = began_at
        self.produced: list[int] = list(request.produced)
        self.begun = False
        """Whether anything was delivered."""
        self.losses = 0
        """Number of replicas that failed under it."""
        self.legs: list[Leg] = []
        self.parked_at = began_at
        """When it was parked because no replica could take it."""
        self.hedge: asyncio.TimerHandle | None = None
        self.alarm: asyncio.TimerHandle | None = None
        """When it is refused unless an engine has begun with it."""
        self.resumed = False
        """Whether another replica continued after the delivered tokens."""
        self.stopping = False
        """Whether it was aborted; it ends with the final delta of its replica."""

    @property
    def id(self) -> str:
        return self.request.request_id

    def rest(self, now: float) -> Request:
        """The request for the next replica: what is left to generate."""
        request, params, timeout_s = self.request, self.request.params, self.request.timeout_s
        if not self.begun and request.patience_s is not None:
            left = self.patience_left(now)
            request = replace(request, patience_s=None if left == math.inf else left)
        if not self.losses and not self.begun:
            return request
        if timeout_s is not None:
            timeout_s = max(timeout_s - (now - self.began_at), 0.001)
        if not self.begun:
            return replace(request, timeout_s=timeout_s)
        if params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)  # delivered with the first token
        # An interrupted stream goes before requests that have not started.
        return replace(
            request,
            params=params,
            timeout_s=timeout_s,
            produced=list(self.produced),
            priority=request.priority - 1,
        )

    def impatient(self, now: float) -> bool:
        """Whether it has waited for its first token as long as it may."""
        return not self.begun and now > self.began_at + self._patience_s

    def patience_left(self, now: float) -> float:
        """Seconds that it may still wait before an engine begins with it; infinite where its client sets no limit."""
        return max(self.began_at + self._patience_s - now, 0.0)

    @property
    def _patience_s(self) -> float:
        request = self.request
        return math.inf if request.patience_s is None or request.produced else request.patience_s

    def deliver(self, delta: Delta) -> None:
        """Passes on a replica's delta."""
        if self.resumed:
            # Figures about the prompt belong to the first delta only; a later replica's would describe the resumption.
            delta.cached_tokens = delta.queue_s = delta.prefill_s = delta.prompt_logprobs = None
        self.begun = True
        self.produced += delta.tokens
        self.inbox.put(self.index, delta)

    def stop_timers(self) -> None:
        """It has begun, or is over: it needs no second replica, and is not refused."""
        for timer in (self.hedge, self.alarm):
            if timer is not None:
                timer.cancel()
        self.hedge = self.alarm = None


class Leg:
    """A flight on one replica: the sink of that replica's deltas. An ended leg ignores them."""

    __slots__ = ("_on_delta", "_on_failure", "computing", "flight", "helper", "member", "metered")

    def __init__(
        self,
        flight: Flight,
        member: Member,
        on_delta: Callable[[Leg, Delta], None],
        on_failure: Callable[[Leg, Exception], None],
        *,
        metered: bool,
    ) -> None:
        """`metered`: whether the replica's meter counts it."""
        self.flight = flight
        self.member = member
        self._on_delta = on_delta
        self._on_failure = on_failure
        self.metered = metered
        self.computing = False
        """Whether its engine has begun to compute the prompt; told only of requests with a `patience_s`."""
        self.helper: Member | None = None
        """The prefill replica that computes its prompt, until the first token."""

    def helped(self, now: float) -> None:
        """Ends the prefill replica's part: the prompt is computed or no longer needed."""
        if self.helper is not None:
            self.helper.meter.ended(self.flight.id, now)
            self.helper = None

    @property
    def committed(self) -> bool:
        return self.flight.inbox.committed

    @property
    def answered(self) -> bool:
        return self.flight.inbox.answered

    def put(self, index: int, delta: Delta) -> None:
        self._on_delta(self, delta)

    def fail(self, error: Exception) -> None:
        self._on_failure(self, error)
