"""What admission makes of an arriving request, without its queue: expected cost, patience, decision, time to retry.

Shared by the gateway's controller and the simulator, so the caller passes time, state and capacity. Its only state is
the usual length of an answer, learned from those that ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.config.routing import AdmissionConfig
from penstock.routing.admission.decision import DecisionInput, Verdict, decide, fits, predicted_wait
from penstock.routing.admission.queue import Capacity, QueueEntry, QueueState, class_max_wait_s, cost_of
from penstock.routing.placement import ANYWHERE, Placement

USUAL_OUTPUT = 256.0
"""Expected tokens of an answer before any answer has been measured."""
OUTPUT_STEP = 0.05
"""Weight of the newest answer in the mean answer length."""


class AdmissionRequest(msgspec.Struct, frozen=True):
    """A request that asks to be admitted, as the gateway describes it."""

    id: str
    tenant: str
    rank: int
    weight: float
    prompts: Sequence[list[int]]
    sequences: int
    """Answers generated in parallel."""
    max_output_tokens: int
    """Limit of all answers together."""
    salt: str = ""
    """Cache salt: prompts share cached prefixes only within one salt."""
    budget_left: float = 1.0
    tier: str = ""
    placement: Placement = ANYWHERE
    """The pools and regions that it may run in."""
    max_wait_s: float | None = None
    """How long the client is willing to wait; capped by the limit of its class."""


class Assessment(msgspec.Struct, frozen=True):
    """An arriving request as the queue sees it."""

    entry: QueueEntry
    patience: float
    """Seconds that it may wait."""
    refusal: Verdict | None
    """Why it may not even wait; None: it may."""


class Triage:
    """Assesses the requests of one model."""

    def __init__(self, config: AdmissionConfig, roll: Callable[[], float]) -> None:
        """`roll`: uniform in [0, 1)."""
        self._config = config
        self._roll = roll
        self._usual_output = USUAL_OUTPUT

    def assess(
        self,
        request: AdmissionRequest,
        prompt_tokens: int,
        cached_tokens: Callable[[], int],
        state: QueueState,
        capacity: Capacity,
        now: float,
    ) -> Assessment:
        """`cached_tokens` estimates how much of the prompt is cached; it is called only when that matters."""
        config, rank = self._config, request.rank
        cached = 0
        if state.depth or capacity.slots is None or 2 * state.in_flight >= capacity.slots:
            # The cache estimate matters only when capacity is short; otherwise it is not worth its cost.
            cached = cached_tokens()
        output = min(request.max_output_tokens, round(self._usual_output * request.sequences))
        entry = QueueEntry(
            request.id,
            request.tenant,
            rank,
            request.weight,
            cost_of(prompt_tokens - cached, output),
            prompt_tokens - cached + output,
            request.sequences,
            now,
        )
        patience = class_max_wait_s(config, rank)
        if request.max_wait_s is not None:
            patience = min(patience, request.max_wait_s)
        if state.depth or not fits(entry, state.in_flight, state.kv_tokens, capacity):
            arriving = DecisionInput(entry, prompt_tokens, cached, request.budget_left, patience)
            verdict = decide(arriving, state, capacity, config, self._roll())
            if verdict.action == "refuse":
                return Assessment(entry, patience, verdict)
        return Assessment(entry, patience, None)

    def retry_after(self, entry: QueueEntry, state: QueueState, wait_s: float | None = None) -> int:
        """Seconds after which a request that is not admitted should be tried again; `wait_s`: its predicted wait, if it
        is known already."""
        if wait_s is None:
            wait_s = predicted_wait(entry, state, self._config)
        # By then every request that waits now has been served or has timed out. Rounded to the nearest second: always
        # rounding up would bias the estimate.
        return round(min(wait_s, class_max_wait_s(self._config, entry.rank)))

    def answered(self, tokens: float) -> None:
        """Takes the length of a finished answer into the mean."""
        self._usual_output += OUTPUT_STEP * (tokens - self._usual_output)
