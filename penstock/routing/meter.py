"""This gateway's view of one replica: the engine's load snapshot plus the work sent but not yet reported.

A snapshot is as old as the last step. What was sent since is known only here; without it a burst would go to one
replica that still looks idle. Queued tokens and speed are both measured on this gateway's own requests, so with several
gateways each sees its share of both, and their quotient, the predicted wait, stays right.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.request import Delta, EngineInfo, EngineLoad
from penstock.routing.policy import ReplicaView
from penstock.routing.rate import BusyRate

SHARE_STEP = 0.1
"""Weight of the newest request in the mean uncached share of a prompt."""


@dataclass(slots=True)
class _Work:
    prompt_tokens: int
    expected_output: int
    started: bool = False
    generated: int = 0


class ReplicaMeter:
    """Counts the requests sent to one replica and the tokens it returns. The caller passes the time."""

    def __init__(self) -> None:
        self._work: dict[str, _Work] = {}
        self._queued_tokens = 0
        self._decoding_tokens = 0
        self._unstarted = 0
        self._prefill = BusyRate()
        self._decode = BusyRate()
        self._fresh_share = 1.0

    @property
    def in_flight(self) -> int:
        return len(self._work)

    def sent(self, request_id: str, prompt_tokens: int, expected_output: int, now: float) -> None:
        """Counts a request that was sent to the replica."""
        self._work[request_id] = _Work(prompt_tokens, expected_output)
        self._queued_tokens += prompt_tokens
        self._decoding_tokens += expected_output
        self._unstarted += 1
        if self._unstarted == 1:
            self._prefill.busy(now, True)

    def received(self, delta: Delta, now: float) -> None:
        """Counts a delta; deltas of unknown requests are ignored."""
        work = self._work.get(delta.request_id)
        if work is None:
            return
        count = len(delta.tokens)
        if count:
            self.started(delta.request_id, delta.cached_tokens or 0, now)
            self.generated(delta.request_id, count)
            self._decode.add(now, count)
        if delta.finish_reason is not None:
            self.ended(delta.request_id, now)

    def started(self, request_id: str, cached_tokens: int, now: float) -> None:
        """Counts a request's first token; only the first call counts."""
        work = self._work.get(request_id)
        if work is None or work.started:
            return
        self._started(work, now)
        fresh = max(work.prompt_tokens - cached_tokens, 1)
        self._prefill.add(now, fresh)
        self._fresh_share += SHARE_STEP * (fresh / work.prompt_tokens - self._fresh_share)

    def generated(self, request_id: str, count: int) -> None:
        """Counts tokens of a request towards what it was expected to generate."""
        work = self._work.get(request_id)
        if work is not None:
            left = work.expected_output - work.generated
            work.generated += count
            if left > 0:
                self._decoding_tokens -= min(left, count)

    def decoded(self, count: int, now: float, since: float) -> None:
        """Counts tokens, of any requests, that came evenly between `since` and now towards the measured speed."""
        self._decode.add_evenly(now, count, since)

    def ended(self, request_id: str, now: float) -> None:
        """Ends a request, whatever its outcome. Safe to call twice."""
        work = self._work.pop(request_id, None)
        if work is None:
            return
        if not work.started:
            self._started(work, now)
        self._decoding_tokens -= self._left(work)
        if len(self._work) == self._unstarted:
            self._decode.busy(now, False)

    def lost(self, now: float) -> None:
        """Ends all requests: the replica is gone."""
        for request_id in list(self._work):
            self.ended(request_id, now)
        self.forget_speed()

    def forget_speed(self) -> None:
        """It failed: the time in which nothing came says nothing of how fast it is. With a speed that an outage had
        made low it would get no request that could show otherwise."""
        if not self._work:
            self._prefill, self._decode = BusyRate(), BusyRate()

    def view(
        self,
        name: str,
        load: EngineLoad,
        info: EngineInfo | None,
        now: float,
        weight: float = 1.0,
        round_trip_s: float = 0.0,
    ) -> ReplicaView:
        unreported = max(0, len(self._work) - load.running - load.waiting)
        return ReplicaView(
            name=name,
            running=load.running,
            waiting=load.waiting + unreported,
            slots=info.max_running if info is not None else 0,
            queued_tokens=round(self._queued_tokens * self._fresh_share),
            decoding_tokens=self._decoding_tokens,
            kv_use=load.used_blocks / load.total_blocks if load.total_blocks else 0.0,
            total_blocks=load.total_blocks,
            prefill_tokens_per_s=self._prefill.per_s(now),
            decode_tokens_per_s=self._decode.per_s(now),
            round_trip_s=round_trip_s,
            weight=weight,
        )

    def _started(self, work: _Work, now: float) -> None:
        work.started = True
        self._queued_tokens -= work.prompt_tokens
        self._unstarted -= 1
        if not self._unstarted:
            self._prefill.busy(now, False)
        if len(self._work) - self._unstarted == 1:
            self._decode.busy(now, True)

    @staticmethod
    def _left(work: _Work) -> int:
        return max(work.expected_output - work.generated, 0)
