"""Time slicing: decides which of several models that share memory is awake.

At most one is awake, for at least `slice_s`, whatever is requested meanwhile, so that memory is not swapped back and
forth for single requests. When its slice is over and a request waits for another model, it takes no new requests and
finishes the running ones; the model with the longest-waiting request is next. So no request waits longer than one
slice, one longest request and one switch per other model.

A plain object with an injected clock: `TimeSliceGroup` carries out what `next_move` returns and reports back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["idle", "waking", "awake", "falling"]
"""`idle`: no model is awake. `falling`: the model is being put to sleep."""


@dataclass(frozen=True, slots=True)
class Transition:
    """The next step: wake a model or put it to sleep."""

    kind: Literal["wake", "sleep"]
    model: str


class TimeSlicePolicy:
    """The state of one group of models."""

    def __init__(self, slice_s: float, clock: Callable[[], float]) -> None:
        self.slice_s = slice_s
        self._clock = clock
        self.phase: Phase = "idle"
        self.model: str | None = None
        """The model that is awake, waking, or being put to sleep."""
        self._until = 0.0
        self._holders: Counter[str] = Counter()
        self._waiting: dict[int, tuple[str, float]] = {}
        self._serial = 0

    @property
    def holders(self) -> int:
        """Number of requests that run on the awake model."""
        return self._holders.total()

    def wait(self, model: str) -> int:
        """Registers a request that waits for `model`; returns its ticket."""
        self._serial += 1
        self._waiting[self._serial] = (model, self._clock())
        return self._serial

    def leave(self, ticket: int) -> None:
        """Removes a waiting request."""
        self._waiting.pop(ticket, None)

    def admit(self, ticket: int) -> bool:
        """Whether the request may run now; if so, it keeps its model awake until `release`."""
        model, _ = self._waiting[ticket]
        if self.phase != "awake" or model != self.model or self._must_go():
            return False
        del self._waiting[ticket]
        self._holders[model] += 1
        return True

    def release(self, model: str) -> None:
        """Ends an admitted request."""
        self._holders[model] -= 1
        assert self._holders[model] >= 0
        self._holders = +self._holders

    def next_move(self) -> Transition | None:
        """What to do now, if anything. The caller reports the start with `began` and the end with `woke` or `slept`."""
        if self.phase == "idle":
            waiting = self._longest_waiting()
            return None if waiting is None else Transition("wake", waiting)
        if self.phase == "awake" and self.model is not None and not self.holders and self._must_go():
            return Transition("sleep", self.model)
        return None

    def due_in(self) -> float | None:
        """Seconds until the passing of time alone changes `next_move`; None when only events can."""
        if self.phase != "awake" or self._rival() is None or self._clock() >= self._until:
            return None
        return self._until - self._clock()

    def began(self, move: Transition) -> None:
        assert self.phase in ("idle", "awake") and (self.model is None or move.model == self.model)
        self.phase, self.model = ("waking" if move.kind == "wake" else "falling"), move.model

    def woke(self) -> None:
        self.phase, self._until = "awake", self._clock() + self.slice_s

    def slept(self) -> None:
        """Reports that the model is asleep, either as told or because its engine was restarted."""
        self.phase, self.model = "idle", None

    def _must_go(self) -> bool:
        return self._clock() >= self._until and self._rival() is not None

    def _rival(self) -> str | None:
        return next((model for model, _ in self._waiting.values() if model != self.model), None)

    def _longest_waiting(self) -> str | None:
        return min(self._waiting.values(), key=lambda entry: entry[1], default=(None, 0.0))[0]
