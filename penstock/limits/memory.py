"""Limits counted in this process, for a single gateway."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.limits.base import STEPS, Amounts, Decision, Limit, LimitState, LimitStore, Refusal

_SWEEP = 4096
"""Number of windows at which expired ones are removed; afterwards twice as many as remained."""


@dataclass(slots=True)
class _Window:
    """Amounts by step; only the last STEPS + 1 steps count."""

    steps: dict[int, int] = field(default_factory=dict)
    expires: float = 0.0
    """When nothing in it counts any more."""


@dataclass(slots=True)
class _Reservation:
    step: dict[str, int]


class MemoryLimits(LimitStore):
    """See `LimitStore`."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._windows: dict[str, _Window] = {}
        self._reservations: dict[str, _Reservation] = {}
        self._sweep_at = _SWEEP

    async def reserve(self, id: str, limits: Sequence[Limit], amounts: Amounts) -> Decision:
        now = self._clock()
        for limit in limits:
            refusal = self._refusal(limit, amounts.of(limit.metric), now)
            if refusal is not None:
                return Decision(self._standings(limits, now), refusal)
        taken: dict[str, int] = {}
        for limit in limits:
            step = int(now / limit.step_s)
            window = self._windows.setdefault(limit.subject, _Window())
            window.steps[step] = window.steps.get(step, 0) + amounts.of(limit.metric)
            window.expires = now + limit.window_s + 2 * limit.step_s
            taken[limit.subject] = step
        self._reservations[id] = _Reservation(taken)
        if len(self._windows) > self._sweep_at:
            self._sweep(now)
        return Decision(self._standings(limits, now))

    async def settle(self, id: str, limits: Sequence[Limit], reserved: Amounts, used: Amounts) -> None:
        reservation = self._reservations.pop(id, None)
        if reservation is None:
            return
        for limit in limits:
            step, window = reservation.step.get(limit.subject), self._windows.get(limit.subject)
            if step is None or window is None or step not in window.steps:
                continue
            after = 0 if limit.metric == "concurrent" else used.of(limit.metric)
            left = window.steps[step] + after - reserved.of(limit.metric)
            if left > 0:
                window.steps[step] = left
            else:
                del window.steps[step]

    def _refusal(self, limit: Limit, amount: int, now: float) -> Refusal | None:
        if amount > limit.most:
            return Refusal(limit, None)
        used = self._used(limit, now)
        if used + amount <= limit.most:
            return None
        # The oldest steps leave the window first: the wait until enough of them have left.
        excess, window = used + amount - limit.most, self._windows[limit.subject]
        for step in sorted(window.steps):
            excess -= window.steps[step]
            if excess <= 0:
                return Refusal(limit, max(0.0, (step + 1) * limit.step_s + limit.window_s - now))
        return Refusal(limit, limit.window_s)

    def _used(self, limit: Limit, now: float) -> int:
        """The amount in the window; removes steps that have left it."""
        window = self._windows.get(limit.subject)
        if window is None:
            return 0
        first = int(now / limit.step_s) - STEPS
        for step in [step for step in window.steps if step < first]:
            del window.steps[step]
        return sum(window.steps.values())

    def _standings(self, limits: Sequence[Limit], now: float) -> tuple[LimitState, ...]:
        return tuple(LimitState(limit, self._used(limit, now), self._reset(limit, now)) for limit in limits)

    def _reset(self, limit: Limit, now: float) -> float:
        window = self._windows.get(limit.subject)
        if window is None or not window.steps:
            return 0.0
        return max(0.0, (max(window.steps) + 1) * limit.step_s + limit.window_s - now)

    def _sweep(self, now: float) -> None:
        self._windows = {name: window for name, window in self._windows.items() if window.expires > now}
        self._sweep_at = max(_SWEEP, 2 * len(self._windows))
