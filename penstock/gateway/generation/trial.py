"""The part of one request in an experiment: its arm, and what is learned from how it ends.

Counted is the arm that the request was given, whoever answered it in the end: a canary that fails and whose request is
then answered by the control has failed. Not counted: answers from the response cache (as latency and cost), requests
that are wrong for every model, and clients that leave, except that one who left before the first token waited so long.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, Protocol

from penstock.gateway.accounting.metered import Metered
from penstock.gateway.app.exchange import ClientDisconnected, Exchange
from penstock.protocol.errors import ApiError

SERVER_FAULT = 500
SHADOW = "shadow/"
"""Before the model's name: the arm of a shadow."""

Again = Callable[[Any], Awaitable[Any]]
"""Makes the generation of a request once more, for another attempt."""


def arm_label(experiment: str, arm: str) -> str:
    return f"{experiment}; arm={arm}"


def parsed_label(label: str) -> tuple[str, str]:
    """The experiment and the arm of a label."""
    experiment, _, arm = label.partition("; arm=")
    return experiment, arm


class Tally(Protocol):
    """Takes what was learned."""

    def count(self, experiment: str, arm: str, measure: str, value: float) -> None: ...

    def ended(self, experiment: str, arm: str, outcome: str) -> None: ...

    def answered(self, trial: Trial, ttft_s: float | None, latency_s: float) -> None: ...

    def cost(self, tier: str, generation: Metered) -> int:
        """Nanodollars."""


class Trial:
    """See above. `model`: the name that the arm stands for. `graded`: the share of answers that the judge grades."""

    __slots__ = (
        *("_begun", "_tally", "again", "arm", "counted", "cost_nanos", "experiment", "from_cache", "graded", "model"),
        *("shadows", "tokens"),
    )

    def __init__(
        self, experiment: str, arm: str, model: str, tally: Tally, *, graded: float = 0.0, shadows: tuple[str, ...] = ()
    ) -> None:
        """`shadows`: models that shall get the request too."""
        self.experiment = experiment
        self.arm = arm
        self.model = model
        self.graded = graded
        self.shadows = shadows
        self.again: Again | None = None
        self.from_cache = False
        self.tokens = self.cost_nanos = 0
        self.counted = False
        self._tally = tally
        self._begun = monotonic()

    @property
    def label(self) -> str:
        """For the reply, the ledger and the request log."""
        return arm_label(self.experiment, self.arm)

    @property
    def wants_again(self) -> bool:
        """Whether a shadow gets the request too. Of an answer in several steps it gets the first."""
        return bool(self.shadows) and self.again is None

    def ran(self, tier: str, generation: Metered) -> None:
        """A generation of the arm has ended; an answer may have several."""
        self.from_cache = self.from_cache or generation.from_cache
        if generation.billable:
            self.tokens += generation.completion_tokens
            self.cost_nanos += self._tally.cost(tier, generation)

    def answered(self, exchange: Exchange) -> None:
        first = exchange.record.ttft_ms
        self.succeeded(None if first is None else first / 1000, exchange.elapsed_s)

    def succeeded(self, ttft_s: float | None, latency_s: float) -> None:
        if self._end("answered"):
            count = self._count
            count("errors", 0.0)
            if self.from_cache:
                return
            if ttft_s is not None:
                count("ttft", math.log(max(ttft_s, 1e-6)))
                decoding = latency_s - ttft_s
                if self.tokens > 1 and decoding > 0:
                    count("speed", math.log((self.tokens - 1) / decoding))
            count("latency", math.log(max(latency_s, 1e-6)))
            count("cost", self.cost_nanos / 1e9)
            count("tokens", float(self.tokens))
            self._tally.answered(self, ttft_s, latency_s)

    def failed(self, exchange: Exchange, error: BaseException, *, control_serves: bool = False) -> None:
        """`control_serves`: the control has answered what the arm refused."""
        if isinstance(error, ApiError) and error.status < SERVER_FAULT and not control_serves:
            self._end("refused")
        elif isinstance(error, Exception) and not isinstance(error, ClientDisconnected):
            if self._end("failed"):
                self._count("errors", 1.0)
        elif self._end("left") and exchange.record.ttft_ms is None:
            self._count("ttft", math.log(max(monotonic() - self._begun, 1e-6)))

    def diverted(self) -> None:
        """Another model has answered, as under overload: that says nothing about the arm."""
        self._end("diverted")

    def _end(self, outcome: str) -> bool:
        """Whether it ends with this; only once."""
        if self.counted:
            return False
        self.counted = True
        self._tally.ended(self.experiment, self.arm, outcome)
        return True

    def _count(self, measure: str, value: float) -> None:
        self._tally.count(self.experiment, self.arm, measure, value)
